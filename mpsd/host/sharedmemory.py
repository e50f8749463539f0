"""The memory that a daemon and its clients share as /dev/shm, for old drivers that exchange named regions there.

It is a channel between all containers on the GPU, so it is off unless the config asks for it.
"""

import os

from cdi.atomic import make_directory
from mpsd.common.errors import TransientError
from mpsd.host import mountinfo
from mpsd.host.launcher import call

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_FALLBACK_BYTES = 64 * 1024**2


def size_bytes(meminfo: str) -> int:
    """Half of the machine's memory, as a tmpfs has by default; `meminfo` is the text of /proc/meminfo."""
    for line in meminfo.splitlines():
        words = line.split()
        if len(words) == 3 and words[0] == "MemTotal:" and words[1].isdigit() and words[2] == "kB":
            return int(words[1]) * 1024 // 2
    return _FALLBACK_BYTES


def mount(directory: str, host_root: str = "") -> None:
    """Has a tmpfs at `directory`, made where missing; one that is there is kept, for clients have it mapped.

    Args:
        host_root: where mpsd sees the host's root when that is not its own (`Survival.host_root`).

    Raises:
        TransientError: it can't be mounted, another file system is, or the host does not see it.
    """
    try:
        make_directory(directory, 0o755)
        present = _type_at(directory)
        if present is None:
            with open("/proc/meminfo", encoding="ascii") as file:
                options = f"mode=1777,size={size_bytes(file.read())}"
            flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
            call("mount", b"gpufrac", os.fsencode(directory), b"tmpfs", flags, options.encode())
    except PermissionError as error:
        raise TransientError(
            f"cannot mount the shared memory of MPS at {directory}: {error.strerror}: give mpsd CAP_SYS_ADMIN (run it "
            "privileged) or set mps.sharedMemory: false"
        ) from error
    except OSError as error:
        raise TransientError(
            f"cannot mount the shared memory of MPS at {directory}: {error.strerror}: choose another mps.runRoot or "
            "set mps.sharedMemory: false"
        ) from error
    if present not in (None, "tmpfs"):
        raise TransientError(f"cannot mount the shared memory of MPS at {directory}: {present} is mounted: unmount it")
    if host_root and not _is_seen(directory, f"{host_root}{directory}"):
        if present is None:
            unmount(directory)
        raise TransientError(
            f"cannot show the host the shared memory of MPS at {directory}: mount the volume of mps.runRoot with "
            "mountPropagation: Bidirectional"
        )


def unmount(directory: str) -> None:
    """Takes the tmpfs away and removes `directory`; containers keep what they have mapped. May be called again.

    Raises TransientError.
    """
    try:
        if _type_at(directory) == "tmpfs":
            call("umount2", os.fsencode(directory), _MNT_DETACH | _UMOUNT_NOFOLLOW)
        os.rmdir(directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise TransientError(
            f"cannot remove the shared memory of MPS at {directory}: {error.strerror}: unmount it"
        ) from error


def _type_at(directory: str) -> str | None:
    """The type of the file system mounted exactly there, None when there is none."""
    point = os.path.realpath(directory)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        types = [mount.type for mount in mountinfo.parse(file.read()) if mount.point == point]
    return types[-1] if types else None


def _is_seen(directory: str, through_host: str) -> bool:
    try:
        return os.stat(directory).st_dev == os.stat(through_host).st_dev
    except OSError:
        return False
