"""Processes of this node as /proc shows them: identity, environment, pod and container. Reads, never signals.

A process may end between any two reads: one that is gone has nothing. One that is there and may not be read is told
apart where that matters (`read_environ`). `proc` is the mount point of the host's procfs; PIDs are those of the PID
namespace it was mounted for.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mpsd.common.marker import MARKER

SIMULATED_POD_UID, SIMULATED_CONTAINER = "GPUFRAC_SIM_POD_UID", "GPUFRAC_SIM_CONTAINER"
"""Stand for the cgroup on a simulated node, where processes have none of their own."""

NVIDIA_VARIABLES = ("NVIDIA_", "CUDA_")
"""How the names of variables begin that lead the container toolkit, CUDA and MPS."""

_MAX_ANCESTORS = 32
_MAX_MARKER = 64
_START_TIME = 22 - 3  # counted from field 3, the first one after the name; see proc_pid_stat(5)
_PARENT = 4 - 3

# The kubelet names a pod's cgroup by its UID, below `kubepods`, with systemd (dashes become underscores) or without.
# A runtime with the wrong driver leaves `...-pod<UID>.slice:cri-containerd:<ID>` as one name. Seen from a cgroup
# namespace of our own, paths begin with `/..` and may lack `kubepods` (cgroup_namespaces(7)).
_SYSTEMD = re.compile(r"kubepods[^/]*-pod(?P<uid>[0-9A-Za-z_]+)\.slice(?P<rest>[/:].*)?$")
_CGROUPFS = re.compile(
    r"(?:/kubepods|^(?:/\.\.)+)(?:/(?:besteffort|burstable|guaranteed))?/pod(?P<uid>[0-9A-Za-z-]+)(?P<rest>/.*)?$"
)
_NO_CONTAINER = "crio-conmon-"  # CRI-O's monitor of a container, in the pod's cgroup but outside the container


@dataclass(frozen=True, slots=True)
class PodProcess:
    """A process of a pod. `container` is the name of its container's cgroup, e.g. `cri-containerd-<ID>.scope`, `name`
    the kernel's short one (`pause`).

    Containers without our resources, the pause container among them, have processes, too: their `marker` is None. It
    is None as well where it may not be read: then the process is `unreadable`. `variables` are those of its own
    environment that begin as NVIDIA_VARIABLES; `started` is as `start_time`. `own_users`: it is in a user namespace.
    """

    pid: int
    container: str
    marker: str | None
    name: str = ""
    unreadable: bool = False
    variables: Mapping[str, str] = field(default_factory=dict, compare=False)
    started: int = field(default=0, compare=False)
    own_users: bool = field(default=False, compare=False)

    @property
    def is_pause(self) -> bool:
        """Whether it is the one that holds its pod's namespaces, as far as it shows: any program may have its name."""
        return self.name == "pause" and self.marker is None and not self.variables


def start_time(pid: int, proc: str = "/proc") -> int | None:
    """Clock ticks from boot to the start of the process, a zombie included; None when there is none. Together with
    boot_id() and the PID it names one process for ever."""
    return _stat(pid, _START_TIME, proc)


def parent(pid: int, proc: str = "/proc") -> int | None:
    """PID of the parent, 0 where that lies outside this PID namespace."""
    return _stat(pid, _PARENT, proc)


def name(pid: int, proc: str = "/proc") -> str:
    """The kernel's short name of a process, printable; empty when it is gone. Anyone can choose it."""
    text = os.fsdecode(_read(f"{proc}/{pid}/comm")).strip()
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text)


def boot_id(proc: str = "/proc") -> str:
    """Differs after each boot. Raises OSError."""
    with open(f"{proc}/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def environ(pid: int, proc: str = "/proc") -> dict[str, str]:
    """The environment the process was started with; empty when it can't be read. The first of two equal names counts,
    as in getenv(3). Bytes that are no UTF-8 become lone surrogates (PEP 383)."""
    return read_environ(pid, proc) or {}


def read_environ(pid: int, proc: str = "/proc") -> dict[str, str] | None:
    """As `environ`, but None when the process is there and its environment can't be read: that of another user's
    process takes CAP_SYS_PTRACE (ptrace(2), PTRACE_MODE_READ)."""
    try:
        with open(f"{proc}/{pid}/environ", "rb") as file:
            data = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    except OSError:
        return None
    found: dict[str, str] = {}
    for entry in data.split(b"\0"):
        name, equals, value = os.fsdecode(entry).partition("=")
        if equals:
            found.setdefault(name, value)
    return found


def marker(pid: int, name: str = MARKER, proc: str = "/proc") -> str | None:
    """The variable of the process or of its nearest ancestor that has it: a program may clean the environment of its
    children. Init itself is never asked. None when there is none; a value that can't be ours counts as none."""
    return next((value for p in _ancestry(pid, proc) if (value := _sane(environ(p, proc).get(name)))), None)


def in_user_namespace(pid: int, proc: str = "/proc") -> bool:
    """Whether its users are not those of our own namespace (user_namespaces(7)); False where that can't be read."""
    theirs, ours = _read(f"{proc}/{pid}/uid_map"), _read(f"{proc}/self/uid_map")
    return bool(theirs.split() and ours.split()) and theirs.split() != ours.split()


def cgroup_paths(pid: int, proc: str = "/proc") -> tuple[str, ...]:
    """Paths below the cgroup mounts, one per hierarchy, in the kernel's order, each once."""
    paths: dict[str, None] = {}
    for line in _read(f"{proc}/{pid}/cgroup").splitlines():
        parts = os.fsdecode(line).split(":", 2)
        if len(parts) == 3:
            paths[parts[2].removesuffix(" (deleted)")] = None
    return tuple(paths)


def pod_uid_of(pid: int, proc: str = "/proc", *, simulated: bool = False) -> str | None:
    """UID of the pod a process belongs to, None for one of the host."""
    if simulated and (uid := environ(pid, proc).get(SIMULATED_POD_UID)):
        return uid
    return _pod_and_container(cgroup_paths(pid, proc))[0]


def in_a_pod_of_others(pid: int, proc: str = "/proc", *, simulated: bool = False) -> bool:
    """Whether a process belongs to a pod that is not our own: what its environment says is a tenant's word."""
    uid = pod_uid_of(pid, proc, simulated=simulated)
    return uid is not None and uid != pod_uid_of(os.getpid(), proc, simulated=simulated)


def container_cgroup(pid: int, proc: str = "/proc", *, simulated: bool = False) -> str:
    """Path of the cgroup of the container, without what the container made below it; empty outside of containers."""
    if simulated and (container := environ(pid, proc).get(SIMULATED_CONTAINER)):
        return container
    return _pod_and_container(cgroup_paths(pid, proc))[1]


def processes_of_pods(
    proc: str = "/proc", *, name: str = MARKER, simulated: bool = False
) -> dict[str, list[PodProcess]]:
    """All processes of pods by pod UID, ordered by PID, from one scan. Raises OSError when `proc` can't be listed."""
    found: dict[str, list[PodProcess]] = {}
    environs: dict[int, dict[str, str] | None] = {}

    def known_environ(pid: int) -> dict[str, str]:
        if pid not in environs:
            environs[pid] = read_environ(pid, proc)
        return environs[pid] or {}

    def unreadable(pid: int, container: str) -> bool:
        """Whether it could have a marker that can't be seen: its own, or from an ancestor in its container."""
        hidden = (p for p in _ancestry(pid, proc) if p in environs and environs[p] is None)
        return any(p == pid or _pod_and_container(cgroup_paths(p, proc))[1] == container for p in hidden)

    for pid in sorted(int(entry) for entry in os.listdir(proc) if entry.isdecimal()):
        uid, container = _pod_and_container(cgroup_paths(pid, proc))
        if simulated and (simulated_uid := known_environ(pid).get(SIMULATED_POD_UID)):
            uid, container = simulated_uid, known_environ(pid).get(SIMULATED_CONTAINER, "")
        if uid is None or container.rpartition("/")[2].startswith(_NO_CONTAINER):
            continue
        value = next((v for p in _ancestry(pid, proc) if (v := _sane(known_environ(p).get(name)))), None)
        found.setdefault(uid, []).append(
            PodProcess(
                pid,
                container.rpartition("/")[2],
                value,
                os.fsdecode(_read(f"{proc}/{pid}/comm")).strip(),
                unreadable=value is None and unreadable(pid, container),
                variables={k: v for k, v in known_environ(pid).items() if k.startswith(NVIDIA_VARIABLES)},
                started=start_time(pid, proc) or 0,
                own_users=in_user_namespace(pid, proc),
            )
        )
    return found


def _pod_and_container(paths: tuple[str, ...]) -> tuple[str | None, str]:
    for path in paths:
        if systemd := _SYSTEMD.search(path):
            uid, rest = systemd["uid"].replace("_", "-"), systemd["rest"] or ""
        elif cgroupfs := _CGROUPFS.search(path):
            uid, rest = cgroupfs["uid"], cgroupfs["rest"] or ""
        else:
            continue
        child = rest[1:].partition("/")[0]
        pod = path[: len(path) - len(rest)]
        return uid, f"{pod}{rest[0]}{child}" if child else ""
    return None, ""


def _ancestry(pid: int, proc: str) -> Iterator[int]:
    """The process, its parent and so on, without init."""
    for _ in range(_MAX_ANCESTORS):
        if pid <= 1:
            return
        yield pid
        pid = parent(pid, proc) or 0


def _sane(value: str | None) -> str | None:
    """Anyone can set the variable: what goes on to snapshots and logs is short and plain."""
    return value if value and len(value) <= _MAX_MARKER and value.isascii() and value.isprintable() else None


def _stat(pid: int, index: int, proc: str) -> int | None:
    # The name in field 2 may hold blanks and parentheses: the last ")" ends it.
    fields = _read(f"{proc}/{pid}/stat").rpartition(b")")[2].split()
    try:
        return int(fields[index])
    except (IndexError, ValueError):
        return None


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
