"""The operator's commands against sockets with a real broker behind them: what they do, say, and exit with."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from msgspec import structs

from deviceplugin.cli import drain as draining
from deviceplugin.cli.gpuname import GpuName, choose, complete_gpu, complete_pod
from deviceplugin.cli.main import cli
from deviceplugin.cli.terminate import readings
from deviceplugin.plan.ids import device_id
from deviceplugin.status.clients import clients, targets
from deviceplugin.status.model import PluginStatus
from mpsd.common.errors import ConfigError, NotReachableError
from mpsd.common.processlock import ProcessLock
from mpsd.localapi.methods import reading
from mpsd.localapi.server import LocalServer
from mpsd.localapi.snapshot import CleanedUp, DaemonState, GpuClient, GpuClients, Snapshot
from tests.builders import config, fixed, reported, resource, snapshot, uuid
from tests.places import places
from tests.world import World

CONFIG = config(resource("a", fixed(8)), resource("pair", fixed(8), groups=("pair0",)), groups=(("pair0", (1, 2)),))
PODS = {
    ("prod", "web", "main"): ("a", f"{uuid(0)}::0"),
    ("prod", "web", "side"): ("a", f"{uuid(0)}::1"),
    ("test", "db", "web"): ("a", f"{uuid(0)}::2"),
    ("test", "train", "main"): ("pair", device_id("pair0", 0)),
}


class FakeNode:
    """Both sockets, with a real broker behind the plugin's. GPU 0 is alone, 1 and 2 are group pair0."""

    def __init__(self, directory: Path) -> None:
        self.root = str(directory)
        self.world = World(directory, CONFIG, gpus=3)
        self.keys = {}
        held = []
        for where, (name, share) in PODS.items():
            got = self.world.grant(name, share)
            self.world.kubelet.containers[where] = {got.resource: got.device_ids}
            self.keys["/".join(where)] = got.key
            held.append((got, f"uid-{where[1]}"))
        self.world.holds(*held)
        self.world.keeper.observe()
        self.world.tell()
        self.gpus = list(reported(CONFIG, self.world.infos, self.world.broker.desired()))
        self.looked_up: dict[str, GpuClients] = {}
        self.gone = False
        """Whether `terminate` takes everybody off the GPUs."""
        self.cleaned: list[bool] = []
        self.left: list[str] = []
        self.ended: dict[str, Any] = {"clients": [], "errors": []}
        self.refusal = ""
        self.asked: list[dict[str, Any]] = []
        self.plugin = LocalServer(
            f"{directory}/plugin.sock",
            reading(
                {
                    "status": lambda _: self.world.picture(),
                    "drain": lambda params: self.world.broker.drain(params["gpu"], params["reason"]),
                    "undrain": lambda params: self.world.broker.undrain(params["gpu"]),
                    "targets": lambda params: targets(
                        self.world.picture().allocations, params["pod"], params.get("container")
                    ),
                    "clients": lambda _: clients(
                        self.world.broker.node.gpus,
                        self.world.picture().allocations,
                        outdated=self.world.broker.node.absence,
                        known_unix_s=self.world.broker.node.heard_unix_s,
                    ),
                }
            ),
        )
        self.mpsd = LocalServer(
            f"{directory}/mpsd.sock",
            reading(
                {
                    "snapshot": lambda _: self.snapshot,
                    "clients": lambda params: {u: self.looked_up.get(u, GpuClients()) for u in params["uuids"]},
                    "terminate": self._terminate,
                    "replace": self._replace,
                    "cleanup": self._cleanup,
                    "confirm_indices": self.asked.append,
                }
            ),
        )

    @property
    def snapshot(self) -> Snapshot:
        return snapshot(*self.gpus)

    def _terminate(self, params: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(params)
        if self.gone:
            self.looked_up = {}
        return self.ended

    def _cleanup(self, _: dict[str, Any]) -> CleanedUp:
        self.cleaned.append(True)
        return CleanedUp(left=tuple(self.left), places=places(Path(self.root)))

    def _replace(self, params: dict[str, Any]) -> None:
        if self.refusal:
            raise ConfigError(self.refusal)
        self.asked.append(params)

    def change(self, index: int, **changes: Any) -> None:
        self.gpus[index] = structs.replace(self.gpus[index], **changes)

    def daemon(self, index: int, **changes: Any) -> None:
        daemon = self.gpus[index].daemon
        assert daemon is not None
        self.change(index, daemon=structs.replace(daemon, **changes))

    def use(self, index: int, *found: GpuClient) -> None:
        """These are on the GPU, and mpsd and plugin know."""
        self.looked_up[uuid(index)] = GpuClients(clients=found)
        self.change(index, clients=found)
        self.world.broker.observe_snapshot(self.snapshot)

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(cli, [*arguments, "--run-root", self.root])

    @property
    def drained(self) -> set[int]:
        return {gpu.index for gpu in self.world.picture().gpus if gpu.drained}

    def close(self) -> None:
        self.plugin.close()
        self.mpsd.close()
        self.world.ledger.close()


@pytest.fixture
def node(short_tmp: Path) -> Iterator[FakeNode]:
    made = FakeNode(short_tmp)
    made.plugin.start()
    made.mpsd.start()
    yield made
    made.close()


def yes(monkeypatch: pytest.MonkeyPatch, answer: bool = True) -> list[str]:
    """A person at the terminal; the questions that were asked."""
    asked: list[str] = []

    def confirm(text: str, **_: object) -> None:
        asked.append(text)
        if not answer:
            raise click.Abort

    monkeypatch.setattr("deviceplugin.cli.output.is_terminal", lambda: True)
    monkeypatch.setattr(click, "confirm", confirm)
    return asked


# --- names of GPUs

KNOWN = (
    GpuName(0, "GPU-aa1", ""),
    GpuName(1, "GPU-ab2", "pair0"),
    GpuName(2, "GPU-ab3", "pair0"),
    GpuName(3, "7", "1"),
)


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["0"], [0]),
        (["GPU-ab3"], [2]),
        (["GPU-aa"], [0]),
        (["pair0"], [1, 2]),
        (["2", "pair0", "GPU-aa1", "0"], [0, 1, 2]),
        (["7"], [3]),
        (["1"], [1]),
    ],
)
def test_a_gpu_is_named_in_many_ways(texts: list[str], found: list[int]) -> None:
    assert [gpu.index for gpu in choose(texts, KNOWN)] == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("9", "known are 0 (GPU-aa1), 1 (GPU-ab2, group pair0)"),
        ("GPU-ab", "it may be 1 (GPU-ab2, group pair0), 2 (GPU-ab3"),
        ("", "known are"),
        ("-1", "known are"),
        ("gpu-aa1", "known are"),
        ("x" * 9000, "known are"),
    ],
)
def test_what_names_no_gpu_is_said_with_those_that_are_there(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose([text], KNOWN)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400


def test_the_shell_completes_gpus_and_pods_and_stays_quiet_without_a_node(node: FakeNode) -> None:
    parameter = click.Argument(["x"])
    context = click.Context(cli)
    context.params = {"run_root": node.root}
    assert complete_gpu(context, parameter, "p") == ["pair0"]
    assert set(complete_gpu(context, parameter, "")) == {"0", "1", "2", "pair0", *map(uuid, range(3))}
    assert complete_pod(context, parameter, "prod/") == ["prod/web/main", "prod/web/side"]
    context.params = {"run_root": "/nonexistent"}
    assert complete_gpu(context, parameter, "") == complete_pod(context, parameter, "") == []


# --- drain


@pytest.mark.parametrize(
    ("arguments", "drained"),
    [
        (["0"], {0}),
        (["0", "1"], {0, 1}),
        (["pair0"], {1, 2}),
        ([uuid(2)], {2}),
        (["--all"], {0, 1, 2}),
    ],
)
def test_drain_and_undrain(node: FakeNode, arguments: list[str], drained: set[int]) -> None:
    got = node.run("drain", "--reason", "fan fault", *arguments)
    assert got.exit_code == 0, got.output
    assert node.drained == drained
    assert got.output.count("fan fault") == len(drained)
    assert node.run("undrain", *arguments).exit_code == 0
    assert node.drained == set()


def test_drain_says_who_goes_on_and_whom_it_takes_along(node: FakeNode) -> None:
    got = node.run("drain", "0", "1")
    assert "3 allocations on it until the pod ends: prod/web, test/db" in got.output
    assert "1 allocation on it until the pod ends: test/train" in got.output
    assert f"GPU 2 ({uuid(2)}): takes nothing new either: it is in group pair0" in got.output
    assert "3 ok, 2 drained" in node.run("status").output


def test_a_second_drain_keeps_reason_and_time_unless_it_has_its_own(node: FakeNode) -> None:
    node.run("drain", "0", "--reason", "fan fault")
    first = node.world.picture().gpus[0].drained
    node.world.now_s += 100
    assert node.run("drain", "0").exit_code == 0
    assert node.world.picture().gpus[0].drained == first
    node.run("drain", "0", "--reason", "other")
    assert node.world.picture().gpus[0].drained.endswith("other")


def test_drain_as_json(node: FakeNode) -> None:
    (shown,) = json.loads(node.run("drain", "0", "-o", "json").stdout)
    assert shown["gpu"]["drained"].startswith("drained by an operator")
    assert {a["pod"] for a in shown["allocations"]} == {"web", "db"}
    (shown,) = json.loads(node.run("undrain", "0", "-o", "json").stdout)
    assert shown["gpu"]["drained"] == ""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["drain"], 2, "name GPUs, or --all"),
        (["undrain"], 2, "name GPUs, or --all"),
        (["drain", "--all", "0"], 2, "not both"),
        (["undrain", "--all", "0"], 2, "not both"),
        (["drain", "0", "7"], 2, "known are 0 ("),
        (["undrain", "pair1"], 2, "group pair0"),
        (["drain", "GPU-"], 2, "cannot tell which GPU"),
        (["drain", "0", "--timeout", "3"], 2, "--timeout needs --wait"),
        *(
            (["drain", "0", "--wait", "--timeout", t], 2, "--timeout")
            for t in ("-1", "nan", "inf", "-inf", "1e999", "x", "")
        ),
        (["drain", "0", "--reason", "a\x07b"], 2, "printable"),
        (["drain", "0", "--reason", "x" * 500], 2, "printable"),
    ],
)
def test_a_drain_that_is_not_understood_drains_nothing(
    node: FakeNode, arguments: list[str], code: int, said: str
) -> None:
    got = node.run(*arguments)
    assert (got.exit_code, node.drained) == (code, set())
    assert said in got.stderr


def test_a_typing_error_is_told_before_a_plugin_that_is_down() -> None:
    assert CliRunner().invoke(cli, ["drain", "--run-root", "/nonexistent"]).exit_code == 2


def scripted(
    monkeypatch: pytest.MonkeyPatch, node: FakeNode, *script: Callable[[PluginStatus], PluginStatus | Exception]
) -> None:
    """What the plugin says, question by question; the first two are the drain's own."""
    left = [without(), without(), *script]

    def status(_: str) -> PluginStatus:
        said = left.pop(0)(node.world.picture())
        if isinstance(said, Exception):
            raise said
        return said

    monkeypatch.setattr(draining, "_status", status)
    monkeypatch.setattr(draining, "POLL_S", 0.0)


def without(*pods: str) -> Callable[[PluginStatus], PluginStatus]:
    return lambda status: structs.replace(status, allocations=tuple(a for a in status.allocations if a.pod not in pods))


def test_drain_waits_until_nobody_is_left_even_over_a_restart_of_the_plugin(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = NotReachableError("cannot reach `gpufrac plugin`")
    scripted(monkeypatch, node, without("db"), lambda _: away, lambda _: away, without("db"), without("db", "web"))
    got = node.run("drain", "0", "--wait")
    assert got.exit_code == 0, got.output
    assert "2 allocations on it until the pod ends: prod/web" in got.stdout
    assert got.stderr.count("cannot reach") == 1
    assert got.stdout.endswith("No allocation is left on GPU 0.\n")


@pytest.mark.parametrize("output", ["table", "json"])
def test_a_wait_that_is_over_names_who_is_left(node: FakeNode, output: str) -> None:
    got = node.run("drain", "0", "--wait", "--timeout", "0", "-o", output)
    assert got.exit_code == 1
    assert "cannot finish the drain in 0 s: 3 allocations on it until the pod ends: prod/web, test/db" in got.stderr
    assert output == "table" or len(json.loads(got.stdout)[0]["allocations"]) == 3
    assert node.drained == {0}


def test_a_wait_ends_when_somebody_undrains(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    def undrained(status: PluginStatus) -> PluginStatus:
        return structs.replace(status, gpus=tuple(structs.replace(gpu, drained="") for gpu in status.gpus))

    scripted(monkeypatch, node, undrained)
    got = node.run("drain", "0", "--wait")
    assert got.exit_code == 1
    assert "somebody undrained GPU 0" in got.stderr


# --- clients


def users(node: FakeNode) -> None:
    node.use(
        0,
        GpuClient(pid=30, allocation_key=None, mps=False, command="Xorg"),
        GpuClient(pid=31, allocation_key=node.keys["prod/web/main"], used_bytes=(2 << 30) + 1, command="python"),
        GpuClient(pid=32, allocation_key=node.keys["test/db/web"], mps=False, command="blender"),
    )
    node.use(1, GpuClient(pid=33, allocation_key=node.keys["test/train/main"], command="torch"))


def test_clients_that_are_known_from_earlier_are_shown_with_their_age(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    users(node)
    monkeypatch.setattr("deviceplugin.cli.clients.time.time", lambda: node.world.now_s + 100)
    node.looked_up[uuid(1)] = GpuClients(error="cannot list the clients of it: it hangs")
    shown = node.run("clients")
    assert "GPU 1: as known at an earlier time: cannot list the clients of it: it hangs\n" in shown.stdout
    assert "GPU 0" not in shown.stdout
    node.mpsd.close()
    node.world.broker.observe_snapshot(None)
    node.world.now_s += 35
    shown = node.run("clients")
    assert "GPU 0, 1, 2: as known 2m ago: mpsd does not answer\n" in shown.stdout
    rows = json.loads(node.run("clients", "-o", "json").stdout)
    assert {(row["outdated"], row["knownUnixS"]) for row in rows} == {("mpsd does not answer", 100.0)}


def test_clients_that_nobody_knows_are_not_none(node: FakeNode) -> None:
    node.mpsd.close()
    node.world.broker.observe_snapshot(None)
    assert node.run("clients").stdout.startswith("No process is known.\nGPU 0, 1, 2: as known ")


def test_clients_are_named_by_pod_and_kind(node: FakeNode) -> None:
    assert node.run("clients").stdout == "No process uses a GPU.\n"
    users(node)
    got = node.run("clients")
    assert got.exit_code == 0, got.output
    lines = {line.split()[1]: line for line in got.stdout.splitlines() if line[0].isdigit()}
    assert "foreign, plain" in lines["30"]
    assert lines["31"].split()[3:6] == ["MPS", "client", "prod/web/main"]
    assert lines["31"].endswith("2049Mi")
    assert "plain" in lines["32"]
    assert "test/db/web" in lines["32"]
    assert lines["33"].startswith("1 ")
    assert "foreign: without an allocation" in got.stdout


def test_clients_of_one_gpu_or_group(node: FakeNode) -> None:
    users(node)
    shown = json.loads(node.run("clients", "--gpu", "pair0", "-o", "json").stdout)
    assert [gpu["index"] for gpu in shown] == [1, 2]
    (client,) = shown[0]["clients"]
    assert (client["pid"], client["namespace"], client["pod"], client["container"]) == (33, "test", "train", "main")
    got = node.run("clients", "--gpu", "5")
    assert got.exit_code == 2
    assert "known are" in got.stderr


def test_clients_without_the_plugin_have_no_pods_and_without_mpsd_are_those_of_before(node: FakeNode) -> None:
    users(node)
    node.plugin.close()
    got = node.run("clients")
    assert got.exit_code == 0
    assert "gpufrac plugin" in got.stderr
    assert "prod/web" not in got.stdout
    assert node.keys["prod/web/main"] in got.stdout


def test_clients_without_mpsd_are_those_of_before(node: FakeNode) -> None:
    users(node)
    node.mpsd.close()
    got = node.run("clients")
    assert got.exit_code == 0
    assert "gpufrac mpsd" in got.stderr
    assert "prod/web/main" in got.stdout
    node.plugin.close()
    assert node.run("clients").exit_code == 3


def test_clients_of_a_gpu_that_hangs_are_those_of_before(node: FakeNode) -> None:
    users(node)
    node.looked_up[uuid(0)] = GpuClients(error="cannot list the clients of GPU x: the query hangs")
    got = node.run("clients")
    assert got.exit_code == 0
    assert "the query hangs" in got.stderr
    assert "prod/web/main" in got.stdout


# --- terminate


@pytest.mark.parametrize(
    ("target", "namespace", "meant"),
    [
        ("a", None, [("a", None)]),
        ("a", "n", [("n/a", None)]),
        ("a/b", None, [("a/b", None), ("a", "b")]),
        ("a/b", "n", [("n/a", "b")]),
        ("n/a/b", None, [("n/a", "b")]),
        ("n/a/b", "n", None),
        ("a/b/c/d", None, None),
        ("a//b", None, None),
        ("/", None, None),
        ("", None, None),
    ],
)
def test_forms_of_a_target(target: str, namespace: str | None, meant: list[tuple[str, str | None]] | None) -> None:
    if meant is None:
        with pytest.raises(ConfigError, match=r"write \[NAMESPACE/\]POD\[/CONTAINER\]"):
            readings(target, namespace)
    else:
        assert readings(target, namespace) == meant


@pytest.mark.parametrize(
    ("arguments", "held"),
    [
        (["web"], ["prod/web/main", "prod/web/side"]),
        (["web/side"], ["prod/web/side"]),
        (["prod/web"], ["prod/web/main", "prod/web/side"]),
        (["prod/web/main"], ["prod/web/main"]),
        (["web/main", "-n", "prod"], ["prod/web/main"]),
        (["train"], ["test/train/main"]),
    ],
)
def test_terminate_asks_for_the_allocations_of_the_pod(node: FakeNode, arguments: list[str], held: list[str]) -> None:
    got = node.run("terminate", *arguments, "--yes")
    assert got.exit_code == 0, got.output
    assert "No process of prod/web" in got.output or "No process of test/train" in got.output
    uids = [] if "main" in arguments[0] or "side" in arguments[0] else [f"uid-{held[0].split('/')[1]}"]
    keys = sorted(node.keys[name] for name in held)
    assert node.asked == [{"keys": keys, "pod_uids": uids, "kill": False, "force": False}]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["gone", "--yes"], 1, "pods that hold one are prod/web, test/db, test/train"),
        (["web/none", "--yes"], 1, "containers that hold one are main, side"),
        (["web", "-n", "test", "--yes"], 1, "there is no live allocation of pod 'test/web'"),
        (["a/b", "--yes"], 1, "cannot find 'a/b': there is no live allocation of pod 'a/b', and there is no live"),
        (["web", "-n", "", "--yes"], 2, "cannot use namespace ''"),
        (["web", "-n", "prod/web", "--yes"], 2, "cannot use namespace"),
        (["a/b/c/d", "--yes"], 2, "write [NAMESPACE/]POD[/CONTAINER]"),
        (["web", "--force", "--yes"], 2, "--force needs --kill"),
        (["web"], 2, "add --yes"),
        (["web", "--kill", "-o", "json"], 2, "add --yes"),
        ([], 2, "Missing argument"),
    ],
)
def test_a_terminate_that_is_not_understood_ends_nothing(
    node: FakeNode, arguments: list[str], code: int, said: str
) -> None:
    got = node.run("terminate", *arguments)
    assert (got.exit_code, node.asked) == (code, [])
    assert said in got.stderr


def test_a_target_that_may_be_two_is_not_guessed(node: FakeNode) -> None:
    for n, where in enumerate([("test", "web", "main"), ("db", "web", "x")]):
        got = node.world.grant("a", f"{uuid(0)}::{5 + n}")
        node.world.kubelet.containers[where] = {got.resource: got.device_ids}
    node.world.keeper.observe()
    for target, said in (("web/main", "say one of db/web, prod/web, test/web"), ("db/web", "what 'db/web' is")):
        shown = node.run("terminate", target, "--yes")
        assert shown.exit_code == 2, target
        assert said in shown.stderr
    assert node.asked == []
    assert node.run("terminate", "db/web", "-n", "test", "--yes").exit_code == 0
    assert node.run("terminate", "db/web/x", "--yes").exit_code == 0


def ended(node: FakeNode, outcome: str, error: str = "") -> dict[str, Any]:
    return {
        "pid": 31,
        "gpu": uuid(0),
        "allocation_key": node.keys["prod/web/main"],
        "command": "python",
        "outcome": outcome,
        "error": error,
        "error_code": "",
    }


@pytest.mark.parametrize(
    ("arguments", "outcome", "error", "code", "said"),
    [
        ([], "terminated", "", 0, "its process lives on"),
        (["--kill"], "killed", "", 0, "killed"),
        (["--kill"], "terminated", "", 0, "terminated"),
        (["--kill"], "terminated", "its process can't be killed", 1, "can't be killed"),
        ([], "left", "", 1, "only --kill ends it"),
        (["--kill"], "left", "cannot terminate: refused", 1, "cannot terminate: refused"),
        (["--kill", "--force"], "killed", "", 0, "killed"),
    ],
)
def test_what_became_of_each_client(
    node: FakeNode, arguments: list[str], outcome: str, error: str, code: int, said: str
) -> None:
    node.ended = {"clients": [ended(node, outcome, error)], "errors": []}
    got = node.run("terminate", "web", "--yes", *arguments)
    assert got.exit_code == code
    assert said in got.stdout
    assert "prod/web/main" in got.stdout
    (asked,) = node.asked
    assert (asked["kill"], asked["force"]) == ("--kill" in arguments, "--force" in arguments)
    shown = json.loads(node.run("terminate", "web", "--yes", "-o", "json", *arguments).stdout)
    assert shown["clients"] == node.ended["clients"]


def test_clients_that_cannot_be_told_are_not_called_ended(node: FakeNode) -> None:
    node.ended = {"clients": [], "errors": ["cannot list the clients of GPU x: the query hangs"]}
    got = node.run("terminate", "web", "--yes")
    assert got.exit_code == 1
    assert "the query hangs" in got.stderr


@pytest.mark.parametrize("answer", [True, False])
def test_terminate_shows_what_it_would_end_and_asks(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, answer: bool
) -> None:
    users(node)
    node.gone = True
    questions = yes(monkeypatch, answer)
    got = node.run("terminate", "web/main", "--kill")
    assert got.exit_code == (0 if answer else 1)
    assert len(node.asked) == (1 if answer else 0)
    assert questions == ["End the GPU use of prod/web/main, and kill its processes?"]
    assert "31" in got.stderr
    assert "33" not in got.stderr
    assert "Neighbours on the same GPUs: prod/web/side, test/db/web" in got.stderr


@pytest.mark.parametrize("down", ["plugin", "mpsd"])
def test_terminate_needs_both_processes(node: FakeNode, down: str) -> None:
    getattr(node, down).close()
    got = node.run("terminate", "web", "--yes")
    assert (got.exit_code, node.asked) == (3, [])
    assert f"gpufrac {down}" in got.stderr


# --- mpsd replace


def replace(node: FakeNode, *arguments: str) -> Result:
    return node.run("mpsd", "replace", *arguments)


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["0"], {"daemon": uuid(0), "now": False}),
        (["pair0"], {"daemon": "pair0", "now": False}),
        (["2"], {"daemon": "pair0", "now": False}),
        (["1", "--now", "--yes"], {"daemon": "pair0", "now": True}),
        (["0", "--reason", "leak"], {"daemon": uuid(0), "now": False, "reason": "leak"}),
    ],
)
def test_replace_names_the_daemon(node: FakeNode, arguments: list[str], asked: Mapping[str, Any]) -> None:
    got = replace(node, *arguments)
    assert got.exit_code == 0, got.output
    assert node.asked == [asked]
    assert "is being replaced" in got.stdout


def test_replace_says_whom_it_waits_for(node: FakeNode) -> None:
    users(node)
    got = replace(node, "0")
    assert "until then it serves 1 client: pid 31 (python)" in got.stdout
    assert replace(node, "2", "--now").exit_code == 2, "nobody to ask"
    assert len(node.asked) == 1


@pytest.mark.parametrize("answer", [True, False])
def test_replace_at_once_asks(node: FakeNode, monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    users(node)
    questions = yes(monkeypatch, answer)
    got = replace(node, "1", "--now")
    assert (got.exit_code, len(node.asked)) == ((0, 1) if answer else (1, 0))
    assert questions == ["End the MPS daemon of group pair0 (GPU 1, 2) at once? It has 1 client: pid 33 (torch)."]


def test_replace_of_what_cannot_be(node: FakeNode) -> None:
    unknown = replace(node, "7")
    assert unknown.exit_code == 2
    assert "known are" in unknown.stderr
    node.refusal = "cannot replace the MPS daemon of x: it is stopping and not to come back"
    refused = replace(node, "0")
    assert refused.exit_code == 1
    assert "not to come back" in refused.stderr
    node.mpsd.close()
    assert replace(node, "0").exit_code == 3


@pytest.mark.parametrize("reason", ["", " ", "a\x07b", "two\nlines", "x" * 201])
def test_a_reason_that_mpsd_does_not_take_replaces_nothing(node: FakeNode, reason: str) -> None:
    assert replace(node, "0", "--reason", reason).exit_code == 2
    assert node.asked == []


def test_replace_as_json(node: FakeNode) -> None:
    users(node)
    got = replace(node, "0", "-o", "json")
    assert json.loads(got.stdout) == {"daemon": uuid(0), "now": False, "clients": [31]}


# --- mpsd cleanup


def test_cleanup_asks_and_says_what_to_stop_first(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    users(node)
    got = node.run("mpsd", "cleanup")
    assert (got.exit_code, node.cleaned) == (2, [])
    assert "add --yes" in got.stderr
    assert "gpufrac plugin is up: stop it first" in got.stderr
    node.plugin.close()
    questions = yes(monkeypatch, answer=False)
    got = node.run("mpsd", "cleanup")
    assert (got.exit_code, node.cleaned) == (1, [])
    (question,) = questions
    assert question.startswith("End every MPS daemon of this node, and restore the compute modes?")
    assert question.endswith("They have 2 clients: pid 31 (python), 33 (torch).")
    assert "gpufrac plugin" not in got.stderr


@pytest.mark.parametrize("left", [[], ["GPU 0: its compute mode"]])
@pytest.mark.parametrize("output", ["table", "json"])
def test_cleanup_names_what_is_left(node: FakeNode, left: list[str], output: str) -> None:
    node.left = left
    node.plugin.close()
    got = node.run("mpsd", "cleanup", "--yes", "-o", output)
    assert (got.exit_code, node.cleaned) == (1 if left else 0, [True])
    if output == "json":
        error = {"error": "cannot leave the node as it was found: GPU 0: its compute mode"}
        clean = {"left": left, "directories": [f"{node.root}/log", f"{node.root}/run", f"{node.root}/state"]}
        assert json.loads(got.stdout) == (error if left else clean)
    node.mpsd.close()
    assert node.run("mpsd", "cleanup", "--yes").exit_code == 3


def test_cleanup_does_not_say_that_the_node_is_as_found_while_a_plugin_runs(node: FakeNode) -> None:
    got = node.run("mpsd", "cleanup", "--yes")
    assert got.exit_code == 1
    assert "gpufrac plugin runs, so its CDI files and records stay" in got.stderr
    assert "as it was found:" not in got.stdout
    node.plugin.close()
    with ProcessLock("plugin", (f"{node.root}/plugin.lock",), wait_s=0, stop=threading.Event()):  # it hangs
        got = node.run("mpsd", "cleanup", "--yes")
    assert (got.exit_code, "gpufrac plugin runs" in got.stderr) == (1, True)
    got = node.run("mpsd", "cleanup", "--yes")
    assert (got.exit_code, got.stderr) == (0, "")
    assert "The node is as it was found" in got.stdout


def test_new_numbers_are_confirmed_by_somebody_who_was_told_them(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = node.run("mpsd", "confirm-indices")
    assert (got.exit_code, got.stdout) == (0, "The config's indices mean what the driver says already.\n")
    node.asked.clear()
    node.change(1, info=structs.replace(node.gpus[1].info, config_index=2))
    change = f"{uuid(1)} is 1 now and was 2"
    got = node.run("mpsd", "confirm-indices")
    assert (got.exit_code, node.asked) == (2, []), "nobody is there to ask"
    questions = yes(monkeypatch)
    got = node.run("mpsd", "confirm-indices")
    assert (got.exit_code, node.asked) == (0, [{}])
    assert questions == [f"Have the config's indices mean other GPUs than before? {change}."]
    assert got.stdout == f"The config's indices mean what the driver says: {change}.\n"
    got = node.run("mpsd", "confirm-indices", "--yes", "-o", "json")
    assert json.loads(got.stdout)["changes"] == [change]


@pytest.mark.parametrize("command", [["replace", "0"], ["cleanup", "--yes"]])
@pytest.mark.parametrize("before", [True, False])
def test_commands_of_mpsd_find_the_node_by_its_config(node: FakeNode, command: list[str], before: bool) -> None:
    path = Path(node.root) / "config.yaml"
    path.write_text(
        "apiVersion: gpufrac.dev/v1\nkind: NodeConfig\nresources:\n"
        "  - {name: gpufrac.dev/a, memory: {request: 8Gi}, compute: {mode: sm-sharing}}\n"
        f"mps: {{runRoot: {node.root}}}\n"
    )
    where = ["--config", str(path)]
    arguments = ["mpsd", *where, *command] if before else ["mpsd", *command, *where]
    node.plugin.close()
    got = CliRunner().invoke(cli, arguments)
    assert got.exit_code == 0, got.output


# --- whose a process is


def tenants(node: FakeNode) -> None:
    """On GPU 0: web's own, one of db that calls itself web's, one of web without a word, and one of a plain pod."""
    web = node.keys["prod/web/main"]
    node.use(
        0,
        GpuClient(pid=41, allocation_key=web, pod_uid="uid-web", command="own"),
        GpuClient(pid=42, allocation_key=web, pod_uid="uid-db", command="liar"),
        GpuClient(pid=43, pod_uid="uid-web", command="shy"),
        GpuClient(pid=44, allocation_key="f" * 20, pod_uid="uid-plain", command="plain"),
    )


def test_clients_are_those_of_their_real_pods(node: FakeNode) -> None:
    tenants(node)
    lines = {line.split()[1]: line for line in node.run("clients").stdout.splitlines() if line[0].isdigit()}
    for pid, pod in (("41", "prod/web/main"), ("42", "test/db "), ("43", "prod/web "), ("44", "pod uid-plain")):
        assert pod in lines[pid]
    for down in (node.mpsd, node.plugin):
        shown = json.loads(node.run("clients", "-o", "json").stdout)[0]["clients"]
        uids = [client["podUID"] for client in shown]
        assert uids == ["uid-web", "uid-db", "uid-web", "uid-plain"]
        down.close()


@pytest.mark.parametrize(
    ("target", "uid"), [("uid-plain", "uid-plain"), ("web", "uid-web"), ("uid-web", "uid-web"), ("test/db", "uid-db")]
)
def test_terminate_reaches_a_pod_by_what_the_kernel_says(node: FakeNode, target: str, uid: str) -> None:
    tenants(node)
    node.gone = True
    got = node.run("terminate", target, "--yes")
    assert got.exit_code == 0, got.output
    (asked,) = node.asked
    assert asked["pod_uids"] == [uid]


def test_who_is_not_ended_and_uses_the_gpu_on_is_a_failure(node: FakeNode) -> None:
    tenants(node)
    node.ended = {"clients": [ended(node, "terminated") | {"pid": 41}], "errors": []}
    got = node.run("terminate", "web", "--yes")
    assert got.exit_code == 1
    assert "cannot end pid 43" in got.stderr
    assert "pid 41" not in got.stderr
    shown = json.loads(node.run("terminate", "web", "--yes", "-o", "json").stdout)
    assert 43 in shown["missed"]


def test_the_pod_of_a_share_that_is_not_released_yet_can_be_terminated(node: FakeNode) -> None:
    """A pod deleted by force whose process lives on."""
    for container in ("main", "side"):
        del node.world.kubelet.containers["prod", "web", container]
    node.world.holds()
    node.world.keeper.observe()
    assert node.run("terminate", "prod/web", "--yes").exit_code == 0
    assert node.asked[0]["keys"] == sorted(node.keys[f"prod/web/{container}"] for container in ("main", "side"))


# --- GPUs that are gone


def test_a_drain_of_a_gpu_that_is_gone_is_ended_by_its_uuid(node: FakeNode) -> None:
    node.run("drain", "0", "1")
    restarted = node.world.open_broker(CONFIG)
    restarted.observe_snapshot(snapshot(*node.gpus[:1]))
    node.world.broker = restarted
    assert f"gpufrac undrain {uuid(1)}" in node.run("status").stdout
    assert CliRunner().invoke(cli, ["undrain", "--run-root", node.root, "--", "-1"]).exit_code == 2
    assert node.run("drain", uuid(1)).exit_code == 2
    got = CliRunner().invoke(cli, ["undrain", uuid(1), "--run-root", node.root])
    assert got.exit_code == 0, got.output
    assert "a GPU that is gone" in got.stdout
    assert restarted.inspect().drained.keys() == {uuid(0)}


# --- what reads show


def test_status_has_one_unit_and_cuts_long_lines(node: FakeNode) -> None:
    node.daemon(0, wedged=True, reason="wedged, it failed: " + "no answer and " * 100)
    got = node.run("status").stdout
    assert "4, 40 of 237Gi usable granted" in got
    lines = [line for line in got.splitlines() if "MPS daemon is wedged" in line]
    assert lines
    assert all(len(line) <= 304 and line.endswith(" ...") for line in lines)
    shown = json.loads(node.run("status", "-o", "json").stdout)
    assert any(len(line) > 1000 for line in shown["attention"])
    assert len(shown["attentionCodes"]) == len(shown["attention"])
    assert all(shown["attentionCodes"])


def test_resources_show_what_can_still_be_had(node: FakeNode) -> None:
    node.world.broker.publish()
    head, first, *_ = node.run("resources").stdout.splitlines()
    listed, held, free = head.index("LISTED"), head.index("HELD"), head.index("FREE")
    (row,) = [r for r in json.loads(node.run("resources", "-o", "json").stdout) if r["name"] == "gpufrac.dev/a"]
    assert (row["held"], row["free"]) == (3, row["healthy"] - 3)
    shown = [int(first[at:].split()[0]) for at in (listed, held, free)]
    assert shown == [row["listed"], row["held"], row["free"]]


def test_a_run_root_that_no_socket_fits_in_is_a_wrong_argument() -> None:
    for command in ("status", "drain 0", "mpsd cleanup --yes", "terminate a --yes"):
        got = CliRunner().invoke(cli, [*command.split(), "--run-root", "/tmp/" + "x" * 120])
        assert got.exit_code == 2, command
        assert "shorter" in got.stderr


def in_trouble(node: FakeNode) -> None:
    log = tuple(f"[Server] line {n}" for n in range(9))
    node.daemon(0, wedged=True, reason="queries time out", last_log=log)
    for index in (1, 2):
        node.daemon(index, protocol=3, pid=77)


def test_status_counts_daemons_not_gpus_and_shows_the_log_of_one_in_trouble(node: FakeNode) -> None:
    in_trouble(node)
    node.run("drain", "pair0")
    got = node.run("status").stdout
    assert "GPUs:         3, 3 ok, 2 drained" in got
    assert "MPS daemons:  1 ready of 2, MPS v2, v3" in got
    assert "Last log lines of the MPS daemon of GPU 0 (wedged):" in got
    assert "line 8" in got
    assert "line 3" not in got


def test_gpus_show_group_protocol_drain_and_wedge(node: FakeNode) -> None:
    in_trouble(node)
    node.run("drain", "1")
    lines = node.run("gpus").stdout.splitlines()
    assert "GROUP" in lines[0]
    assert "wedged v2" in lines[1]
    assert lines[1].endswith("queries time out")
    assert "drained  ready v3" in lines[2]
    assert "pair0" in lines[3]
    assert any("line 8" in line for line in lines)
    node.gpus = [structs.replace(gpu, group=gpu.info.uuid) for gpu in node.gpus]
    node.plugin.close()
    assert "GROUP" not in node.run("gpus").stdout.splitlines()[0]


def test_one_gpu_in_detail(node: FakeNode) -> None:
    in_trouble(node)
    users(node)
    got = node.run("gpus", "0").stdout
    for part in ("wedged since", "v2", "queries time out", "24Gi in 3 allocations", "3 (gpufrac clients --gpu 0)"):
        assert part in got
    assert got.count("GPU-") == 1
    assert "line 8" in got
    assert len(node.run("gpus", "pair0").stdout.split("\n\n")) == 2
    assert node.run("gpus", "7").exit_code == 2
    assert [gpu["uuid"] for gpu in json.loads(node.run("gpus", "1", "-o", "json").stdout)] == [uuid(1)]


def test_a_groups_daemon_is_one_row(node: FakeNode) -> None:
    in_trouble(node)
    rows = node.run("daemons").stdout.splitlines()
    assert [row.split()[:3] for row in rows[1:3]] == [["0", "wedged", "1"], ["1,2", "ready", "77"]]


def test_a_daemon_that_just_starts_shows_no_log(node: FakeNode) -> None:
    node.daemon(0, state=DaemonState.STARTING, last_log=("old",))
    assert "old" not in node.run("status").stdout
