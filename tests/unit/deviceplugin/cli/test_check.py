"""`gpufrac status --check`: an exit code and one line, also where a process is gone, hangs, or is another version's."""

import errno
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from deviceplugin.cli import check
from deviceplugin.status.model import PluginStatus
from deviceplugin.status.reasons import ProcessCode
from mpsd.common.reason import Reason
from mpsd.localapi.health import Health
from mpsd.localapi.methods import reading
from mpsd.localapi.reasons import HealthCode
from mpsd.localapi.server import LocalServer
from mpsd.localapi.snapshot import Snapshot
from tests.builders import info, snapshot, status
from tests.cli import gpufrac
from tests.world import World

HUNG = Reason(HealthCode.LOOP_STUCK, "its loop `x` has not gone round for 61 s")
STARTING = Reason(HealthCode.STARTING, "it has just started")


class Node:
    """Both sockets, and what stands behind them."""

    def __init__(self, root: Path, plugin: PluginStatus) -> None:
        self.root, self.plugin = root, plugin
        self.mpsd: Snapshot = snapshot(status(info(0)))
        self.health = {name: Health(pid=1) for name in ("mpsd", "plugin")}
        self._servers = {
            "mpsd": LocalServer(f"{root}/mpsd.sock", reading(self._methods("mpsd", "snapshot"))),
            "plugin": LocalServer(f"{root}/plugin.sock", reading(self._methods("plugin", "status"))),
        }
        for server in self._servers.values():
            server.start()

    def _methods(self, name: str, shown: str) -> dict[str, Any]:
        return {"health": lambda _: self.health[name], shown: lambda _: getattr(self, name)}

    def end(self, name: str) -> None:
        self._servers[name].close()

    def check(self, *arguments: str) -> tuple[int, str]:
        """Exit code and all that is said."""
        done = gpufrac("status", *arguments, "--run-root", str(self.root))
        assert done.stderr == ""
        return done.returncode, done.stdout


@pytest.fixture(scope="module")
def well(tmp_path_factory: pytest.TempPathFactory) -> PluginStatus:
    world = World(tmp_path_factory.mktemp("world"))
    world.tell()
    world.keeper.observe()
    picture = world.picture()
    world.ledger.close()
    resources = tuple(structs.replace(one, registration="registered") for one in picture.resources)
    return structs.replace(picture, resources=resources)


@pytest.fixture
def node(short_tmp: Path, well: PluginStatus) -> Iterator[Node]:
    with ExitStack() as stack:
        made = Node(short_tmp, well)
        stack.callback(made.end, "mpsd")
        stack.callback(made.end, "plugin")
        yield made


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--check"], "ok: nothing needs attention"),
        (["--check=attention", "--process", "plugin"], "ok: nothing needs attention"),
        (["--check=live"], "ok: mpsd and plugin live"),
        (["--check=ready", "--process", "mpsd"], "ok: mpsd can serve"),
    ],
)
def test_all_is_well(node: Node, arguments: list[str], line: str) -> None:
    assert node.check(*arguments) == (0, f"{line}\n")


@pytest.mark.parametrize("kind", ["attention", "live", "ready"])
def test_a_process_that_is_gone_is_3_and_the_other_one_is_not_concerned(node: Node, kind: str) -> None:
    node.end("mpsd")
    code, said = node.check(f"--check={kind}")
    assert code == 3
    assert said.startswith("mpsd does not answer: ProcessNotReachable: cannot reach `gpufrac mpsd`")
    assert said.count("\n") == 1
    assert node.check(f"--check={kind}", "--process=plugin")[0] == 0


def test_a_process_that_takes_connections_and_never_answers_is_3(
    node: Node, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is stopped, or whose threads all hang."""
    monkeypatch.setattr(check, "ASK_S", 0.1)
    node.end("plugin")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{short_tmp}/plugin.sock")
        silent.listen()
        code, said = node.check("--check=live", "--process", "plugin")
    assert code == 3
    assert said.startswith("plugin does not answer: ProcessNotReachable: ")
    assert "no answer within 0.1 s" in said


def test_a_process_whose_loop_hangs_is_3_whatever_it_says_besides(node: Node) -> None:
    node.health["plugin"] = Health(pid=1, not_live=(HUNG,), not_ready=(STARTING,))
    for kind in ("attention", "live", "ready"):
        assert node.check(f"--check={kind}") == (3, f"plugin hangs: LoopStuck: {HUNG}\n")
    assert node.check("--check=ready", "--process=mpsd")[0] == 0


def test_a_process_that_can_not_serve_yet_is_live_and_not_ready(node: Node) -> None:
    node.health["mpsd"] = Health(pid=1, not_ready=(STARTING, HUNG))
    assert node.check("--check=live")[0] == 0
    more = "(and 1 more, see gpufrac status)"
    assert node.check("--check=ready") == (1, f"mpsd is not ready: Starting: {STARTING} {more}\n")
    assert node.check("--check") == (1, f"needs attention: Starting: {STARTING} {more}\n")


def test_what_status_says_needs_attention_is_1(node: Node) -> None:
    node.mpsd = snapshot(status(info(0), health="sick", reason="XID 48\nof a kind", reason_code="CriticalXid"))
    code, said = node.check("--check")
    assert code == 1
    assert said.startswith("needs attention: CriticalXid: GPU 0 (")
    assert said.count("\n") == 1
    assert node.check("--check=ready") == (0, "ok: mpsd and plugin can serve\n")
    assert node.check("--check", "--process=plugin")[0] == 0


def test_json_has_the_code_and_all_reasons(node: Node) -> None:
    node.health["mpsd"] = Health(pid=1, not_ready=(STARTING, HUNG))
    code, said = node.check("--check=ready", "-o", "json")
    assert (code, json.loads(said)) == (
        1,
        {
            "check": "ready",
            "exitCode": 1,
            "state": "mpsd is not ready",
            "reasons": [
                {"code": "Starting", "message": STARTING.message},
                {"code": "LoopStuck", "message": HUNG.message},
            ],
        },
    )


def test_an_older_process_is_told_as_that(short_tmp: Path) -> None:
    server = LocalServer(f"{short_tmp}/mpsd.sock", reading({"snapshot": lambda _: snapshot()}))
    server.start()
    try:
        done = gpufrac("status", "--check=live", "--process=mpsd", "--run-root", str(short_tmp))
    finally:
        server.close()
    assert done.returncode == 1
    assert done.stdout.startswith(f"mpsd is not understood: {ProcessCode.NOT_UNDERSTOOD}: ")
    assert "is it of this command's version?" in done.stdout


def test_a_process_that_goes_between_the_questions_is_3(node: Node) -> None:
    def health_and_end(_: object) -> Health:
        Path(f"{node.root}/mpsd.sock").unlink()
        return Health(pid=1)

    node.end("plugin")
    server = LocalServer(f"{node.root}/plugin.sock", reading({"health": health_and_end}))
    server.start()
    try:
        code, said = node.check("--check")
    finally:
        server.close()
    assert code == 3
    assert said.startswith("mpsd does not answer")


def test_who_may_not_ask_is_told_to_be_root(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(_: socket.socket, __: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", connect)
    done = gpufrac("status", "--check=live", "--process=mpsd", "--run-root", str(short_tmp))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("permission denied; call it as root\n")


@pytest.mark.parametrize(
    "arguments", [["--process", "mpsd"], ["--check=alive"], ["--check=live", "--process", "kubelet"]]
)
def test_what_makes_no_sense_is_2(arguments: list[str]) -> None:
    done = gpufrac("status", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr
