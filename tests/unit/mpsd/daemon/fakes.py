"""Control daemons without a process: what they remember, and how they refuse."""

import contextlib
import os
import stat
from collections.abc import Callable, Mapping, Sequence

from mpsd.common.errors import GpufracError
from mpsd.daemon import protocol3
from mpsd.daemon.control import CommandFailedError, ControlClient
from mpsd.daemon.paths import DaemonDirs, namespace_socket


class Scripted:
    """Protocol 2: the reply to each command, nothing to others. An error is raised."""

    def __init__(self, replies: Mapping[str, str | GpufracError]) -> None:
        self.replies = dict(replies)
        self.asked: list[str] = []
        self.timeouts_s: list[float] = []

    def ask(self, dirs: DaemonDirs, command: str, timeout_s: float) -> str:
        self.asked.append(command)
        self.timeouts_s.append(timeout_s)
        reply = self.replies.get(command, "")
        if isinstance(reply, GpufracError):
            raise reply
        return reply

    def call(self, dirs: DaemonDirs, arguments: Sequence[str], timeout_s: float) -> str:
        raise AssertionError(arguments)


class Daemon3:
    """Protocol 3: one server with namespaces. `busy` ones have a client; `fail[verb]` is raised.

    `show` is how a limit prints; `make_socket` is whether namespaces get theirs.
    """

    def __init__(self, dirs: DaemonDirs) -> None:
        self.dirs = dirs
        self.namespaces: dict[str, tuple[str, str]] = {}
        self.busy: set[str] = set()
        self.fail: dict[str, GpufracError] = {}
        self.status = "Ready"
        self.make_socket = True
        self.show: Callable[[str], str] = lambda limit: limit
        self.others: dict[tuple[str, ...], str] = {}
        self.calls: list[tuple[str, ...]] = []
        self.add("default", "64M", "1")

    def add(self, name: str, limit: str = "unlimited", percent: str = "100") -> None:
        self.namespaces[name] = (limit, percent)
        path = namespace_socket(self.dirs, name)
        if self.make_socket and not os.path.exists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.mknod(path, stat.S_IFSOCK | 0o666)

    def changes(self) -> list[str]:
        """What was called besides lists, and since the last time."""
        calls, self.calls = self.calls, []
        return [" ".join(call[1:3]) for call in calls if call[1] != "list"]

    def ask(self, dirs: DaemonDirs, command: str, timeout_s: float) -> str:
        raise AssertionError(command)

    def call(self, dirs: DaemonDirs, arguments: Sequence[str], timeout_s: float) -> str:
        assert dirs == self.dirs
        call = tuple(arguments)
        self.calls.append(call)
        if (reply := self.others.get(call)) is not None:
            return reply
        if call == protocol3.LIST_SERVERS:
            return f"s,0,5,{self.status},{dirs.pipe},GPU-1,-\n" if self.namespaces else ""
        assert call[0] == "namespace", call
        assert "--server=s" in call
        verb, name = call[1], call[2]
        if (error := self.fail.get(verb)) is not None:
            raise error
        if verb == "list":
            return "".join(
                f"{name},s,{self.status},{self.show(limit)},{float(percent):.2f},0,{dirs.pipe}/s/{name}\n"
                for name, (limit, percent) in self.namespaces.items()
            )
        self._change(verb, name, call[4:])
        return ""

    def _change(self, verb: str, name: str, options: Sequence[str]) -> None:
        if (name in self.namespaces) is (verb == "create"):
            raise refusal(f"{name}: exists or not")
        if name in self.busy:
            raise refusal(f"{name} has active clients")
        if verb == "delete":
            del self.namespaces[name]
            with contextlib.suppress(FileNotFoundError):
                os.unlink(namespace_socket(self.dirs, name))
        elif verb == "create":
            self.add(name)
        else:
            values = dict(option.removeprefix("--").split("=") for option in options)
            self.add(name, values["pinned-memory-limit"], values["active-thread-percentage"])


def refusal(said: str) -> CommandFailedError:
    return CommandFailedError(f"cannot do it: {said} (exit 1)", said)


_scripted: type[ControlClient] = Scripted
_daemon3: type[ControlClient] = Daemon3
