"""Whether daemons can outlive mpsd, and what it takes: an own cgroup in every hierarchy, the host's mount namespace."""

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from mpsd.common.errors import TransientError
from mpsd.host import cgroups, launch, mountinfo
from mpsd.host.cgroups import RIGHTS

INITIAL_PID = "pid:[4026531836]"
INITIAL_CGROUP = "cgroup:[4026531835]"
INITIAL_MOUNT = "mnt:[4026531832]"
"""Namespaces that the kernel made at boot (linux/nsfs.h). The mount namespace has that number since Linux 6.18; no
other namespace ever had it."""

_UNTIL_THEN = "until then its daemons end with it"


class Survival(msgspec.Struct, frozen=True):
    """How to start daemons. Without a `reason` they outlive mpsd, with one they end with it and the rest is empty."""

    reason: str = ""
    places: tuple[str, ...] = ()
    """For `cgroups.prepare` and its siblings."""
    namespaces: tuple[str, ...] = ()
    """For `launch.command`."""
    host_root: str = ""
    """What leads from mpsd's root to the host's, empty when it is the same."""

    @property
    def ok(self) -> bool:
        return not self.reason


class Ended(Protocol):
    """What is left of a command."""

    @property
    def returncode(self) -> int: ...
    @property
    def output(self) -> bytes: ...


def probe(
    run: Callable[[Sequence[str]], Ended], directories: Iterable[str] = (), *, init: int = 1, proc: str = "/proc"
) -> Survival:
    """Finds out by doing it: makes cgroups, has a short process enter all, and removes them.

    Args:
        run: runs a command to its end, raising TransientError when it can't.
        directories: what daemons use of the file system; must be the host's.
        init: PID of a process that lives in the host's namespaces.
    """
    mine = {name: _link(f"{proc}/self/ns/{name}") for name in ("pid", "cgroup", "mnt")}
    init_is_host = mine["pid"] == INITIAL_PID
    private = mine["cgroup"] != INITIAL_CGROUP
    host_mount = host_mount_needed(mine["mnt"], _link(f"{proc}/{init}/ns/mnt"), init_is_host)
    if (private or host_mount) and not init_is_host:
        return Survival(
            f"cannot reach the host from mpsd's container: it has a PID namespace of its own: {RIGHTS}; {_UNTIL_THEN}"
        )
    namespaces = (
        *((f"{proc}/{init}/ns/cgroup",) if private else ()),
        *((f"{proc}/{init}/ns/mnt",) if host_mount else ()),
    )
    host_root = f"{proc}/{init}/root" if host_mount else ""
    name = f"probe-{os.getpid()}"
    places: tuple[str, ...] = ()
    ended = None
    try:
        _check_directories(directories, host_root)
        places = _places(proc, str(init) if host_mount else "self", host_root, host_mount, private)
        arguments, _ = launch.command((), (), cgroups.prepare(places, name), namespaces)
        ended = run(arguments)
    except TransientError as error:
        return Survival(f"{error}; {_UNTIL_THEN}")
    finally:
        cgroups.remove(places, name)
        if ended is None or ended.returncode != 0:
            cgroups.discard(places)
    if ended.returncode == 0:
        return Survival("", places, namespaces, host_root)
    said = ended.output.decode(errors="replace")
    why = launch.explain(ended.returncode, said)
    if not why:
        why = f"cannot leave mpsd's cgroups: exit {ended.returncode}: {said.strip()[:300] or 'it said nothing'}"
    return Survival(f"{why}; {_UNTIL_THEN}")


def host_mount_needed(self_ns: str, init_ns: str, init_is_host: bool) -> bool:
    """Whether mpsd's mount namespace may be another than the host's, and so end with its pod.

    Args:
        self_ns, init_ns: as in the links /proc/<pid>/ns/mnt, empty where not readable.
        init_is_host: PID 1 is the host's and not that of our container.
    """
    return self_ns != INITIAL_MOUNT and not (init_is_host and self_ns != "" and self_ns == init_ns)


def _places(proc: str, view: str, root: str, host_view: bool, private: bool) -> tuple[str, ...]:
    own = cgroups.parse_memberships(_read(f"{proc}/self/cgroup"))
    if not private and all(membership.path == "/" for membership in own):
        return ()  # nothing that could be killed as a whole holds us
    places, missing = cgroups.locate(
        own, mountinfo.parse(_read(f"{proc}/{view}/mountinfo")), host_view=host_view, private=private
    )
    if missing:
        raise TransientError(f"cannot create cgroups outside of mpsd's own: {missing}: {RIGHTS}")
    return tuple(f"{root}{place}" for place in places)


def _check_directories(directories: Iterable[str], host_root: str) -> None:
    if not host_root:
        return
    for directory in directories:
        ours = theirs = None
        with contextlib.suppress(OSError):
            ours = os.stat(directory)
        try:
            theirs = os.stat(f"{host_root}{directory}")
        except PermissionError as error:
            raise TransientError(f"cannot look into {host_root}: {error.strerror}: {RIGHTS}") from error
        except OSError:
            pass
        if (ours and (ours.st_dev, ours.st_ino)) != (theirs and (theirs.st_dev, theirs.st_ino)):
            raise TransientError(
                f"cannot start daemons on the host: {directory} in mpsd's container is not the host's: mount it from "
                "the host at the same path"
            )


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError as error:
        raise TransientError(f"cannot read {path}: {error.strerror}: {RIGHTS}") from error
