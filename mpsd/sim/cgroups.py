"""The cgroup v2 tree of a simulated node: directories and files below `<simulation>/cgroup`, as a kernel shows them.

| file                     | content                                                                                 |
|--------------------------|-----------------------------------------------------------------------------------------|
| cgroup.controllers       | what the parent passed on; missing at the root: no cgroup v2 here                       |
| cgroup.subtree_control   | what is passed on to children; `+dmem` and `-dmem` may be written                       |
| cgroup.procs             | PIDs. A process is in the cgroup that lists it, or else its nearest ancestor. To be     |
|                          | read only: `add` moves a process                                                        |
| dmem.capacity            | at the root: `<region> <bytes>` a line, one for each GPU                                |
| dmem.{min,low,max,current} | below it, where the parent passed dmem on: `<region> <bytes or max>`                  |
| sim.procs                | no kernel's: the same PIDs, each with its start time, since they are used again         |
| sim.container            | no kernel's: what the cgroup's processes are confined to, as JSON; see `Confinement`    |

Plain files do not act: what a kernel does when one is written, happens here at the driver's next look (`settle`).
Membership never depends on an environment, so that a process can't leave its limits by cleaning its own.

Sources: Linux 'Control Group v2', NVIDIA MPS documentation r615, 'Memory Partitioning'.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from mpsd.sim.files import process_start_ticks, read_text, remove, write_text

DMEM = "dmem"
MIN, LOW, MAX, CURRENT = "dmem.min", "dmem.low", "dmem.max", "dmem.current"
UNLIMITED = "max"

_DEFAULTS = {MIN: "0", LOW: "0", MAX: UNLIMITED, CURRENT: "0"}
_PROCS, _CONTROLLERS, _SUBTREE = "cgroup.procs", "cgroup.controllers", "cgroup.subtree_control"
_MEMBERS, _CONTAINER = "sim.procs", "sim.container"
_ALWAYS = ("cpu", "memory", "pids")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Confinement:
    """What the kernel keeps a container to: UUIDs of its GPUs, and its mounts as container path to host path."""

    __slots__ = ("devices", "mounts")

    def __init__(self, devices: list[str], mounts: dict[str, str]) -> None:
        self.devices = devices
        self.mounts = mounts


class CgroupTree:
    """The tree of one simulation. Cheap, holds nothing open; directories are whole paths below `root`."""

    def __init__(self, simulation: str) -> None:
        self._simulation = simulation
        self.root = os.path.join(simulation, "cgroup")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Held while files of the tree change."""
        descriptor = os.open(
            os.path.join(self._simulation, "cgroup.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def is_v2(self) -> bool:
        return os.path.exists(os.path.join(self.root, _CONTROLLERS))

    def has_dmem(self) -> bool:
        """Whether this kernel has the dmem controller."""
        return DMEM in (read_text(os.path.join(self.root, _CONTROLLERS)) or "").split()

    def settle(self, capacities: Mapping[str, int], *, v2: bool = True, dmem: bool = True) -> None:
        """Brings every file to what follows from the others. `capacities`: bytes by region."""
        os.makedirs(self.root, exist_ok=True)
        with self.lock():
            if not v2:
                remove(os.path.join(self.root, _CONTROLLERS))
                return
            _keep(os.path.join(self.root, "dmem.capacity"), _keyed(capacities.items()) if dmem else None)
            self._settle(self.root, (*_ALWAYS, *((DMEM,) if dmem else ()), "misc"), capacities)

    def _settle(self, directory: str, controllers: tuple[str, ...], regions: Iterable[str]) -> None:
        _keep(os.path.join(directory, _CONTROLLERS), " ".join(controllers) + "\n")
        if not os.path.exists(os.path.join(directory, _PROCS)):
            self._list(directory, {})
        if directory != self.root:
            for name, default in _DEFAULTS.items():
                path = os.path.join(directory, name)
                known = read_keyed(path)
                wanted = _keyed((region, known.get(region, default)) for region in regions)
                _keep(path, wanted if DMEM in controllers else None)
        path = os.path.join(directory, _SUBTREE)
        asked = (read_text(path) or "").replace("+", " ").replace("-", " -").split()
        passed = tuple(c for c in controllers if c in _ALWAYS or (c == DMEM and c in asked and f"-{c}" not in asked))
        _keep(path, " ".join(passed) + "\n")
        for name in os.listdir(directory):
            if os.path.isdir(child := os.path.join(directory, name)):
                self._settle(child, passed, regions)

    # Cgroups

    def make(self, path: str, *, delegate_dmem: bool) -> str:
        """Makes the cgroup at this path below the root and those above it; its directory. `settle` completes it.

        `delegate_dmem`: whether the root and slices on the way, this one included, pass the dmem controller on.
        """
        directory = self.root
        with self.lock():
            for part in ("", *path.split("/")):
                directory = os.path.join(directory, part) if part else directory
                os.makedirs(directory, exist_ok=True)
                if delegate_dmem and (not part or part.endswith(".slice")):
                    write_text(os.path.join(directory, _SUBTREE), " ".join((*_ALWAYS, DMEM)) + "\n")
        return directory

    def remove(self, directory: str) -> None:
        """Removes a cgroup and those below it; a missing one is fine. Nothing is cleared on those above it."""
        if not os.path.isdir(directory) or directory not in self.above(directory):
            return
        with self.lock():
            for place, _, files in os.walk(directory, topdown=False):  # shutil would cost every process 1 MiB
                for name in files:
                    os.unlink(os.path.join(place, name))
                os.rmdir(place)

    def above(self, directory: str) -> list[str]:
        """A cgroup and its ancestors, without the root."""
        found = []
        while directory.startswith(self.root + "/"):
            found.append(directory)
            directory = os.path.dirname(directory)
        return found

    # Processes

    def add(self, directory: str, pid: int) -> None:
        """Moves a process into a cgroup. Raises FileNotFoundError where that is gone."""
        with self.lock():
            if not os.path.isdir(directory):
                raise FileNotFoundError(f"cannot enter the cgroup {directory}: it is gone")
            start_ticks = process_start_ticks(pid)
            for cgroup, known in self._members().items():
                others = {p: ticks for p, ticks in known.items() if p != pid}
                self._list(cgroup, others)
            if start_ticks is not None:
                self._list(directory, {**self._members().get(directory, {}), pid: start_ticks})

    def _list(self, directory: str, members: Mapping[int, int]) -> None:
        _keep(os.path.join(directory, _MEMBERS), "".join(f"{pid} {ticks}\n" for pid, ticks in members.items()))
        _keep(os.path.join(directory, _PROCS), "".join(f"{pid}\n" for pid in sorted(members)))

    def _members(self) -> dict[str, dict[int, int]]:
        """Start times of the living processes that each cgroup lists, by PID."""
        found = {}
        for directory, _, files in os.walk(self.root):
            if _MEMBERS in files:
                rows = (line.split() for line in (read_text(os.path.join(directory, _MEMBERS)) or "").splitlines())
                listed = {int(pid): int(ticks) for pid, ticks in rows}
                found[directory] = {p: ticks for p, ticks in listed.items() if process_start_ticks(p) == ticks}
        return found

    def _listed(self) -> dict[int, str]:
        return {pid: directory for directory, members in self._members().items() for pid in members}

    def cgroups_of(self, pids: Iterable[int]) -> dict[int, str]:
        """The cgroup of each process; the root for those of no container."""
        listed = self._listed()
        return {pid: next((listed[p] for p in _ancestry(pid) if p in listed), self.root) for pid in pids}

    def cgroup_of(self, pid: int) -> str:
        return self.cgroups_of((pid,))[pid]

    def members(self, directory: str) -> list[int]:
        """All processes in a cgroup and below it."""
        if not os.path.isdir(directory):
            return []
        found = self.cgroups_of(int(entry) for entry in os.listdir("/proc") if entry.isdecimal())
        return [pid for pid, cgroup in found.items() if is_within(cgroup, directory)]

    # Containers

    def confine(self, directory: str, confinement: Confinement) -> None:
        """Keeps the processes of a cgroup to these devices and mounts."""
        text = json.dumps({"devices": confinement.devices, "mounts": confinement.mounts})
        write_text(os.path.join(directory, _CONTAINER), text)

    def confinement_of(self, pid: int) -> Confinement | None:
        """What a process is kept to; None on the host."""
        for directory in self.above(self.cgroup_of(pid)):
            text = read_text(os.path.join(directory, _CONTAINER))
            if text is not None:
                value = json.loads(text)
                return Confinement(value["devices"], value["mounts"])
        return None


def is_within(directory: str, ancestor: str) -> bool:
    """Whether a cgroup is another one or below it."""
    return directory == ancestor or directory.startswith(ancestor + "/")


def read_keyed(path: str) -> dict[str, str]:
    """A nested-keyed file: values by region; empty where it is missing."""
    lines = (line.split() for line in (read_text(path) or "").splitlines())
    return {words[0]: words[1] for words in lines if len(words) == 2}


def read_bytes(path: str, region: str) -> int | None:
    """A region's value in bytes; None: no limit, also where the file does not tell."""
    return memparse(read_keyed(path).get(region, UNLIMITED))


def memparse(text: str) -> int | None:
    """Bytes of `1048576` or `9G` as the kernel reads them; None for anything else, such as `max`."""
    unit = _UNITS.get(text[-1:], 1)
    number = text if unit == 1 else text[:-1]
    return int(number) * unit if number.isascii() and number.isdigit() else None


def write_value(path: str, region: str, value: int | str) -> None:
    """Sets the value of one region; those of others stay."""
    _keep(path, _keyed({**read_keyed(path), region: str(value)}.items()))


def _keyed(entries: Iterable[tuple[str, int | str]]) -> str:
    return "".join(f"{region} {value}\n" for region, value in entries)


def _keep(path: str, text: str | None) -> None:
    """Makes a file say this, without touching one that does. None: no file."""
    if text is None:
        remove(path)
    elif read_text(path) != text:
        write_text(path, text)


def _ancestry(pid: int) -> Iterator[int]:
    """A process, its parent and so on, without init."""
    while pid > 1:
        yield pid
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            return
