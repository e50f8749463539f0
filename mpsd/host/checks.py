"""What mpsd needs of its own process and place: root, descriptors, the host's PID namespace, open directories."""

import os
import resource
import stat

from mpsd.host.survival import INITIAL_PID

NOFILE_NEEDED = 16384
"""MPS fails to create shared memory segments below that (NVIDIA MPS documentation)."""
NOFILE_WANTED = 65536
SYS_PTRACE = 19
"""Number of the capability (linux/capability.h)."""


def raise_nofile() -> str:
    """Raises the soft limit of open files of this process; children started from now on have it too.

    Returns:
        Why that is not enough for MPS, empty when it is.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (wanted := nofile_soft(soft, hard)) != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return nofile_objection(hard)


def nofile_soft(soft: int, hard: int) -> int:
    """The soft limit to set; never a lower one. Limits as `resource` has them, RLIM_INFINITY included."""
    if soft == resource.RLIM_INFINITY:
        return soft
    ceiling = NOFILE_WANTED if hard == resource.RLIM_INFINITY else min(hard, NOFILE_WANTED)
    return max(soft, ceiling)


def nofile_objection(hard: int) -> str:
    """Why MPS may fail under that hard limit, empty when it won't."""
    if hard == resource.RLIM_INFINITY or hard >= NOFILE_NEEDED:
        return ""
    return (
        f"cannot open the {NOFILE_NEEDED} files that MPS may need: the hard limit is {hard}: raise LimitNOFILE of "
        "mpsd's unit or of the container runtime"
    )


def pid_namespace_objection(proc: str = "/proc") -> str:
    """Why MPS would not see its clients, empty when mpsd is in the host's PID namespace.

    The number of the first namespace is fixed (linux/nsfs.h); what /proc/1 and NSpid say depends on which /proc is
    mounted.
    """
    try:
        namespace = os.readlink(f"{proc}/self/ns/pid")
    except OSError as error:
        return f"cannot tell whether mpsd is in the host's PID namespace: {error.strerror}: mount /proc"
    if namespace == INITIAL_PID:
        return ""
    return (
        "cannot see the processes of other containers: mpsd is in a PID namespace of its own, so MPS knows their "
        "clients as pid 0 and can neither tell them apart nor terminate one, whose a process on a GPU is stays "
        "unknown, and daemons end with mpsd's container: set hostPID: true"
    )


def root_objection(uid: int) -> str:
    """Why a process of this user can't do mpsd's work, empty for root."""
    if uid == 0:
        return ""
    return (
        f"cannot serve other users' processes nor set compute modes: mpsd runs as user {uid}: run it as root "
        "(runAsUser: 0)"
    )


def closed_objection(directory: str, host_root: str = "") -> str:
    """Why containers that are not root can't reach what is in a directory, empty when they can or nothing is there.

    Args:
        host_root: where the host's root is seen, when that is not our own.
    """
    path = directory
    closed = ""
    while (parent := os.path.dirname(path)) != path:
        path = parent
        try:
            if not os.stat(f"{host_root}{path}").st_mode & stat.S_IXOTH:
                closed = path
        except OSError:
            continue  # whoever needs it says so
    if not closed:
        return ""
    return (
        f"containers that are not root can't reach their MPS daemon: other users can't pass {closed}, above mps.runRoot"
        f" {directory}: chmod o+x {closed}, and restart mpsd"
    )


def environment_objection(who: str, so: str, proc: str = "/proc") -> str:
    """Why we can't read the environment of other users' processes, empty when we can (ptrace(2), PTRACE_MODE_READ).

    Args:
        who: we, as texts name us.
        so: what can't be told by that.
    """
    try:
        with open(f"{proc}/self/status", encoding="ascii", errors="replace") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
        effective = int(lines["CapEff"], 16)
    except (OSError, KeyError, ValueError) as error:
        return f"cannot tell the capabilities of {who}: {error}: mount /proc"
    if effective >> SYS_PTRACE & 1:
        return ""
    return (
        f"cannot read the environment of containers' processes, so {so}: {who} lacks capability SYS_PTRACE: run it as "
        "root and privileged, or with that capability"
    )
