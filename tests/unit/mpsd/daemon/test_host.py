"""The host's decisions, with small scripts in the binary's place: which protocol, whose daemon, where it starts."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from mpsd.common import processes
from mpsd.common.errors import ConfigError, TransientError
from mpsd.common.reason import message_of
from mpsd.config.model import GIB, MpsConfig
from mpsd.daemon import adopt, process
from mpsd.daemon import dirs as directories
from mpsd.daemon.adopt import PIPE_DIRECTORY
from mpsd.daemon.controller import MpsClients
from mpsd.daemon.host import ForeignDaemonError, LocalHost, ProtocolChoice
from mpsd.daemon.namespaces import Namespace
from mpsd.daemon.paths import DaemonDirs, daemon_dirs
from mpsd.daemon.plan import DAEMON_MARKER, DaemonSpec
from mpsd.daemon.state import StateFile
from tests.unit.mpsd.daemon.fakes import Scripted
from tests.waiting import WAIT_S

DAEMON = """
import os, select, socket, sys
pipe = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
listener = socket.socket(socket.AF_UNIX)
listener.bind(f"{pipe}/control")
listener.listen()
with open(f"{pipe}/arguments", "w") as file:
    file.write(" ".join(sys.argv[1:]))
reads, writes = os.pipe()
if os.fork():
    os.read(reads, 1)
    os._exit(0)
os.setsid()
os.write(writes, b"x")
select.select([], [], [])
"""
"""Listens, and leaves no pid file: whether protocol 3 writes one is unknown."""

HELP = "Modules:\n  server\n  namespace\n"


class Node:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.mps = MpsConfig(binary=f"{root}/control", run_root=f"{root}/run", log_root=f"{root}/log")
        self.dirs = daemon_dirs(self.mps, "pair0")
        self.state = StateFile(f"{root}/state/mpsd.json", processes.boot_id())
        self.host = LocalHost(self.mps, self.state)
        (root / "daemon.py").write_text(DAEMON)
        self.binary(f'exec {sys.executable} -ISB {root}/daemon.py "$@"')

    def binary(self, script: str) -> None:
        path = Path(self.mps.binary)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def forget(self) -> None:
        """As where the state file is lost."""
        self.state = StateFile(f"{self.root}/state/other.json", processes.boot_id())
        self.host = LocalHost(self.mps, self.state)

    def spec(self, protocol: int = 3, gpus: tuple[str, ...] = ("GPU-a", "GPU-b")) -> DaemonSpec:
        environment = (
            ("CUDA_MPS_PIPE_DIRECTORY", self.dirs.pipe),
            ("CUDA_MPS_PROTOCOL_VERSION", str(protocol)),
            ("CUDA_VISIBLE_DEVICES", ",".join(gpus)),
            (DAEMON_MARKER, "pair0"),
        )
        return DaemonSpec("pair0", gpus, protocol, GIB, self.dirs, environment, (Namespace("a", GIB),))


@pytest.fixture
def node(short_tmp: Path) -> Iterator[Node]:
    node = Node(short_tmp)
    yield node
    node.host.kill(node.spec(), None, ())


OLD_HELP = "usage: nvidia-cuda-mps-control [-d | -f] [-multiuser-server]"


@pytest.mark.parametrize(
    ("wanted", "driver", "said", "protocol", "objection"),
    [
        ("2", "615.71.09", HELP, 2, ""),
        ("auto", "580.95.05", HELP, 2, ""),
        ("auto", "", HELP, 2, ""),
        ("auto", "615.71.09", HELP, 3, ""),
        ("auto", "620.1", OLD_HELP, 2, ""),
        ("3", "615.71.09", HELP, 3, ""),
        ("3", "580.95.05", HELP, 3, "it needs driver 615 and this is 580.95.05: set mps.protocol to auto"),
        ("3", "", HELP, 3, "this is unknown"),
        ("3", "615.71.09", OLD_HELP, 3, "does not offer it: set mps.protocol to auto"),
    ],
)
def test_protocol(node: Node, wanted: str, driver: str, said: str, protocol: int, objection: str) -> None:
    node.binary(f"[ \"$*\" = '-p 3 -h' ] && echo '{said}'; exit 1")  # which exit status help has is unknown
    choice = LocalHost(msgspec.structs.replace(node.mps, protocol=wanted), node.state).protocol(driver)
    assert choice.protocol == protocol
    assert objection in message_of(choice.objection)
    assert bool(choice.objection) is bool(objection)


def test_a_binary_is_asked_only_where_the_driver_may_have_it(node: Node) -> None:
    os.unlink(node.mps.binary)
    assert node.host.protocol("580.95.05") == ProtocolChoice(2)
    choice = node.host.protocol("615.71.09")
    assert choice.unsure
    assert re.search(r"is not known: cannot run .*/control: No such file", message_of(choice.objection))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("sleep 60", "cannot get an answer"),
        ("true", "said nothing (exit 0)"),
        ("kill -9 $$", "(exit -9)"),
        ("echo 'x: error while loading shared libraries: libcuda.so.1'; exit 1", "loading shared libraries"),
        ("echo 'sh: not found'; exit 127", "(exit 127)"),
    ],
)
def test_a_binary_that_does_not_tell_is_no_proof_that_it_lacks_protocol_3(node: Node, script: str, said: str) -> None:
    node.binary(script)
    choice = LocalHost(node.mps, node.state, help_s=0.3 if script == "sleep 60" else WAIT_S).protocol("615.71.09")
    assert choice.objection
    assert said in message_of(choice.unsure)


@pytest.mark.parametrize(("wanted", "driver", "known"), [("auto", "615.71.09", True), ("auto", "620.1", False)])
def test_what_the_binary_told_last_with_this_driver_counts_also_after_a_reboot(
    node: Node, wanted: str, driver: str, known: bool
) -> None:
    node.binary(f"echo '{HELP}'")
    assert node.host.protocol("615.71.09") == ProtocolChoice(3)
    node.binary("sleep 60")
    state = StateFile(f"{node.root}/state/mpsd.json", "another boot")
    choice = LocalHost(msgspec.structs.replace(node.mps, protocol=wanted), state, help_s=0.3).protocol(driver)
    assert (choice.protocol, not choice.objection, bool(choice.unsure)) == (3, known, True)


def test_a_daemon_is_started_found_and_ended(node: Node) -> None:
    running = node.host.spawn(node.spec())
    assert running.adopted is False
    assert (running.identity.protocol, running.identity.gpus) == (3, ("GPU-a", "GPU-b"))
    multiuser = "-m " if os.geteuid() == 0 else ""
    arguments = Path(node.dirs.pipe, "arguments").read_text()
    assert arguments == f"-p 3 -d {multiuser}-a {node.dirs.config_file}"
    assert "[servers.s.namespaces.a]" in Path(node.dirs.config_file).read_text()
    assert node.state.saved.daemons == {"pair0": running.identity}
    found = LocalHost(node.mps, node.state).find(node.spec())
    assert found is not None
    assert (found.identity, found.adopted) == (running.identity, True)
    node.host.kill(node.spec(), running.identity, ())
    assert not process.is_alive(running.identity)
    assert node.state.saved.daemons == {}
    assert node.host.find(node.spec()) is None
    node.host.remove(node.spec(), homes=True)
    assert os.listdir(f"{node.root}/run/mps") == []


@pytest.mark.parametrize(
    ("protocol", "gpus", "outdated"),
    [
        (3, ("GPU-a", "GPU-b"), ""),
        (2, ("GPU-a", "GPU-b"), "it speaks MPS protocol 3, and 2 is wanted"),
        (3, ("GPU-b", "GPU-a"), "it serves GPU-a, GPU-b, and GPU-b, GPU-a are wanted"),
    ],
)
def test_an_adopted_daemon_says_what_it_lacks(node: Node, protocol: int, gpus: tuple[str, ...], outdated: str) -> None:
    node.host.spawn(node.spec())
    found = node.host.spawn(node.spec(protocol, gpus))
    assert (found.adopted, message_of(adopt.outdated(found.identity, node.spec(protocol, gpus)))) == (True, outdated)


def test_a_daemon_of_ours_is_taken_over_without_record_and_pid_file(node: Node) -> None:
    identity = node.host.spawn(node.spec()).identity
    node.forget()
    found = node.host.spawn(node.spec())
    assert (found.identity, found.adopted) == (identity, True)
    assert node.state.saved.daemons == {"pair0": identity}


def test_what_a_dead_daemon_left_is_no_obstacle(node: Node) -> None:
    directories.prepare(node.dirs)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(node.dirs.control_socket)
    Path(node.dirs.pid_file).write_text(f"{2**22 + 1}\n")
    assert not node.host.spawn(node.spec()).adopted


def test_a_directory_where_the_socket_belongs_is_no_obstacle(node: Node) -> None:
    directories.prepare(node.dirs)
    os.makedirs(f"{node.dirs.control_socket}/deep")
    os.mkfifo(node.dirs.pid_file)
    os.symlink("..", f"{node.dirs.pipe}/s")
    assert not node.host.spawn(node.spec()).adopted


def test_a_tenant_that_a_pid_file_names_is_not_adopted(node: Node) -> None:
    directories.prepare(node.dirs)
    tenant = {**dict(node.spec().environment), processes.SIMULATED_POD_UID: "uid-1"}
    arguments = [sys.executable, "-ISc", "import sys; print(flush=True); sys.stdin.read()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, stdin=pipe, stdout=pipe, env=tenant) as running:
        assert running.stdout is not None
        running.stdout.readline()
        Path(node.dirs.pid_file).write_text(str(running.pid))
        host = LocalHost(node.mps, node.state, simulated=True)
        assert host.find(node.spec()) is None
        host.kill(node.spec(), None, ())
        assert running.poll() is None


def test_whoever_else_listens_there_is_left_alone(node: Node) -> None:
    directories.prepare(node.dirs)
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(node.dirs.control_socket)
        foreign.listen()
        said = rf"a process that we did not start listens on .*control \(pid {os.getpid()}\): end it"
        with pytest.raises(ForeignDaemonError, match=said):
            node.host.spawn(node.spec())
        assert os.path.exists(node.dirs.control_socket)


SQUAT = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print(flush=True)
sys.stdin.read()
"""


def test_a_tenant_that_listens_in_the_daemons_place_keeps_no_daemon_from_starting(node: Node) -> None:
    """With `mps.writableMount` root in a container can remove the socket and bind its own."""
    directories.prepare(node.dirs)
    arguments, pipe = [sys.executable, "-ISc", SQUAT, node.dirs.control_socket], subprocess.PIPE
    with subprocess.Popen(arguments, stdin=pipe, stdout=pipe, env={processes.SIMULATED_POD_UID: "uid-1"}) as tenant:
        assert tenant.stdout is not None
        tenant.stdout.readline()
        assert directories.listener(node.dirs) == tenant.pid
        with pytest.raises(ForeignDaemonError, match=f"pid {tenant.pid}"):
            node.host.spawn(node.spec())  # as a process of the host it would be left alone
        running = LocalHost(node.mps, node.state, simulated=True).spawn(node.spec())
        assert directories.listener(node.dirs) != tenant.pid
        assert process.is_alive(running.identity)
        assert tenant.poll() is None


def test_a_foreign_daemon_named_by_the_pid_file_is_left_alone(node: Node) -> None:
    directories.prepare(node.dirs)
    unmarked = {name: value for name, value in node.spec().environment if name != DAEMON_MARKER}
    process.start([node.mps.binary, "-d"], unmarked, node.dirs, 10.0)
    pid = next(
        int(pid)
        for pid in os.listdir("/proc")
        if pid.isdigit() and processes.environ(int(pid)).get(PIPE_DIRECTORY) == node.dirs.pipe
    )
    Path(node.dirs.pid_file).write_text(str(pid))
    with pytest.raises(ForeignDaemonError, match=f"with pid {pid} lives there, and we did not start it"):
        node.host.spawn(node.spec())
    foreign = process.identify(pid)
    assert foreign is not None
    assert process.kill_and_wait(lambda: (foreign,), 5.0) == []


class Elsewhere:
    """A place that notes what it is asked. `program` comes before the daemon's."""

    def __init__(self, *program: str) -> None:
        self.program, self.asked = program, list[tuple[str, str]]()

    def launch(
        self, name: str, dirs: DaemonDirs, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[Sequence[str], Mapping[str, str]]:
        assert os.path.isdir(dirs.pipe)
        self.asked.append(("launch", name))
        return [*self.program, *arguments], environment

    def reach(
        self, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[Sequence[str], Mapping[str, str]]:
        self.asked.append(("reach", " ".join(arguments[1:])))
        return [*self.program, *arguments], environment

    def explain(self, returncode: int, output: str) -> str:
        return f"launch {returncode}: {output.strip()}"

    def leave(self, name: str) -> None:
        self.asked.append(("leave", name))

    def remove(self, dirs: DaemonDirs) -> None:
        self.asked.append(("remove", dirs.shared_memory))


def test_a_daemon_starts_where_its_place_is_and_that_is_cleared_after_it(node: Node) -> None:
    place = Elsewhere("env", "LAUNCHED=1")
    host, spec = LocalHost(node.mps, node.state, place=place), node.spec()
    identity = host.spawn(spec).identity
    assert processes.environ(identity.pid)["LAUNCHED"] == "1"
    host.kill(spec, identity, ())
    host.remove(spec, homes=True)
    assert place.asked == [("launch", "pair0"), ("leave", "pair0"), ("remove", f"{spec.dirs.pipe}.shm")]


def test_a_place_that_cannot_be_reached_is_explained(node: Node) -> None:
    host = LocalHost(node.mps, node.state, place=Elsewhere("sh", "-c", "echo oops; exit 97"))
    with pytest.raises(TransientError, match="cannot start the MPS control daemon: launch 97: oops"):
        host.spawn(node.spec())


def test_a_socket_path_that_does_not_fit_is_no_passing_trouble(node: Node) -> None:
    mps = msgspec.structs.replace(node.mps, run_root=f"{node.root}/{'x' * 90}")
    spec = DaemonSpec("pair0", ("GPU-a",), 2, GIB, daemon_dirs(mps, "pair0"), ())
    with pytest.raises(ConfigError, match="choose a shorter"):
        node.host.spawn(spec)


def test_each_protocol_has_its_commands(node: Node) -> None:
    control = Scripted({"get_server_list": "5", "get_client_list 5": "70", "terminate_client 5 70": "0"})
    host = LocalHost(node.mps, node.state, control)
    assert host.clients(node.spec(2)) == MpsClients((5,), (70,))
    host.terminate_client(node.spec(2), 70)
    host.quit(node.spec(2), 10.0)
    assert control.asked[-1] == "quit -t 5"
    with pytest.raises(AssertionError):
        host.clients(node.spec(3))
