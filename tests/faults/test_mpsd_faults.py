"""One table of what can go wrong below mpsd: fault -> state, what an operator is told, what heals it.

Each row strikes GPU 0 of two; the daemon of GPU 1 must stay ready and the same. A row runs under both MPS protocols
where they have a part in it. Waits are counted in snapshots published, or end with a line logged; never with a time.
"""

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mpsd.common import processes
from mpsd.config.model import GIB, GpuSelection, WedgePolicy
from mpsd.daemon import process
from mpsd.daemon.adopt import DaemonIdentity
from mpsd.daemon.dirs import is_linked
from mpsd.daemon.namespaces import share_name
from mpsd.daemon.paths import namespace_socket
from mpsd.daemon.state import Saved
from mpsd.gpu.model import ComputeMode, GpuHealth, Mode
from mpsd.localapi.snapshot import DaemonState, GpuStatus
from mpsd.sim.switches import set_switch
from tests.e2e.mpsdnode import first_line, is_ready
from tests.faults.mpsd.node import (
    LIMIT,
    POLICY,
    RESOURCE,
    STEPS,
    Node,
    daemon_of,
    opened,
    pid_of,
    quick,
    texts,
)
from tests.mpspaths import link_directory, mount_directory, own_link

__all__ = ["quick"]
pytestmark = pytest.mark.usefixtures("quick")

Step = Callable[[Node], object]
READY, CONFIGURING, BACKOFF = DaemonState.READY, DaemonState.CONFIGURING, DaemonState.BACKOFF
DRAINING, FAILED = DaemonState.DRAINING, DaemonState.FAILED
REPORT, REPLACE = WedgePolicy.REPORT, WedgePolicy.REPLACE


class At(Enum):
    """When the fault strikes: before mpsd starts; when all is ready; with an allocation; with a CUDA client of it."""

    START = 0
    READY = 1
    BOUND = 2
    CLIENT = 3


class After(Enum):
    """The daemon at the end: the one of before, or another."""

    SAME = 0
    NEW = 1


def nothing(node: Node) -> None:
    """It heals by itself."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """`state`: what the daemon comes to, None where none is shown; `says`: a pattern in what is said of the GPU then,
    empty: nothing is. `passing`: what is said shows too shortly to wait for, so only the log is read. `logs`: a pattern
    of the one line that mpsd logs of it; `healed`: of one after that, where nothing else shows that it was healed.
    `heal`: None where it just works, or where only another start helps."""

    fault: str
    at: At
    inject: Step
    state: DaemonState | None
    says: str = ""
    shown: Callable[[Node, GpuStatus], bool] = lambda _node, _gpu: True
    passing: bool = False
    logs: str = ""
    healed: str = ""
    heal: Step | None = None
    after: After = After.SAME
    protocols: tuple[int, ...] = (2, 3)
    found: ComputeMode = ComputeMode.DEFAULT
    wide: bool = False
    steps: int = STEPS
    mps: dict[str, Any] = field(default_factory=dict)


def emulated(name: str, value: str = "") -> tuple[Step, Step]:
    """A fault of the emulator, and its end."""
    return (lambda node: node.fault(name, value)), (lambda node: node.clear(name))


def before(fault: str, name: str, value: str = "", *, state: DaemonState, says: str, **more: object) -> Row:
    """A fault of the emulator that is there when the daemon is started; nothing but its end helps."""
    inject, heal = emulated(name, value)
    return Row(fault=fault, at=At.START, inject=inject, heal=heal, state=state, says=says, **more)  # type: ignore[arg-type]


# --- before the start ----------------------------------------------------------------------------------------------


def no_binary(node: Node) -> None:
    os.rename(node.config.mps.binary, f"{node.root}/away")


def binary_back(node: Node) -> None:
    os.rename(f"{node.root}/away", node.config.mps.binary)


def run_root_of(node: Node, longest: int) -> None:
    """A run root so long that the socket of a namespace (protocol 3), or the daemon's (2), has so many bytes."""
    tail = f"/mps/{node.uuid}/" + ("s/" + "x" * 23 + "/" if node.protocol == 3 else "") + "control"
    root = f"{node.root}/"
    mps = msgspec.structs.replace(node.config.mps, run_root=root + "r" * (longest - len(root) - len(tail)))
    node.config = msgspec.structs.replace(node.config, mps=mps)


def in_the_way(path: Callable[[Node], str], *, directory: bool = False) -> tuple[Step, Step]:
    """Something else lies where mpsd wants to write, and is removed."""

    def put(node: Node) -> None:
        os.makedirs(os.path.dirname(path(node)), exist_ok=True)
        if directory:
            os.mkdir(path(node))
        else:
            Path(path(node)).write_text("")

    return put, lambda node: os.rmdir(path(node)) if directory else os.unlink(path(node))


def links_start_output(node: Node) -> None:
    os.makedirs(node.dirs.log)
    Path(node.root, "victim").write_text("precious")
    os.symlink(node.root / "victim", node.dirs.start_output)


def closed_directories(node: Node) -> None:
    """Our own are opened; one above them is not ours to open."""
    os.makedirs(node.dirs.pipe)
    for path in (node.dirs.run_root, f"{node.dirs.run_root}/mps", node.dirs.pipe):
        os.chmod(path, 0o700)


def are_open(node: Node) -> bool:
    paths = (node.dirs.run_root, f"{node.dirs.run_root}/mps", node.dirs.pipe)
    return all(stat.S_IMODE(os.stat(path).st_mode) == 0o755 for path in paths)


def stale_files(node: Node) -> None:
    set_switch(node.simulation, "stale-socket", "refuse")
    os.makedirs(node.dirs.pipe)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(node.dirs.control_socket)
    Path(node.dirs.pid_file).write_text("2147483646\n")


def pid_file_of_another(node: Node) -> None:
    os.makedirs(node.dirs.pipe)
    node.bystander = node.program("sleep", "600")
    Path(node.dirs.pid_file).write_text(f"{node.bystander.pid}\n")
    Path(node.dirs.control_socket).write_text("")


def reused_pid(node: Node) -> None:
    """The record names a PID that is somebody else's by now."""
    other = node.bystander = node.program("sleep", "600")
    identity = DaemonIdentity(
        boot_id=processes.boot_id(),
        pid=other.pid,
        start_time=1,
        process_group=os.getpgid(other.pid),
        pipe_directory=node.dirs.pipe,
        protocol=node.protocol,
        gpus=(node.uuid,),
    )
    saved = Saved(boot_id=identity.boot_id, daemons={node.uuid: identity})
    node.state_path.parent.mkdir()
    node.state_path.write_bytes(msgspec.json.encode(saved))


def lives(node: Node, _gpu: GpuStatus) -> bool:
    """The process that was mistaken for a daemon is left alone."""
    return node.bystander is not None and node.bystander.poll() is None


def foreign_daemon(node: Node) -> None:
    os.makedirs(node.dirs.pipe)
    os.makedirs(node.dirs.log)
    environment = {
        "PATH": "/usr/bin:/bin",
        "CUDA_MPS_PIPE_DIRECTORY": node.dirs.pipe,
        "CUDA_MPS_LOG_DIRECTORY": node.dirs.log,
    }
    process.start([node.config.mps.binary, "-d"], environment, node.dirs, 10.0)
    foreign = process.find_started(node.uuid, node.dirs, processes.boot_id())
    node.later(lambda: process.kill_and_wait(lambda: [foreign], 10.0))
    node.foreign = foreign


def end_foreign(node: Node) -> None:
    foreign = node.foreign
    assert foreign is not None
    assert process.is_alive(foreign)
    assert process.kill_and_wait(lambda: [foreign], 10.0) == []
    node.supervisor.replace(node.uuid, "the foreign one was ended", now=False)


def foreign_listener(node: Node) -> None:
    os.makedirs(node.dirs.pipe)
    node.listener = socket.socket(socket.AF_UNIX)
    node.later(node.listener.close)
    node.listener.bind(node.dirs.control_socket)
    node.listener.listen()


def end_listener(node: Node) -> None:
    assert node.listener is not None
    node.listener.close()
    node.supervisor.replace(node.uuid, "the listener was ended", now=False)


def state_in_the_way(node: Node) -> None:
    shutil.rmtree(node.state_path.parent, ignore_errors=True)
    node.state_path.parent.write_text("")


def state_out_of_the_way(node: Node) -> None:
    node.state_path.parent.unlink()


def corrupt_state(node: Node) -> None:
    node.state_path.parent.mkdir()
    node.state_path.write_text('{"version": 1, "boot')


def bound_without_limits(node: Node) -> None:
    node.fault("limit-not-applied")
    node.bind()


# --- a daemon that does not answer ---------------------------------------------------------------------------------


def with_client_gone(name: str) -> Step:
    """The last client leaves, and the daemon is replaced though the fault goes on."""

    def heal(node: Node) -> None:
        assert node.is_untouched()
        node.end_clients()
        node.said.until(f"daemon stopping daemon={node.uuid} .*replaced as nobody uses it: wedged")
        node.clear(name)

    return heal


def clients_told(node: Node) -> None:
    node.until_told()
    node.clear("wedge")


def stop_process(node: Node) -> None:
    node.control.hopeless[node.dirs.pipe] = ""
    node.signal(signal.SIGSTOP)


def answers_again(node: Node) -> None:
    node.control.hopeless.clear()


def remove_pipe_directory(node: Node) -> None:
    shutil.rmtree(node.dirs.pipe)


def wedged(_node: Node, gpu: GpuStatus) -> bool:
    return daemon_of(gpu).wedged and daemon_of(gpu).pinned_limit_bytes is None


def replaced(name: str, value: str = "") -> tuple[Step, Step]:
    """A fault of the emulator and an operator who has the daemon replaced at once."""

    def inject(node: Node) -> None:
        node.fault(name, value)
        node.supervisor.replace(node.uuid, "an operator asked for it", now=True)

    return inject, lambda node: node.clear(name)


def drain(node: Node) -> None:
    node.supervisor.replace(node.uuid, "an operator asked for it", now=False)


def clients_leave(node: Node) -> None:
    assert node.is_untouched()
    node.end_clients()


# --- limits ---------------------------------------------------------------------------------------------------------


def namespace(slot: int = 0) -> str:
    return share_name(RESOURCE, slot)


def set_another_limit(node: Node) -> None:
    if node.protocol == 2:
        node.command("set_default_device_pinned_mem_limit", "0", "1024M")
    else:
        node.command("namespace", "set", namespace(), "--server=s", "--pinned-memory-limit=1024M")


def delete_namespace(node: Node) -> None:
    node.command("namespace", "delete", namespace(), "--server=s")


def limit_is_back(node: Node) -> None:
    """By the daemon's own word."""
    question, answer = "get_default_device_pinned_mem_limit 0", "8192M"
    if node.protocol == 3:
        question, answer = "namespace list --server=s --format=csv,noheader", f"{namespace()},s,Ready,8G,"
    while not any(line.startswith(answer) for line in node.command(*question.split()).splitlines()):
        node.control.until_asked(node.dirs, 1)


def remove_socket(node: Node) -> None:
    os.unlink(namespace_socket(node.dirs, namespace()))


def remove_link(node: Node) -> None:
    os.unlink(f"{link_directory(node.dirs, namespace())}/control")


def socket_is_back(node: Node) -> None:
    while not is_linked(node.dirs, own_link(node.dirs, namespace())):
        node.control.until_asked(node.dirs, 1)


def lower_limit(node: Node) -> None:
    """Of an allocation that has a client; its neighbour has none."""
    node.bind(node.share(limit_bytes=4 * GIB), node.share(1, limit_bytes=4 * GIB))


def objections(gpu: GpuStatus) -> dict[str, bool]:
    return {attached.key: bool(attached.objection) for attached in daemon_of(gpu).attached}


def bind_with_half_answers(node: Node) -> None:
    """Of a list of namespaces the last ones are cut off."""
    node.fault("half-line")
    node.bind(node.share(8))


# --- servers and clients --------------------------------------------------------------------------------------------


def kill_daemon(node: Node) -> None:
    node.signal(signal.SIGKILL)


def kill_daemon_of_clients(node: Node) -> None:
    """Its server and so the clients' contexts live on until mpsd ends them."""
    set_switch(node.simulation, "server-after-daemon-death", "stay")
    node.survivors = node.mps_pids() - {pid_of(node.gpu)}
    assert node.survivors
    node.signal(signal.SIGKILL)


def survivors_ended(node: Node) -> None:
    node.until_told()
    assert not node.survivors & node.mps_pids()


def crash_server(node: Node) -> None:
    node.fault("server-crash")
    node.until_told()


def fault_a_client(node: Node) -> None:
    node.held.append(node.cuda("--fault", "--hold", "--stay", slot=1))


def faulted_leave(node: Node) -> None:
    assert first_line(node.held[0]) == "CUDA_ERROR_LAUNCH_FAILED"
    node.end_clients()


def unlink_log_and_fault(node: Node) -> None:
    node.server_log.unlink()
    fault_a_client(node)


def link_log(node: Node) -> None:
    victim = node.root / "victim"
    victim.write_text("x" * 2 * node.log_max_bytes)
    os.unlink(f"{node.dirs.log}/control.log")
    os.symlink(victim, f"{node.dirs.log}/control.log")


def victim_is_whole(node: Node, _gpu: GpuStatus) -> bool:
    return (node.root / "victim").stat().st_size == 2 * node.log_max_bytes


def loop_servers(node: Node) -> None:
    node.fault("restart-loop")
    node.fault("server-crash")
    node.cuda("--allocate", "1Gi")


def pid_zero(node: Node) -> None:
    node.fault("pid-zero")
    node.hold()


def is_warned(node: Node, gpu: GpuStatus) -> bool:
    said = f"MPS daemon of GPU {gpu.info.index}: its clients show PID 0"
    return any(said in warning for warning in node.supervisor.snapshot.warnings)


# --- GPUs, driver, compute mode --------------------------------------------------------------------------------------


def driver_fault(name: str, text: str = "", *, of_gpu: bool = True) -> tuple[Step, Step]:
    """A fault of the driver, and its end."""

    def inject(node: Node) -> None:
        node.driver.set_fault(name, text, node.uuid if of_gpu else None)

    return inject, lambda node: node.driver.clear_fault(name, node.uuid if of_gpu else None)


def health_is(health: GpuHealth) -> Callable[[Node, GpuStatus], bool]:
    return lambda _node, gpu: gpu.health is health


def lose_bound_gpu(node: Node) -> None:
    """It vanishes, and its allocation ends meanwhile."""
    node.driver.set_fault("lost", uuid=node.uuid)
    node.until(lambda gpu: gpu.health is GpuHealth.LOST)
    node.release()


def is_recorded(node: Node, gpu: GpuStatus) -> bool:
    """The compute mode found is not forgotten."""
    saved = json.loads(node.state_path.read_text())
    return gpu.health is GpuHealth.LOST and saved["compute_modes"] == {node.uuid: "PROHIBITED"}


def another_driver(node: Node) -> None:
    """It is unloaded, and another version loaded in its place."""
    node.driver.set_fault("init-error", "Driver Not Loaded")
    node.driver.set_fault("driver-version", f"{580 if node.protocol == 2 else 615}.99.07")


def driver_loaded(node: Node) -> None:
    node.driver.clear_fault("init-error")
    node.until_all(lambda s: (s.driver_version or "").endswith(".99.07") and not s.reason)


def bind_with(fault: str, text: str) -> tuple[Step, Step]:
    """A fault of the driver in the way of a binding."""
    inject, heal = driver_fault(fault, text)

    def bind(node: Node) -> None:
        inject(node)
        node.bind()

    return bind, heal


def bind_without_record(node: Node) -> None:
    state_in_the_way(node)
    node.bind()


def bind_used(node: Node) -> None:
    """Somebody else's process has the GPU."""
    node.hold(None)
    node.until(lambda gpu: bool(gpu.foreign_processes))
    node.bind()


def is_unbound(_node: Node, gpu: GpuStatus) -> bool:
    return gpu.mode is None


def is_prohibited(_node: Node, gpu: GpuStatus) -> bool:
    return gpu.mode is None and gpu.driver_compute_mode is ComputeMode.PROHIBITED


def meddle(node: Node) -> None:
    node.driver.set_compute_mode(node.uuid, "PROHIBITED" if node.protocol == 2 else "EXCLUSIVE_PROCESS")


def exclude(node: Node) -> None:
    """A reload takes the GPU out while a client is on it."""
    node.release()
    node.supervisor.config_changed(msgspec.structs.replace(node.config, gpus=GpuSelection(exclude=(0,))))


def include(node: Node) -> None:
    assert node.is_untouched()
    node.supervisor.config_changed(node.config)


FILE_PIPE, NO_FILE_PIPE = in_the_way(lambda node: node.dirs.pipe)
FILE_LOG, NO_FILE_LOG = in_the_way(lambda node: node.dirs.log)
FILE_ROOT, NO_FILE_ROOT = in_the_way(lambda node: f"{node.dirs.run_root}/mps")
DIRECTORY_CONFIG, NO_DIRECTORY_CONFIG = in_the_way(lambda node: node.dirs.config_file, directory=True)
WEDGE, NO_WEDGE = emulated("wedge")
DROP, NO_DROP = emulated("drop")
HALF, NO_HALF = emulated("half-line")
SLOW, NO_SLOW = emulated("slow", "400")
VANISH, _ = emulated("server-vanishes")
HUNG, NO_HUNG = replaced("hung-quit")
LOST, FOUND = driver_fault("lost")
FAILING, NO_FAILING = driver_fault("fail")
DENIED, ALLOWED = bind_with("no-permission", "set_compute_mode")
NO_ANSWER = r"cannot get an answer to '(set_default_device_pinned_mem_limit|namespace list|get_default)"
IN_FAULT = r"MPS server \d+ is in FAULT until the clients it served have left: client (pid \d+ \(\S+, allocation k\d\))"

TABLE = [
    # The binary, the paths, what is left from before
    Row(
        fault="binary missing",
        at=At.START,
        inject=no_binary,
        heal=binary_back,
        state=BACKOFF,
        says="No such file or directory: is the driver's MPS package installed",
        protocols=(2,),
        wide=True,
        after=After.NEW,
    ),
    Row(
        fault="binary missing, its protocol unknown",
        at=At.START,
        inject=no_binary,
        heal=binary_back,
        state=BACKOFF,
        says="No such file or directory: is the driver's MPS package installed",
        protocols=(3,),
        wide=True,
    ),
    Row(
        fault="binary not executable",
        at=At.START,
        inject=lambda node: os.chmod(node.config.mps.binary, 0o644),
        heal=lambda node: os.chmod(node.config.mps.binary, 0o755),
        state=BACKOFF,
        says="Permission denied: is the driver's MPS package installed",
        protocols=(2,),
        wide=True,
    ),
    Row(
        fault="daemon's socket path too long",
        at=At.START,
        inject=lambda node: run_root_of(node, 108),
        state=FAILED,
        says="is 108 bytes long, more than the 107 a socket path may have: choose a shorter mps.runRoot",
        protocols=(2,),
        wide=True,
    ),
    Row(
        fault="daemon's socket path as long as can be",
        at=At.START,
        inject=lambda node: run_root_of(node, 107),
        state=READY,
        wide=True,
    ),
    Row(
        fault="namespaces' socket paths too long",
        at=At.START,
        inject=lambda node: run_root_of(node, 108),
        state=None,
        says="would have 108 bytes, and 107 is the most a socket can have: set a shorter mps.runRoot",
        protocols=(3,),
        wide=True,
    ),
    Row(
        fault="run directory can't be made",
        at=At.START,
        inject=FILE_ROOT,
        heal=NO_FILE_ROOT,
        state=BACKOFF,
        says="cannot make the directory .*/run/mps",
        wide=True,
        protocols=(2,),
    ),
    Row(
        fault="pipe directory can't be made",
        at=At.START,
        inject=FILE_PIPE,
        heal=NO_FILE_PIPE,
        state=BACKOFF,
        says="cannot make the directory .*/GPU-",
        protocols=(3,),
    ),
    Row(
        fault="log directory can't be made",
        at=At.START,
        inject=FILE_LOG,
        heal=NO_FILE_LOG,
        state=BACKOFF,
        says="cannot make the directory .*/log/mps/GPU-",
        protocols=(2,),
    ),
    Row(
        fault="config file can't be written",
        at=At.START,
        inject=DIRECTORY_CONFIG,
        heal=NO_DIRECTORY_CONFIG,
        state=BACKOFF,
        says=r"cannot write .*\.toml: Is a directory",
        protocols=(3,),
    ),
    Row(
        fault="output of the start is a link",
        at=At.START,
        inject=links_start_output,
        state=READY,
        shown=lambda node, _gpu: (node.root / "victim").read_text() == "precious",
        protocols=(3,),
    ),
    Row(
        fault="directories without x",
        at=At.START,
        inject=closed_directories,
        state=READY,
        shown=lambda node, _gpu: are_open(node),
        logs=r"MPS pipe directory is closed to host processes .*other users can't pass .*: chmod o\+x it",
        protocols=(3,),
    ),
    Row(fault="stale socket and pid file", at=At.START, inject=stale_files, state=READY, protocols=(2,)),
    Row(
        fault="pid file names another process",
        at=At.START,
        inject=pid_file_of_another,
        state=READY,
        shown=lives,
        protocols=(2,),
    ),
    Row(fault="recorded pid was used again", at=At.START, inject=reused_pid, state=READY, shown=lives, protocols=(3,)),
    Row(
        fault="foreign daemon in our directory",
        at=At.START,
        inject=foreign_daemon,
        heal=end_foreign,
        state=FAILED,
        says=r"cannot use .*: the MPS control daemon with pid \d+ lives there, and we did not start it: end it",
        logs="daemon failed .*lives there",
    ),
    Row(
        fault="foreign listener on our socket",
        at=At.START,
        inject=foreign_listener,
        heal=end_listener,
        state=FAILED,
        says="cannot use .*: a process that we did not start listens on .*: end it",
        protocols=(3,),
    ),
    Row(
        fault="state directory can't be written",
        at=At.START,
        inject=state_in_the_way,
        heal=state_out_of_the_way,
        state=BACKOFF,
        says=r"cannot write .*mpsd\.json: File exists",
        wide=True,
        protocols=(2,),
    ),
    Row(
        fault="state is no JSON",
        at=At.START,
        inject=corrupt_state,
        state=READY,
        logs="cannot use what an earlier mpsd recorded; starting without",
        protocols=(3,),
    ),
    # Starting and configuring
    before("start refused", "refuse-start", "no CUDA device", state=BACKOFF, says="no CUDA device", protocols=(3,)),
    before(
        "dead right after its start",
        "crash-on-start",
        state=BACKOFF,
        says="cannot find the MPS control daemon after its start|exited",
    ),
    before("no answer from the start", "wedge", state=CONFIGURING, says=NO_ANSWER),
    before("late answers from the start", "slow", "400", state=CONFIGURING, says=NO_ANSWER),
    before(
        "half an answer from the start",
        "half-line",
        state=CONFIGURING,
        says="cannot read the MPS control daemon's reply|8192M was set but reads back as 819$",
        protocols=(2,),
    ),
    before(
        "connections break from the start",
        "drop",
        state=CONFIGURING,
        says="cannot (talk to the MPS control daemon|have the MPS control daemon in .* do 'namespace list)",
    ),
    before(
        "limits are forgotten",
        "limit-not-applied",
        state=CONFIGURING,
        says="cannot cap memory: limit 8192M was set but reads back as none$",
        protocols=(2,),
    ),
    before(
        "limits are stored as something else",
        "limit-not-applied",
        "1024M",
        state=CONFIGURING,
        says="cannot cap memory: limit 8192M was set but reads back as 1024M$",
        protocols=(2,),
    ),
    Row(
        fault="limits are forgotten",
        at=At.START,
        inject=bound_without_limits,
        heal=lambda node: node.clear("limit-not-applied"),
        state=READY,
        says="its limits read back as memory unlimited, threads 100.00 %, which is not what was set",
        shown=lambda _node, gpu: objections(gpu) == {"k0": True} and "default is not capped" in texts(gpu),
        protocols=(3,),
    ),
    # Wedged
    Row(
        fault="wedged, reported",
        at=At.READY,
        inject=WEDGE,
        heal=NO_WEDGE,
        state=CONFIGURING,
        says=rf"^\d+ attempts in a row failed: {NO_ANSWER}",
        shown=wedged,
        logs="daemon wedged",
        mps={"on_wedge": REPORT},
    ),
    Row(
        fault="wedged, replaced when idle",
        at=At.READY,
        inject=WEDGE,
        heal=NO_WEDGE,
        state=BACKOFF,
        says=f"replaced as nobody uses it: wedged, 3 attempts in a row failed: {NO_ANSWER}",
        after=After.NEW,
    ),
    Row(
        fault="wedged with a client, reported",
        at=At.CLIENT,
        inject=WEDGE,
        heal=NO_WEDGE,
        state=CONFIGURING,
        says=r"^\d+ attempts in a row failed: .*; it is left as it is \(mps.onWedge\): gpufrac mpsd replace --now",
        shown=wedged,
        logs="daemon wedged",
        mps={"on_wedge": REPORT},
    ),
    Row(
        fault="wedged with a client, replaced when idle",
        at=At.CLIENT,
        inject=WEDGE,
        heal=with_client_gone("wedge"),
        state=CONFIGURING,
        says=r"^\d+ attempts in a row failed: .*; it is replaced when its clients have ended",
        shown=wedged,
        after=After.NEW,
    ),
    Row(
        fault="wedged with a client, replaced",
        at=At.CLIENT,
        inject=WEDGE,
        heal=clients_told,
        state=BACKOFF,
        says="replaced after 3 failed attempts",
        after=After.NEW,
        mps={"on_wedge": REPLACE},
    ),
    Row(
        fault="answers come late",
        at=At.READY,
        inject=SLOW,
        heal=NO_SLOW,
        state=CONFIGURING,
        says=rf"^\d+ attempts in a row failed: {NO_ANSWER}",
        mps={"on_wedge": REPORT},
    ),
    Row(
        fault="half an answer",
        at=At.READY,
        inject=HALF,
        heal=NO_HALF,
        state=CONFIGURING,
        says=r"^\d+ attempts in a row failed: cannot",
        mps={"on_wedge": REPORT},
        protocols=(2,),
    ),
    Row(
        fault="half an answer",
        at=At.READY,
        inject=bind_with_half_answers,
        heal=NO_HALF,
        state=READY,
        says="it is not there",
        protocols=(3,),
    ),
    Row(
        fault="connections break",
        at=At.READY,
        inject=DROP,
        heal=NO_DROP,
        state=CONFIGURING,
        says=r"^\d+ attempts in a row failed: cannot (talk to|have) the MPS control daemon",
        mps={"on_wedge": REPORT},
    ),
    Row(
        fault="process stopped",
        at=At.READY,
        inject=stop_process,
        heal=answers_again,
        state=BACKOFF,
        says="replaced as nobody uses it: wedged",
        logs="daemon killing .*was=stopping",
        after=After.NEW,
    ),
    Row(
        fault="pipe directory removed",
        at=At.READY,
        inject=remove_pipe_directory,
        heal=nothing,
        state=BACKOFF,
        says="replaced as nobody uses it: wedged, .*: Cannot (find|connect)",
        after=After.NEW,
    ),
    Row(
        fault="quit never ends",
        at=At.READY,
        inject=HUNG,
        heal=NO_HUNG,
        state=READY,
        passing=True,
        logs="daemon killing .*was=stopping on=DeadlinePassed",
        healed="daemon ready",
        after=After.NEW,
    ),
    Row(
        fault="replaced with a client",
        at=At.CLIENT,
        inject=drain,
        heal=clients_leave,
        state=DRAINING,
        says="it is replaced when its clients have ended: an operator asked for it",
        after=After.NEW,
    ),
    Row(
        fault="excluded with a client",
        at=At.CLIENT,
        inject=exclude,
        heal=include,
        state=DRAINING,
        says="waiting for its clients to end",
        shown=lambda _node, gpu: gpu.not_shared == "it is excluded by the config",
    ),
    # Limits behind our back
    Row(
        fault="limit changed behind our back",
        at=At.BOUND,
        inject=set_another_limit,
        heal=limit_is_back,
        state=READY,
        passing=True,
        logs="daemon configuring .*on=ProbeFailed .*limit 8192M was set but reads back as 1024M",
        healed="daemon ready",
        protocols=(2,),
    ),
    Row(
        fault="limit changed behind our back",
        at=At.BOUND,
        inject=set_another_limit,
        heal=limit_is_back,
        state=READY,
        passing=True,
        logs=f"MPS namespace is not as it was set .*namespace={namespace()} reason=its limits read back as memory 1",
        protocols=(3,),
    ),
    Row(
        fault="namespace deleted behind our back",
        at=At.BOUND,
        inject=delete_namespace,
        heal=limit_is_back,
        state=READY,
        passing=True,
        logs=f"MPS namespace is not as it was set .*namespace={namespace()} reason=(it|its socket /\\S+) is not there",
        protocols=(3,),
    ),
    Row(
        fault="namespace's socket removed",
        at=At.BOUND,
        inject=remove_socket,
        heal=socket_is_back,
        state=READY,
        passing=True,
        logs=f"MPS namespace is not as it was set .*namespace={namespace()} reason=its socket .* is not there",
        protocols=(3,),
    ),
    Row(
        fault="namespace's socket removed where it is mounted",
        at=At.BOUND,
        inject=remove_link,
        heal=socket_is_back,
        state=READY,
        passing=True,
        logs=f"MPS namespace is not as it was set .*namespace={namespace()} reason=its socket in .* is not there",
        protocols=(3,),
    ),
    Row(
        fault="namespace can't be changed under a client",
        at=At.CLIENT,
        inject=lower_limit,
        heal=clients_leave,
        state=READY,
        says="its limits .* can't be changed, as a rule because a client of it lives",
        shown=lambda _node, gpu: objections(gpu) == {"k0": True, "k1": False},
        protocols=(3,),
    ),
    Row(
        fault="server vanishes",
        at=At.BOUND,
        inject=VANISH,
        heal=nothing,
        state=BACKOFF,
        says="replaced as nobody uses it: wedged, .*its MPS server is gone",
        after=After.NEW,
        protocols=(3,),
    ),
    # Daemons, servers and clients that die
    Row(
        fault="daemon killed",
        at=At.READY,
        inject=kill_daemon,
        heal=nothing,
        state=BACKOFF,
        says=r"the MPS control daemon \(pid \d+\) exited",
        logs=r"daemon backoff .*was=ready on=Exited",
        after=After.NEW,
    ),
    Row(
        fault="daemon killed with a client",
        at=At.CLIENT,
        inject=kill_daemon_of_clients,
        heal=survivors_ended,
        state=BACKOFF,
        says=r"the MPS control daemon \(pid \d+\) exited",
        after=After.NEW,
    ),
    Row(
        fault="server killed",
        at=At.CLIENT,
        inject=crash_server,
        state=READY,
        logs=r"Server \d+ exited with status",
    ),
    Row(
        fault="servers die one after the other",
        at=At.BOUND,
        inject=loop_servers,
        heal=lambda node: node.clear("restart-loop"),
        state=BACKOFF,
        says=r"replaced as nobody uses it: wedged, .*MPS servers end as soon as they are started: \d+ times in",
        after=After.NEW,
        steps=4 * STEPS,  # each server that dies is one, and how many do until it is replaced is the machine's affair
    ),
    Row(
        fault="server in FAULT",
        at=At.CLIENT,
        inject=fault_a_client,
        heal=faulted_leave,
        state=CONFIGURING,
        says=IN_FAULT,
        shown=lambda _node, gpu: wedged(_node, gpu) and "sticky error" in str(daemon_of(gpu).last_log),
        logs="Server is handling a fatal GPU error",
        mps={"on_wedge": REPORT},
    ),
    Row(
        fault="server in FAULT, its log unlinked",
        at=At.CLIENT,
        inject=unlink_log_and_fault,
        heal=faulted_leave,
        state=CONFIGURING,
        says=IN_FAULT,
        mps={"on_wedge": REPORT},
    ),
    Row(
        fault="log replaced by a link",
        at=At.READY,
        inject=link_log,
        state=READY,
        shown=victim_is_whole,
        logs="control.log is not read: it is no regular file of one name",
        protocols=(3,),
    ),
    Row(
        fault="clients without PID",
        at=At.BOUND,
        inject=pid_zero,
        state=READY,
        shown=is_warned,
        logs="NEW CLIENT 0 from user",
    ),
    # GPUs and the driver
    Row(
        fault="GPU lost",
        at=At.READY,
        inject=LOST,
        heal=FOUND,
        state=READY,
        says="GPU is lost|no longer lists this GPU",
        shown=health_is(GpuHealth.LOST),
        protocols=(3,),
    ),
    Row(
        fault="GPU lost while bound, released meanwhile",
        at=At.BOUND,
        inject=lose_bound_gpu,
        heal=FOUND,
        state=READY,
        says="GPU is lost|no longer lists this GPU",
        shown=is_recorded,
        found=ComputeMode.PROHIBITED,
    ),
    Row(
        fault="critical XID",
        at=At.READY,
        inject=lambda node: node.driver.inject_xid(node.uuid, 48),
        heal=nothing,
        state=READY,
        passing=True,
        logs="GPU in trouble .*was reported",
        healed="GPU recovered",
        protocols=(2,),
    ),
    Row(
        fault="driver hangs on a GPU",
        at=At.READY,
        inject=lambda node: node.hang("info"),
        heal=Node.unhang,
        state=READY,
        says="info",
        shown=health_is(GpuHealth.UNRESPONSIVE),
        protocols=(3,),
    ),
    Row(
        fault="driver fails on a GPU",
        at=At.READY,
        inject=FAILING,
        heal=NO_FAILING,
        state=READY,
        says="Unknown Error",
        shown=health_is(GpuHealth.SICK),
        protocols=(2,),
    ),
    Row(
        fault="driver loaded anew",
        at=At.READY,
        inject=another_driver,
        heal=driver_loaded,
        state=READY,
        says="Driver Not Loaded",
        shown=health_is(GpuHealth.UNRESPONSIVE),
        protocols=(2,),
    ),
    # Compute mode
    Row(
        fault="compute mode can't be set",
        at=At.READY,
        inject=DENIED,
        heal=ALLOWED,
        state=READY,
        says="Insufficient Permissions",
        shown=is_unbound,
        logs="GPU not bound .*Insufficient Permissions",
        found=ComputeMode.PROHIBITED,
    ),
    Row(
        fault="compute mode found can't be recorded",
        at=At.READY,
        inject=bind_without_record,
        heal=state_out_of_the_way,
        state=READY,
        says=r"cannot write .*mpsd\.json",
        shown=lambda node, gpu: is_unbound(node, gpu) and node.driver.compute_mode(node.uuid) == "PROHIBITED",
        logs="GPU not bound .*cannot write",
        found=ComputeMode.PROHIBITED,
        protocols=(2,),
    ),
    Row(
        fault="compute mode changed by somebody else",
        at=At.BOUND,
        inject=meddle,
        heal=nothing,
        state=READY,
        passing=True,
        logs="GPU bound to sm-sharing",
        protocols=(2,),
    ),
    Row(
        fault="compute mode changed by somebody else",
        at=At.BOUND,
        inject=meddle,
        heal=nothing,
        state=READY,
        passing=True,
        logs="GPU bound to sm-sharing",
        found=ComputeMode.PROHIBITED,
        protocols=(3,),
    ),
    Row(
        fault="compute mode found is EXCLUSIVE_PROCESS",
        at=At.BOUND,
        inject=nothing,
        state=READY,
        found=ComputeMode.EXCLUSIVE_PROCESS,
        protocols=(3,),
    ),
    Row(
        fault="foreign process before binding",
        at=At.READY,
        inject=bind_used,
        heal=clients_leave,
        state=READY,
        says=r"cannot bind it to sm-sharing: foreign processes use it \(pid \d+\)",
        shown=is_unbound,
        logs="GPU not bound .*foreign processes",
        protocols=(2,),
    ),
    Row(
        fault="daemon killed, its GPU closed meanwhile",
        at=At.BOUND,
        inject=kill_daemon,
        heal=nothing,
        state=BACKOFF,
        says="exited",
        shown=is_prohibited,
        logs="GPU bound to sm-sharing .*compute_mode=PROHIBITED",
        after=After.NEW,
        mps={"prohibit_while_down": True},
    ),
]

PAUSING = dataclasses.replace(POLICY, backoff_min_s=3.0, backoff_max_s=3.0)
"""Where the pause is what shows the fault: so long that a busy machine sees it, and all that is done in it."""

CASES = [
    pytest.param(row, protocol, id=f"{row.fault}-{protocol}") for row in TABLE for protocol in sorted(row.protocols)
]


def test_the_table_is_as_large_as_promised() -> None:
    assert len({row.fault for row in TABLE}) >= 45


@pytest.mark.parametrize(("row", "protocol"), CASES)
def test_a_fault_is_told_and_heals(short_tmp: Path, row: Row, protocol: int) -> None:
    policy = PAUSING if row.state is BACKOFF else POLICY
    with opened(Node(short_tmp, protocol, policy=policy, **row.mps)) as node:
        before, line = strike(node, row)
        if not row.passing:
            node.until(lambda gpu: fits(row, node, gpu), row.steps)
        seen = node.said.until(row.logs, line) if row.logs else line
        node.mark()
        if row.heal is not None:
            row.heal(node)
        elif row.state is not READY:
            return  # an operator has to change the config, and mpsd to be restarted
        if row.healed:
            node.said.until(row.healed, seen)
        after = pid_of(node.until(lambda gpu: is_well(node, gpu)))
        if before:
            assert (after == before) is (row.after is After.SAME)
        assert node.noticed or node.is_untouched()
        leave(node, row)
        assert not row.logs or node.said.count(row.logs, line) == 1, node.said.lines[line:]


def strike(node: Node, row: Row) -> tuple[int, int]:
    """Brings the node to where the fault strikes, and has it strike. The daemon's PID before, and how many lines were
    logged by then."""
    before = 0
    node.guarded = not row.wide
    node.driver.set_compute_mode(node.uuid, row.found)
    if row.at is At.START:
        row.inject(node)
        node.start()
        return 0, 0
    node.start()
    before = pid_of(node.until_ready())
    if row.at in (At.BOUND, At.CLIENT):
        node.bind()
        node.until(lambda gpu: is_well(node, gpu) and gpu.mode is not None)
    if row.at is At.CLIENT:
        node.hold()
        node.until(lambda gpu: [client.allocation_key for client in gpu.clients] == ["k0"])
    line = len(node.said.lines)
    node.mark()
    row.inject(node)
    return before, line


def fits(row: Row, node: Node, gpu: GpuStatus) -> bool:
    """Whether the fault shows as the row says."""
    state = gpu.daemon.state if gpu.daemon is not None else None
    said = texts(gpu)
    if state is not row.state or bool(said) is not bool(row.says):
        return False
    return re.search(row.says, said) is not None and row.shown(node, gpu)


def is_well(node: Node, gpu: GpuStatus) -> bool:
    """All that is wanted is in force, and nothing is said."""
    if not is_ready(gpu) or texts(gpu) or gpu.health is not GpuHealth.OK:
        return False
    daemon = daemon_of(gpu)
    wanted = {a.key: (a.limit_bytes, mount_directory(node.dirs, namespace(a.slot or 0))) for a in node.allocations}
    attached = {a.key: (a.limit_bytes, a.pipe_directory) for a in daemon.attached}
    limits = attached == wanted if daemon.protocol == 3 else daemon.pinned_limit_bytes == LIMIT
    return limits and gpu.mode is (Mode.SM_SHARING if wanted else None)


def leave(node: Node, row: Row) -> None:
    """Nothing is left of the allocation, and the other GPUs never noticed."""
    node.end_clients()
    bound, line = node.gpu.mode is not None, len(node.said.lines)
    node.release()
    if bound:
        node.said.until(f"GPU idle gpu={node.uuid}", line)
    node.until(lambda gpu: gpu.mode is None and gpu.driver_compute_mode is row.found)
    assert node.driver.compute_mode(node.uuid) == row.found
    node.until_ready()
    assert row.wide or set(node.others) == set(node.uuids) - {node.uuid}
