"""How the emulated daemon answers commands of protocol 3, without processes."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.sim.mps.config3 import Config, ConfigError, parse_config
from mpsd.sim.mps.control3 import Control3
from mpsd.sim.mps.grammar3 import MODULES, help_for, name_of, parse
from mpsd.sim.mps.state3 import Server3
from mpsd.sim.mps.table3 import CLIENTS, render
from mpsd.sim.mps.views import ACTIVE, ClientView, DeviceView, Limit, Refused, ServerView, Settings
from mpsd.sim.switches import SWITCHES

DEVICES = (DeviceView("GPU-aa11", "Simulated", "00:01"), DeviceView("GPU-bb22", "Simulated", "00:02"))
OWNER, STRANGER = 500, 60000


def switched(**values: str) -> Callable[[str], str]:
    return lambda name: values.get(name.replace("-", "_"), SWITCHES[name][0])


def make(*, multiuser: bool = False, floor_g: bool = True, **switches: str) -> Control3:
    settings = Settings(DEVICES, switched(**switches), floor_g=floor_g, command_of=lambda pid: "prog -x, y")
    return Control3(settings, "/run/mps", OWNER, multiuser)


def call(control: Control3, line: str, uid: int = OWNER) -> str:
    """The text of a command that must succeed."""
    status, text, _ = control.execute(line.split(), uid)
    assert status == 0, text
    return text


def refusal(control: Control3, line: str, uid: int = OWNER) -> str:
    status, text, actions = control.execute(line.split(), uid)
    assert (status, actions) == (1, [])
    return text


def with_server(control: Control3, *clients: tuple[int, str], name: str = "s") -> Server3:
    """A running server, with clients by PID and namespace."""
    call(control, f"server create {name}", uid=0 if control.multiuser else OWNER)
    server = control.servers[name]
    server.process = ServerView(100, server.uid)
    server.process.state = ACTIVE
    for number, (pid, namespace) in enumerate(clients, 1):
        if namespace not in server.namespaces:
            call(control, f"namespace create {namespace} --server={name}")
        server.process.clients[number] = ClientView(pid, OWNER, namespace)
        server.process.clients[number].device = DEVICES[0].uuid
    return server


MUTATING = (
    "server set s --pinned-memory-limit=1G",
    "server delete s",
    "namespace create m --server=s",
    "namespace set n --server=s --pinned-memory-limit=1G",
    "namespace delete n --server=s",
    "client terminate 7",
)


@pytest.mark.parametrize("line", MUTATING)
def test_changes_are_for_root_and_the_servers_owner(line: str) -> None:
    for uid in (0, OWNER, 700):
        control = make()
        with_server(control, (7, "x")).uid = 700
        call(control, "namespace create n --server=s")
        if line.startswith("server"):
            control.servers["s"].process = None
        verb = name_of(line.split()).upper()
        expected = f"Insufficient privileges for UID {STRANGER}. '{verb}' requires server owner."
        assert refusal(control, line, STRANGER) == expected
        call(control, line, uid)


@pytest.mark.parametrize("line", ["feature disable memacct", "memacct set audit_log=true", "server create x --uid=0"])
def test_what_concerns_the_daemon_is_for_root_only(line: str) -> None:
    assert "Insufficient privileges" in refusal(make(), line, STRANGER)
    call(make(), line)


def test_everybody_may_look() -> None:
    control = make()
    with_server(control, (7, "n"))
    for line in ("server list", "namespace list", "client list --all", "device list"):
        assert call(control, line, STRANGER)


def test_a_user_creates_servers_of_its_own() -> None:
    control = make()
    call(control, "server create mine", STRANGER)
    assert control.servers["mine"].uid == STRANGER
    assert "Insufficient" in refusal(control, "server create other --uid=1", STRANGER)
    assert "name or --uid" in refusal(control, "server create")


def test_a_multiuser_daemon_belongs_to_root() -> None:
    control = make(multiuser=True)
    call(control, "server create a")
    assert control.servers["a"].uid == 0
    assert refusal(control, "server create b --uid=500")
    assert refusal(control, "server set a --uid=500")
    assert "Insufficient" in refusal(control, "server create c", STRANGER)
    assert control.server_of_user(STRANGER)[0].name == "uid_0"
    assert make().server_of_user(STRANGER)[0].name == f"uid_{STRANGER}"


def test_refused_means_unchanged() -> None:
    control = make()
    with_server(control)
    for line in (
        "server set s --pinned-memory-limit=1G --locality-domains=maybe",
        "namespace set default --server=s --pinned-memory-limit=1G --client-priority=9",
        "server create t --locality-domains=maybe",
    ):
        assert refusal(control, line)
    assert call(control, "namespace get default s pinned-memory-limit") == "unlimited"
    assert list(control.servers) == ["s"]


@pytest.mark.parametrize(
    ("value", "floored", "as_set"),
    [("1536M", "1G", "1536M"), ("20G", "20G", "20G"), ("512M", "512M", "512M"), ("1024K", "1M", "1024K")],
)
def test_how_a_limit_prints(value: str, floored: str, as_set: str) -> None:
    for floor_g, shown in ((True, floored), (False, as_set)):
        control = make(floor_g=floor_g)
        with_server(control)
        call(control, f"namespace set default --server=s --pinned-memory-limit={value}")
        assert call(control, "namespace get default s pinned-memory-limit") == shown


@pytest.mark.parametrize("value", ["0", "0.5", "100.1", "nan", "1e1", "-3", "", "٣"])
def test_bad_percentages(value: str) -> None:
    control = make()
    with_server(control)
    assert refusal(control, f"namespace set default --server=s --active-thread-percentage={value}")


@pytest.mark.parametrize("field", ["pipe-directory", "pipe_directory"])
def test_fields_have_two_spellings(field: str) -> None:
    control = make()
    with_server(control)
    assert call(control, f"namespace get default s {field}") == "/run/mps/s/default"
    assert call(control, f"server get s {field}") == "/run/mps/s"
    assert "Fields:" in refusal(control, "server get s colour")


def test_layouts_by_switch() -> None:
    control = make()
    server = with_server(control, (7, "n"))
    list_clients = "client list --format=csv,noheader"
    assert call(control, list_clients) == '7,s,GPU-aa11,s/n (0),"prog -x, y"'
    list_namespaces = "namespace list n --server=s --format=csv"
    header = "NAME,SERVER,SERVER STATUS,PINNED MEMORY LIMIT,ACTIVE THREAD PERCENTAGE"
    assert call(control, list_namespaces) == f"{header}\nn,s,Ready,unlimited,100.00"
    server.process = None
    assert call(control, "server list --format=csv,noheader") == "s,500,-,Idle,/run/mps/s,all,-"

    control = make(client_list_layout="documented", csv_quotes="no", namespace_columns="7")
    with_server(control, (7, "n"))
    assert call(control, list_clients) == "7,s,0,n,prog -x, y"
    assert call(control, list_namespaces).endswith("n,s,Ready,unlimited,100.00,0,/run/mps/s/n")


def test_clients_of_a_namespace_deleted_by_force() -> None:
    words = ["namespace", "delete", "n", "--server=s", "--force"]
    for rule, verbs in (("stay", ["remove namespace"]), ("terminate", ["evict", "remove namespace"])):
        control = make(namespace_delete_force=rule)
        with_server(control, (7, "n"))
        assert [verb for verb, _, _ in control.execute(words, OWNER)[2]] == verbs
    assert refusal(control, "namespace delete default --server=s --force")


def test_limits_go_through_the_fault() -> None:
    control = make()
    control.settings.apply_limit = lambda limit: Limit(1024**3, "1G")
    with_server(control)
    call(control, "namespace set default --server=s --pinned-memory-limit=8G")
    assert call(control, "namespace get default s pinned-memory-limit") == "1G"


# Grammar and tables


def test_every_module_and_verb_has_help() -> None:
    for module, verbs in MODULES.items():
        assert help_for([module, "help"])
        for verb in verbs:
            assert help_for([module, verb, "help"]) == f"{module} {verb} {MODULES[module][verb]}"
    assert help_for(["nonsense", "help"]) is None
    assert help_for(["server", "list"]) is None


@pytest.mark.parametrize(
    "line",
    ["", "server", "server list a b", "server list --all", "server create a --colour=red", "namespace list --server"],
)
def test_words_that_do_not_fit(line: str) -> None:
    with pytest.raises(Refused):
        parse(line.split())


def test_words_are_sorted_out() -> None:
    command = parse(["namespace", "delete", "n", "server=s", "--force"])
    assert (command.positionals, command.options, command.flags) == (["n"], {"server": "s"}, {"force"})


def test_a_table_cuts_wide_cells_and_csv_does_not() -> None:
    row = ["3167082", "srv", "GPU-cc97390c-c189-71f5-1bb7-5b0af481fa0d", "srv/default (0)", "VLLM::EngineCore"]
    header, line = render(CLIENTS, [row], "table", quote=True).splitlines()
    assert header.split("  ")[0] == "PID"
    assert [header.index(title) for title in ("SERVER", "DEVICE", "MAWS NS", "CMD")] == [8, 22, 69, 95]
    assert line.split()[0] == "316..."
    captured = "3167082,srv,GPU-cc97390c-c189-71f5-1bb7-5b0af481fa0d,srv/default (0),VLLM::EngineCore"
    assert render(CLIENTS, [row], "csv,noheader", quote=True) == captured
    for style in ("json", "csv,header", ""):
        with pytest.raises(Refused):
            render(CLIENTS, [row], style, quote=True)


_MODULES = st.sampled_from([*MODULES, "nonsense"])
_VERBS = st.sampled_from(sorted({verb for verbs in MODULES.values() for verb in verbs} | {"nonsense"}))
_WORDS = st.sampled_from(
    [
        *("s", "n", "default", "7", "0", "pid", "", "--", "=", "--x=", "--force", "--all", "--server=s", "--device=0"),
        *("--chunks=2", "--format=csv", "--pinned-memory-limit=1G", "--active-thread-percentage=5", "--uid=0"),
    ]
)


@given(_MODULES, _VERBS, st.lists(_WORDS, max_size=5))
def test_no_command_breaks_the_daemon(module: str, verb: str, words: list[str]) -> None:
    control = make()
    with_server(control, (7, "n"))
    status, text, actions = control.execute([module, verb, *words], OWNER)
    assert (status == 0) or (text and not actions)


# Configuration file


def load(text: str, driver: int = 615, unknown: str = "refuse") -> Config:
    return parse_config(text, driver, unknown)


def test_every_documented_key_of_615() -> None:
    config = load("""
        schema_version = "1.0"
        [features.memacct]
        enabled = false
        audit_log = true
        [features.context-share]
        enabled = false
        default_socket = "off"
        [servers.a]
        allowed_devices = "0,GPU-bb22"
        pinned_memory_limit = "10G"
        active_thread_percentage = "50"
        client_priority = "1"
        uid = 500
        locality_domains = false
        [servers.a.namespaces.n]
        pinned_memory_limit = "2G"
        active_thread_percentage = "10"
        client_priority = "0"
    """)
    features = (config.memacct, config.audit_log, config.context_share, config.default_socket)
    assert features == (False, True, False, False)
    control = make()
    actions = [(verb, text) for verb, _, text in control.load(config)]
    assert actions == [("make server", ""), ("make namespace", "n")]
    rows = call(control, "namespace list --format=csv,noheader").splitlines()
    assert rows == ["default,a,Idle,10G,50.00", "n,a,Idle,2G,10.00"]
    assert call(control, "server get a allowed-devices") == "0,GPU-bb22"
    assert call(control, "namespace get default a client-priority") == "1"
    assert call(control, "feature describe --format=csv,noheader").count("disabled") == 2


def test_an_empty_file_has_the_defaults() -> None:
    config = load("")
    assert (config.memacct, config.audit_log, config.context_share, config.default_socket) == (True, False, True, True)


NEWER = (
    '[compute_policy]\ntimeslice = "long"\ntimeslice_yield_level = 2\n',
    '[servers.a]\ntimeslice_pct = "50"\n',
    '[servers.a.namespaces.n]\ncgroup = "/x"\ncgroup_depth = 1\n',
    "[features.memacct]\nforce_polling = true\n",
)


@pytest.mark.parametrize("text", NEWER)
def test_keys_of_620_are_unknown_to_615(text: str) -> None:
    make().load(load(text, driver=620))
    with pytest.raises(ConfigError, match="unknown key"):
        load(text)


@pytest.mark.parametrize(
    "text",
    [
        "[servers",
        'schema = "1.0"',
        "schema_version = 1",
        "servers = 1",
        "[servers]\na = 1",
        '[servers.a]\nuid = "0"',
        "[servers.a]\nuid = true",
        "[servers.a]\nactive_thread_percentage = 50",
        "[servers.a]\nlocality_domains = 1",
        "[servers.a.namespaces]\nn = 1",
        "[features.memacct]\naudit_log = 1",
        "[features.context-share]\ndefault_socket = true",
        '[features.context-share]\ndefault_socket = "maybe"',
        "[features.other]\n",
    ],
)
def test_files_that_are_wrong(text: str) -> None:
    with pytest.raises(ConfigError):
        load(text)


@pytest.mark.parametrize(
    "text",
    [
        "[servers.UPPER]\n",
        '[servers.a]\npinned_memory_limit = "10"',
        '[servers.a]\nactive_thread_percentage = "0"',
        '[servers.a.namespaces."n-1"]\n',
    ],
)
def test_values_that_no_command_would_take(text: str) -> None:
    with pytest.raises(Refused):
        make().load(load(text))


def test_unknown_keys_by_switch() -> None:
    text = "[servers.a]\nmemory = 1\n[servers.b]\n"
    assert list(load(text, unknown="ignore").servers) == ["a", "b"]
    assert list(load(text, unknown="vanish").servers) == ["b"]
