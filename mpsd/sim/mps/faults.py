"""Faults of the emulated control daemon, switched by files while it runs.

A fault is a file `mps-faults/<name>` in the simulation directory, for every daemon, or `mps-faults/<key>/<name>` for
the one daemon whose pipe directory has this key (`daemon_key`). Its text is the value. Commands are named as they are
written, without arguments: `get_server_list`, under protocol 3 `namespace list`, and `quit` for `-q`.
"""

from __future__ import annotations

import os

from mpsd.sim.files import read_text, remove, write_text

FAULTS: dict[str, str] = {
    # name: what happens while the file is there
    "wedge": "commands named in the file, one a line, get no answer; `clients`: none is taken; empty: all of it",
    "slow": "every command takes this many milliseconds longer",
    "half-line": "a reply stops in the middle, without its newline",
    "drop": "the connection breaks instead of a reply",
    "hung-quit": "quit (3: -q) never ends, with -t neither",
    "refuse-start": "a start prints the file's text and fails",
    "crash-on-start": "the daemon dies right after it listens; -d has returned 0 by then",
    "server-init-delay": "a server stays INITIALIZING for this many milliseconds, or until it is off",
    "server-crash": "the servers die now; the daemon removes the file (name the daemon where there are several)",
    "server-vanishes": "3: servers named in the file (empty: all) leave the list and end now; the daemon removes it",
    "fault-state": "the servers go to FAULT now, until their clients have left; the daemon removes the file",
    "restart-loop": "every server dies at start, and is started again as long as a client waits",
    "pid-zero": "clients are known by PID 0, as where the daemon is not in the host's PID namespace",
    "terminate-fails": "terminate_client does nothing and prints the file's text, 1 when empty; 3: it exits 1",
    "terminate-hangs": "terminate_client (3: client terminate) is never answered, while lists look as ever",
    "log-flood": "every command writes this many lines to control.log, 1000 when empty",
    "limit-not-applied": "a limit that is set is forgotten; with a text such as 1024M: that is stored instead",
    "limit-not-enforced": "limits read back as set, and clients are started without them",
}


def daemon_key(pipe_directory: str) -> str:
    """Name of the directory with the faults of one daemon: its pipe directory with `_` for `/`."""
    return os.path.normpath(pipe_directory).strip("/").replace("/", "_")


def _path(simulation: str, name: str, pipe_directory: str | None) -> str:
    FAULTS[name]
    key = "" if pipe_directory is None else daemon_key(pipe_directory)
    return os.path.join(simulation, "mps-faults", key, name)


def set_fault(simulation: str, name: str, value: str = "", pipe_directory: str | None = None) -> None:
    """Switches a fault on, for every daemon or for one. Raises KeyError for a name that is not in the table."""
    write_text(_path(simulation, name, pipe_directory), value)


def clear_fault(simulation: str, name: str, pipe_directory: str | None = None) -> None:
    """Switches a fault off. Raises KeyError for a name that is not in the table."""
    remove(_path(simulation, name, pipe_directory))


class Faults:
    """The faults as one daemon sees them; its own ones win."""

    def __init__(self, simulation: str, pipe_directory: str) -> None:
        self._simulation = simulation
        self._pipe_directory = pipe_directory

    @property
    def directories(self) -> tuple[str, str]:
        """Where a change shows: all daemons', this daemon's."""
        base = os.path.join(self._simulation, "mps-faults")
        return base, os.path.join(base, daemon_key(self._pipe_directory))

    def get(self, name: str) -> str | None:
        """Value of a fault, None where it is off."""
        for directory in (self._pipe_directory, None):
            text = read_text(_path(self._simulation, name, directory))
            if text is not None:
                return text.strip()
        return None

    def number(self, name: str, empty: int) -> int:
        """Value of a fault as a number, 0 where it is off, `empty` where it has no value."""
        text = self.get(name)
        if text is None:
            return 0
        return int(text) if text.isdigit() else empty

    def names(self, name: str, command: str) -> bool:
        """Whether a fault is on and its value names a command, by a line or a word of its own, or is empty."""
        text = self.get(name)
        return text is not None and (not text or command in text.splitlines() or command in text.split())

    def take(self, name: str) -> str | None:
        """Value of a fault, None where it is off; switches it off: for what happens once."""
        text = self.get(name)
        if text is not None:  # else it may come just now, and is for the next look
            for directory in (self._pipe_directory, None):
                remove(_path(self._simulation, name, directory))
        return text
