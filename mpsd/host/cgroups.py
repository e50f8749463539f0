"""Cgroups of our own, outside of every pod and service: who sits in one is not killed with mpsd's.

Cgroup v1 has many hierarchies, and one left behind is enough to be killed with the pod: a daemon gets a cgroup in each.
The own cgroups are `gpufrac/<name>` at the top of every hierarchy.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpsd.common.errors import TransientError
from mpsd.host.mountinfo import Mount

OWN = "gpufrac"
"""The cgroup at the top of each hierarchy that holds ours."""

RIGHTS = "run mpsd as root, in a pod with hostPID and privileged"
"""What to do where a right is missing."""

TRIES = 10
"""To make a cgroup, while others remove the place that it goes to."""

_OUTSIDE = re.compile(r"(/\.\.)+")


class Membership(NamedTuple):
    """Where a process sits in one hierarchy. `controllers` is empty for cgroup v2, `name=...` for one without any."""

    controllers: frozenset[str]
    path: str


def parse_memberships(text: str) -> tuple[Membership, ...]:
    """Reads /proc/<pid>/cgroup; see cgroups(7)."""
    found = []
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number.isdigit() and path:
            found.append(Membership(frozenset(controllers.split(",")) if controllers else frozenset(), path))
    return tuple(found)


def locate(
    own: Iterable[Membership], mounts: Iterable[Mount], *, host_view: bool, private: bool
) -> tuple[tuple[str, ...], str]:
    """Where in each hierarchy the own cgroups go.

    Args:
        own: where mpsd sits.
        mounts: what is mounted, as the host's init sees it (`host_view`) or as mpsd does.
        private: mpsd has a cgroup namespace of its own, so that its paths say nothing about the host's.

    Returns:
        Directories (without what leads to the root of the one whose view it is), and why that is not all, or nothing.
    """
    visible = {mount.point: mount for mount in mounts}.values()  # a later mount covers an earlier one
    places = []
    for membership in own:
        shown = [mount for mount in visible if _is_of(mount, membership)]
        tops = [mount.point for mount in shown if _is_top(mount.root, host_view, private)]
        if tops:
            places.append(f"{tops[-1]}/{OWN}")
        elif shown:
            return (), f"{shown[-1].point} does not show the top of its cgroup hierarchy"
        elif membership.path != "/" or (private and not host_view):
            return (), f"the cgroup hierarchy {_name(membership)} is not mounted"
        # else nobody mounted it, so no runtime made a cgroup of the pod there
    return tuple(places), ""


def prepare(places: Iterable[str], name: str) -> tuple[str, ...]:
    """Makes the cgroup `name` in every hierarchy, as far as it is not there.

    Returns:
        The files that a process joins by writing `0` to them.

    Raises:
        TransientError: one can't be made.
    """
    files = []
    for place in places:
        try:
            _make(place, name)
        except OSError as error:
            raise TransientError(f"cannot create the cgroup {place}/{name}: {error.strerror}: {RIGHTS}") from error
        files.append(f"{place}/{name}/cgroup.procs")
    return tuple(files)


def members(places: Iterable[str], name: str) -> tuple[int, ...]:
    """PIDs of all processes that are in the cgroup `name` of any hierarchy."""
    found: set[int] = set()
    for place in places:
        with contextlib.suppress(OSError), open(f"{place}/{name}/cgroup.procs", encoding="ascii") as file:
            found |= {int(line) for line in file}
    return tuple(sorted(found - {0}))  # 0: a process outside of our PID namespace


def remove(places: Iterable[str], name: str) -> None:
    """Removes the cgroup `name` from the hierarchies where no process is in it."""
    for place in places:
        with contextlib.suppress(OSError):
            os.rmdir(f"{place}/{name}")


def discard(places: Iterable[str]) -> None:
    """Removes the places themselves where nothing is left in them."""
    for place in places:
        with contextlib.suppress(OSError):
            os.rmdir(place)


def clear(places: Sequence[str]) -> tuple[str, ...]:
    """Removes all own cgroups, as an uninstall does; returns those that still hold processes."""
    left = []
    for place in places:
        for name in _children(place):
            try:
                os.rmdir(f"{place}/{name}")
            except OSError:
                left.append(f"{place}/{name}")
    discard(places)
    return tuple(left)


def _make(place: str, name: str) -> None:
    for tries_left in reversed(range(TRIES)):
        try:
            for directory in (place, f"{place}/{name}"):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(directory, 0o755)
                _inherit_cpuset(directory)
        except FileNotFoundError:  # somebody else's last cgroup went, and the place with it
            if not tries_left or not os.path.isdir(os.path.dirname(place)):
                raise
        else:
            return


def _is_of(mount: Mount, membership: Membership) -> bool:
    if not membership.controllers:
        return mount.type == "cgroup2"
    return mount.type == "cgroup" and membership.controllers <= mount.options


def _is_top(root: str, host_view: bool, private: bool) -> bool:
    # In a namespace of its own mpsd sees its pod's cgroup as "/", and what is above as "/..".
    return bool(_OUTSIDE.fullmatch(root)) or (root == "/" and (host_view or not private))


def _name(membership: Membership) -> str:
    return ",".join(sorted(membership.controllers)) or "of cgroup v2"


def _inherit_cpuset(directory: str) -> None:
    """No process can join a v1 cpuset without CPUs and memory nodes, and a new one has none. On v2 the parent has no
    such file or an empty one, which means all."""
    for file in ("cpuset.cpus", "cpuset.mems"):
        try:
            with open(f"{os.path.dirname(directory)}/{file}", encoding="ascii") as source:
                wanted = source.read().strip()
            with open(f"{directory}/{file}", encoding="ascii") as target:
                present = target.read().strip()
        except FileNotFoundError:
            continue
        if wanted and not present:
            with open(f"{directory}/{file}", "w", encoding="ascii") as target:
                target.write(wanted)


def _children(place: str) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(place) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
