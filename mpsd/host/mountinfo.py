"""Reads /proc/<pid>/mountinfo (pure)."""

from typing import NamedTuple


class Mount(NamedTuple):
    """One mount; see proc_pid_mountinfo(5). A later one covers an earlier one at the same point."""

    root: str
    """What of the file system is seen there: `/` for all of it, `/..` and so on for more than our cgroup namespace."""
    point: str
    type: str
    options: frozenset[str]
    """Those of the file system itself; for cgroup v1 the controllers are among them."""


def parse(text: str) -> tuple[Mount, ...]:
    """All mounts in the order of the kernel; lines of another shape are left out."""
    found = []
    for line in text.splitlines():
        here, _, there = line.partition(" - ")  # a variable number of fields stands before the hyphen
        left, right = here.split(" "), there.split(" ")
        if len(left) >= 6 and len(right) >= 3:
            found.append(Mount(_plain(left[3]), _plain(left[4]), right[0], frozenset(right[2].split(","))))
    return tuple(found)


def _plain(path: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, char)
    return path
