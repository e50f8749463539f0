"""The contract of `nvidia-cuda-mps-control`, protocol 3, at its command line: one documented fact, one test.

Runs on the emulator; with GPUFRAC_MPS_BINARY on that binary (as root, on a node with a GPU and driver 615 or newer).
Sources: 'MPS v3 Interface', 'MPS v3 Namespaces' and 'MPS v3 Configuration File' r615, public captures of 615.71.09.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.mps import Mps, alive, real_or_emulator
from tests.waiting import until

GIB = 1024**3
ABSENT = "GPU-00000000-dead-dead-dead-000000000000"
ONE_SERVER = "[servers.s]\n"
CONTEXT_BYTES = GIB if "GPUFRAC_MPS_BINARY" in os.environ else 0
"""What a real context takes of a limit at most; the emulator's takes nothing."""


@pytest.fixture
def mps(short_tmp: Path) -> Iterator[Mps]:
    with real_or_emulator(short_tmp, protocol=3) as mps:
        yield mps


@pytest.fixture
def daemon(mps: Mps) -> Mps:
    """A daemon with one server, `s`, that is Ready."""
    mps.start3(ONE_SERVER)
    mps.wait_ready()
    return mps


# Choosing the protocol, start, end


def test_help_of_protocol_3_lists_the_modules(mps: Mps) -> None:
    done = mps.run("-p", "3", "-h")
    assert done.returncode == 0
    assert {"server", "namespace"} <= set(re.findall(r"[a-z-]+", done.stdout))


@pytest.mark.parametrize("flags", [("-p", "3"), ("--protocol", "3"), ("--protocol=3",)])
def test_a_flag_chooses_protocol_3_and_later_calls_follow_the_daemon(mps: Mps, flags: tuple[str, ...]) -> None:
    mps.start(*flags)
    mps.tell("server", "create", "a")
    assert mps.run("-p", "2", "server", "list").returncode == 0
    assert mps.run("server", "list", CUDA_MPS_PROTOCOL_VERSION="2").returncode == 0


def test_the_environment_wins_over_the_flag(mps: Mps) -> None:
    mps.start("-p", "2", CUDA_MPS_PROTOCOL_VERSION="3")
    mps.tell("server", "create", "a")


def test_protocol_2_is_the_default(mps: Mps) -> None:
    mps.start()
    assert mps.ask("get_default_active_thread_percentage") == "100.0\n"


def test_without_a_daemon_a_command_says_so_and_fails(mps: Mps) -> None:
    done = mps.run("-p", "3", "server", "list")
    assert done.returncode != 0
    assert (done.stdout + done.stderr).strip()


def test_a_second_daemon_is_refused_and_the_first_lives(daemon: Mps) -> None:
    done = daemon.run("-p", "3", "-d")
    assert done.returncode != 0
    assert daemon.rows("server", "list")


def test_a_socket_path_that_does_not_fit_fails_the_start_without_a_log(mps: Mps) -> None:
    done = mps.run("-p", "3", "-d", CUDA_MPS_PIPE_DIRECTORY=str(mps.root / ("p" * 100)))
    assert done.returncode == 1
    assert "Failed to initialize MPS control daemon" in done.stdout + done.stderr
    assert not (mps.log / "control.log").exists()


def test_q_stops_the_daemon_and_all_servers(daemon: Mps) -> None:
    pids = [daemon.pid(), daemon.wait_ready()]
    assert daemon.run("-q").returncode == 0
    until(lambda: not any(map(alive, pids)), "the end of daemon and server")


def test_logs_of_daemon_and_servers_are_apart(mps: Mps) -> None:
    mps.start3(ONE_SERVER, "-m")
    mps.wait_ready()
    text = mps.control_log()
    assert f"To connect CUDA applications to this daemon, set CUDA_MPS_PIPE_DIRECTORY={mps.pipe}\n" in text
    assert "Adding server 's' [multiuser enabled]\n" in text
    assert (mps.log / "s" / "server.log").exists()


# The configuration file


def test_servers_and_namespaces_of_the_file_are_there_with_their_limits(mps: Mps) -> None:
    mps.start3(
        'schema_version = "1.0"\n[features.memacct]\nenabled = true\naudit_log = true\n'
        '[features.context-share]\nenabled = true\ndefault_socket = "off"\n'
        '[servers.s]\npinned_memory_limit = "10G"\n'
        '[servers.s.namespaces.small]\npinned_memory_limit = "20G"\nactive_thread_percentage = "30"\n'
        '[servers.s.namespaces.default]\nactive_thread_percentage = "50"\n'
    )
    mps.wait_ready()
    rows = {row[0]: row[1:5] for row in mps.rows("namespace", "list", "--server=s")}
    assert rows == {"default": ["s", "Ready", "10G", "50.00"], "small": ["s", "Ready", "20G", "30.00"]}


@pytest.mark.parametrize(
    "config",
    [
        "[servers.s]\nmemory = 1\n",
        "[servers.s.namespaces.a]\nuid = 0\n",
        '[servers.s]\nlocality_domains = "true"\n',
        "[servers.s",
    ],
)
def test_an_error_in_the_file_leaves_no_such_server(mps: Mps, config: str) -> None:
    mps.config.write_text(config)
    if mps.run("-p", "3", "-d", "-a", str(mps.config)).returncode == 0:
        assert mps.run("server", "list", "s").returncode != 0


def test_what_commands_made_is_lost_with_the_daemon(daemon: Mps) -> None:
    pid = daemon.pid()
    daemon.tell("server", "create", "a")
    daemon.tell("namespace", "create", "n", "--server=s")
    daemon.tell("namespace", "set", "default", "--server=s", "--pinned-memory-limit=1G")
    daemon.run("-q")
    until(lambda: not alive(pid), "the daemon's end")
    daemon.start3(ONE_SERVER)
    daemon.wait_ready()
    assert [row[:4] for row in daemon.rows("namespace", "list")] == [["default", "s", "Ready", "unlimited"]]


# The command line


@pytest.mark.parametrize("words", [("namespace", "help"), ("namespace", "--help")])
def test_help_of_a_module_lists_its_verbs(daemon: Mps, words: tuple[str, ...]) -> None:
    text = daemon.tell(*words)
    assert all(verb in text for verb in ("create", "delete", "list", "set", "get"))


def test_key_value_works_without_dashes(daemon: Mps) -> None:
    daemon.tell("namespace", "create", "n", "server=s")
    daemon.tell("namespace", "set", "n", "server=s", "pinned-memory-limit=2G")
    assert daemon.tell("namespace", "get", "n", "s", "pinned-memory-limit").split()[-1] == "2G"


@pytest.mark.parametrize(
    "command",
    [
        "server frobnicate",
        "frobnicate list",
        "server create Upper",
        "server create with-dash",
        "server create s",
        f"server create {'x' * 65}",
        "server list nobody",
        "server delete nobody",
        "namespace create n",
        "namespace create n --server=nobody",
        "namespace create default --server=s",
        "namespace set default --server=s",
        "namespace set nobody --server=s --pinned-memory-limit=1G",
        "namespace set default --server=s --pinned-memory-limit=1Q",
        "namespace set default --server=s --active-thread-percentage=0",
        "namespace set default --server=s --active-thread-percentage=101",
        "namespace set default --server=s --client-priority=2",
        "client terminate 1",
        "server list --format=json",
    ],
)
def test_a_command_that_fails_says_so_and_exits_other_than_0(daemon: Mps, command: str) -> None:
    done = daemon.run(*command.split())
    assert done.returncode != 0
    assert (done.stdout + done.stderr).strip()
    assert [row[:4] for row in daemon.rows("namespace", "list")] == [["default", "s", "Ready", "unlimited"]]


def test_csv_has_a_header_unless_told_otherwise(daemon: Mps) -> None:
    lines = daemon.tell("namespace", "list", "--format=csv").splitlines()
    assert len(lines) == 2
    assert lines[1:] == daemon.tell("namespace", "list", "--format=csv,noheader").splitlines()


def test_the_table_of_namespaces(daemon: Mps) -> None:
    header = daemon.tell("namespace", "list").splitlines()[0]
    assert header.startswith(
        "NAME             SERVER        SERVER STATUS  PINNED MEMORY LIMIT   ACTIVE THREAD PERCENTAGE"
    )


# Servers


def test_a_created_server_becomes_ready_in_a_directory_of_its_own(daemon: Mps) -> None:
    daemon.tell("server", "create", "training")
    pid = daemon.wait_ready("training")
    row = daemon.rows("server", "list", "training")[0]
    assert row[:5] == ["training", str(os.getuid()), str(pid), "Ready", str(daemon.pipe / "training")]
    for directory in (daemon.pipe / "training", daemon.pipe / "training" / "default"):
        assert (directory / "control").is_socket()
    assert os.getpgid(pid) == os.getpgid(daemon.pid())


def test_a_server_created_for_a_user_is_named_after_it(daemon: Mps) -> None:
    daemon.tell("server", "create", f"--uid={os.getuid()}")
    assert daemon.rows("server", "list", f"uid_{os.getuid()}")


def test_a_deleted_server_is_gone_and_so_is_its_process(daemon: Mps) -> None:
    pid = daemon.wait_ready()
    daemon.tell("server", "delete", "s")
    until(lambda: not alive(pid), "the server's end")
    assert daemon.rows("server", "list") == []


def test_a_server_with_clients_is_deleted_by_force_only(daemon: Mps) -> None:
    client = daemon.hold("--allocate", "1048576", at=("s",))
    assert daemon.run("server", "delete", "s").returncode != 0
    daemon.tell("server", "delete", "s", "--force")
    assert client.line().startswith("CUDA_ERROR_")


def test_server_set_is_for_the_default_namespace_only(daemon: Mps) -> None:
    daemon.tell("namespace", "create", "n", "--server=s")
    daemon.tell("server", "set", "s", "--pinned-memory-limit=10G", "--active-thread-percentage=50")
    rows = {row[0]: row[3:5] for row in daemon.rows("namespace", "list")}
    assert rows == {"default": ["10G", "50.00"], "n": ["unlimited", "100.00"]}


def test_a_multiuser_daemon_has_no_servers_of_other_users(mps: Mps) -> None:
    mps.start3("", "-m")
    assert mps.run("server", "create", "a", "--uid=1000").returncode != 0
    mps.tell("server", "create", "a", "--uid=0")
    assert mps.rows("server", "list", "a")[0][1] == "0"


def test_a_server_on_a_gpu_that_is_not_there_is_accepted_and_then_vanishes(daemon: Mps) -> None:
    daemon.tell("server", "create", "bad", f"--allowed-devices={ABSENT}")
    until(lambda: daemon.run("server", "list", "bad").returncode != 0, "the server to vanish")
    assert "no CUDA-capable device is detected" in (daemon.log / "bad" / "server.log").read_text()
    assert [row[0] for row in daemon.rows("server", "list")] == ["s"]


# Namespaces


def test_a_namespace_has_a_socket_of_its_own_and_no_limits(daemon: Mps) -> None:
    daemon.tell("namespace", "create", "n", "--server=s")
    directory = daemon.pipe / "s" / "n"
    assert (directory / "control").is_socket()
    assert daemon.tell("namespace", "get", "n", "s", "pipe-directory").split()[-1] == str(directory)
    assert daemon.rows("namespace", "list", "n", "--server=s")[0][3:5] == ["unlimited", "100.00"]


def test_limits_of_a_namespace_read_back(daemon: Mps) -> None:
    daemon.tell("namespace", "create", "n", "--server=s")
    daemon.tell("namespace", "set", "n", "--server=s", "--pinned-memory-limit=20G", "--active-thread-percentage=30")
    assert daemon.rows("namespace", "list", "n", "--server=s")[0][3:5] == ["20G", "30.00"]
    assert daemon.tell("namespace", "get", "n", "s", "pinned-memory-limit").split()[-1] == "20G"


def test_a_namespace_is_created_once(daemon: Mps) -> None:
    daemon.tell("namespace", "create", "n", "--server=s")
    assert daemon.run("namespace", "create", "n", "--server=s").returncode != 0
    assert daemon.rows("namespace", "list", "n", "--server=s")


def test_a_namespace_with_a_client_is_neither_set_nor_deleted_but_by_force(daemon: Mps) -> None:
    daemon.tell("namespace", "create", "n", "--server=s")
    client = daemon.hold("--allocate", "1048576", at=("s", "n"))
    assert daemon.run("namespace", "set", "n", "--server=s", "--pinned-memory-limit=1G").returncode != 0
    assert daemon.run("namespace", "delete", "n", "--server=s").returncode != 0
    assert daemon.rows("namespace", "list", "n", "--server=s")[0][3] == "unlimited"
    daemon.tell("namespace", "set", "default", "--server=s", "--pinned-memory-limit=1G")
    daemon.tell("namespace", "delete", "n", "--server=s", "--force")
    client.end()
    assert [row[0] for row in daemon.rows("namespace", "list")] == ["default"]


def test_a_namespace_without_clients_is_set_again_and_deleted(daemon: Mps) -> None:
    daemon.tell("namespace", "create", "n", "--server=s")
    daemon.hold("--allocate", "1048576", at=("s", "n")).end()
    until(lambda: daemon.rows("client", "list") == [], "the client to leave")
    daemon.tell("namespace", "set", "n", "--server=s", "--pinned-memory-limit=1G")
    daemon.tell("namespace", "delete", "n", "--server=s")
    assert not (daemon.pipe / "s" / "n" / "control").exists()


# Clients and their limits


@pytest.mark.parametrize("names", [("s", "default"), ("s",)])
def test_the_servers_socket_leads_to_its_default_namespace(daemon: Mps, names: tuple[str, ...]) -> None:
    daemon.tell("server", "set", "s", "--pinned-memory-limit=2G")
    assert daemon.allocate(str(2 * GIB + 1), at=(*names,)) == "CUDA_ERROR_OUT_OF_MEMORY"
    assert int(daemon.allocate(str(2 * GIB - CONTEXT_BYTES), at=(*names,)))


def test_a_namespace_is_neither_capped_by_its_server_nor_inherits(daemon: Mps) -> None:
    daemon.tell("server", "set", "s", "--pinned-memory-limit=2G")
    daemon.tell("namespace", "create", "n", "--server=s")
    assert int(daemon.allocate(str(3 * GIB), at=("s", "n")))
    daemon.tell("namespace", "set", "n", "--server=s", "--pinned-memory-limit=4G")
    assert int(daemon.allocate(str(3 * GIB), at=("s", "n")))
    assert daemon.allocate(str(4 * GIB + 1), at=("s", "n")) == "CUDA_ERROR_OUT_OF_MEMORY"


def test_a_client_can_only_lower_its_limit(daemon: Mps) -> None:
    daemon.tell("server", "set", "s", "--pinned-memory-limit=4G")
    for own, size in (("0=1G", 2 * GIB), ("0=40G", 5 * GIB)):
        reply = daemon.allocate(str(size), at=("s",), CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=own)
        assert reply == "CUDA_ERROR_OUT_OF_MEMORY"


def test_a_client_that_sees_one_gpu_of_several_gets_that_one_with_its_namespaces_limit(daemon: Mps) -> None:
    daemon.tell("namespace", "create", "n", "--server=s")
    daemon.tell("namespace", "set", "n", "--server=s", "--pinned-memory-limit=2G")
    used = []
    for ordinal in "10":
        client = daemon.hold("--allocate", "1048576", at=("s", "n"), CUDA_VISIBLE_DEVICES=ordinal)
        rows = [row for row in daemon.rows("client", "list", "--all") if row[0] == str(client.pid)]
        used.append([row[2] for row in rows])
        assert int(daemon.allocate(str(2 * GIB - CONTEXT_BYTES), at=("s", "n"), CUDA_VISIBLE_DEVICES=ordinal))
        over = daemon.allocate(str(2 * GIB + 1), at=("s", "n"), CUDA_VISIBLE_DEVICES=ordinal)
        assert over == "CUDA_ERROR_OUT_OF_MEMORY", "on each of its GPUs"
    assert [len(gpus) for gpus in used] == [1, 1]
    assert used[0] != used[1]


@pytest.mark.parametrize("own", ["0=1G,77=1G", f"{ABSENT}=1G"])
def test_one_entry_for_an_invisible_gpu_drops_the_namespaces_limit_too(daemon: Mps, own: str) -> None:
    daemon.tell("server", "set", "s", "--pinned-memory-limit=2G")
    assert int(daemon.allocate(str(3 * GIB), CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=own, at=("s",)))


def test_the_main_socket_leads_to_a_server_of_the_clients_user(mps: Mps) -> None:
    mps.start3()
    client = mps.hold("--allocate", "1048576")
    name = f"uid_{os.getuid()}"
    assert [row[0] for row in mps.rows("server", "list")] == [name]
    assert [row[:2] for row in mps.rows("client", "list")] == [[str(client.pid), name]]
    mps.wait_ready(name)


def test_clients_are_listed_by_server_device_and_namespace(daemon: Mps) -> None:
    daemon.tell("server", "create", "other")
    client = daemon.hold("--allocate", "1048576", at=("s",))
    row = daemon.rows("client", "list", "--all")[0]
    assert row[:2] == [str(client.pid), "s"]
    assert row[2].startswith("GPU-")
    assert re.fullmatch(r"s/default \(\d+\)", row[3])
    assert daemon.rows("client", "list", "--server=other") == []
    assert daemon.tell("client", "get", str(client.pid), "server").split()[-1] == "s"


def test_client_terminate_leaves_the_process_and_works_once(daemon: Mps) -> None:
    client = daemon.hold("--allocate", "1048576", "--stay", at=("s",))
    assert daemon.run("client", "terminate", str(client.pid)).returncode == 0
    assert client.line() == "CUDA_ERROR_MPS_CLIENT_TERMINATED"
    assert alive(client.pid)
    assert daemon.rows("client", "list") == []
    assert daemon.run("client", "terminate", str(client.pid)).returncode != 0


# Devices, features


def test_device_list_has_the_documented_columns(daemon: Mps) -> None:
    row = daemon.rows("device", "list", "--server=s")[0]
    assert row[:2] == ["0", "s"]
    assert row[3].startswith("GPU-")
    assert all(cell.isdigit() for cell in row[5:7])


def test_both_features_are_enabled_by_default(daemon: Mps) -> None:
    rows = [row[:3] for row in daemon.rows("feature", "describe")]
    assert rows == [[name, "enabled (default)", name] for name in ("memacct", "context-share")]


def test_a_feature_is_disabled_and_enabled(daemon: Mps) -> None:
    daemon.tell("feature", "disable", "memacct")
    assert daemon.rows("feature", "describe", "memacct")[0][1] == "disabled"
    daemon.tell("feature", "enable", "memacct")
    daemon.tell("memacct", "set", "audit_log=true")
