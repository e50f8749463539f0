"""What a control daemon remembers and how it answers commands of protocol 2. Pure: effects are returned as actions."""

from __future__ import annotations

import math
from collections.abc import Callable

from mpsd.sim.mps.views import Limit, Refused, ServerView, Settings
from mpsd.sim.pinnedlimits import parse_command_value, show_value

Action = tuple[str, int, str]
"""start UID; send server message; drain server; exit server; terminate server client; quit seconds (-1: no limit)"""

HELP = "\n".join(
    (
        "get_server_list",
        "get_server_status <PID>",
        "start_server -uid <UID>",
        "shutdown_server <PID> [-f]",
        "get_client_list <PID>",
        "get_device_client_list [<PID>]",
        "ps [-p <PID>]",
        "set_default_active_thread_percentage <percentage>",
        "get_default_active_thread_percentage",
        "set_active_thread_percentage <PID> <percentage>",
        "get_active_thread_percentage <PID>",
        "set_default_device_pinned_mem_limit <device> <value>",
        "get_default_device_pinned_mem_limit <device>",
        "set_device_pinned_mem_limit <PID> <device> <value>",
        "get_device_pinned_mem_limit <PID> <device>",
        "set_default_client_priority [0|1]",
        "get_default_client_priority",
        "terminate_client <server PID> <client PID>",
        "device_query [<PID>] [--csv]",
        "quit [-t <seconds>]",
    )
)


class Server2(ServerView):
    """A server of protocol 2: it keeps the limits of its start, until a command changes them."""

    __slots__ = ("limits", "threads")

    def __init__(self, pid: int, uid: int, limits: dict[str, Limit], threads: float) -> None:
        super().__init__(pid, uid)
        self.limits = limits
        self.threads = threads


class Control2:
    """State of one daemon: the defaults of servers to come, and the servers."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.limits: dict[str, Limit] = {}
        self.threads = 100.0
        self.priority = 0
        self.servers: dict[int, Server2] = {}
        self._actions: list[Action] = []

    def execute(self, line: str) -> tuple[str, list[Action]]:
        """Reply (empty: none, no newline at its end) and effects of one command. Never raises: a bad one has a text."""
        name, *words = line.split()
        handler = _COMMANDS.get(name)
        self._actions = []
        try:
            if handler is None:
                raise Refused(f"{self.settings.switch('unknown-command-reply')}: {name}")
            return handler(self, words), self._actions
        except Refused as refusal:
            return str(refusal), []
        except (IndexError, ValueError):
            return self.settings.switch("bad-argument-reply"), []

    def set_default_limit(self, device: str, limit: Limit) -> None:
        """Sets a default; the last one set comes last, which decides between an ordinal and a UUID for one device."""
        self.limits.pop(device, None)
        applied = self.settings.apply_limit(limit)
        if applied is not None:
            self.limits[device] = applied

    # Servers and clients

    def _server(self, words: list[str]) -> Server2:
        server = self.servers.get(int(words[0]))
        if server is None:
            raise Refused(self.settings.switch("bad-server-reply"))
        return server

    def get_server_list(self, words: list[str]) -> str:
        return "\n".join(map(str, self.servers))

    def get_server_status(self, words: list[str]) -> str:
        return self._server(words).state

    def start_server(self, words: list[str]) -> str:
        if words[0] != "-uid":
            raise ValueError
        uid = int(words[1])
        if not self.servers and self.settings.switch("start-server") == "starts":
            self._actions.append(("start", uid, ""))
        return self.settings.switch("start-server-reply")

    def shutdown_server(self, words: list[str]) -> str:
        server = self._server(words)
        self._actions.append(("exit" if "-f" in words[1:] else "drain", server.pid, ""))
        return self.settings.switch("shutdown-server-reply")

    def get_client_list(self, words: list[str]) -> str:
        clients = self._server(words).clients.values()
        return "\n".join(str(self.settings.show_pid(client.pid)) for client in clients)

    def get_device_client_list(self, words: list[str]) -> str:
        servers = [self._server(words)] if words else list(self.servers.values())
        lines = []
        for uuid in self.settings.uuids:
            pids = [
                self.settings.show_pid(c.pid) for server in servers for c in server.clients.values() if c.device == uuid
            ]
            lines.append(" ".join((uuid, *map(str, pids))))
        return "\n".join(lines)

    def ps(self, words: list[str]) -> str:
        only = int(words[1]) if words else None
        lines = ["PID       ID    SERVER   DEVICE             NAMESPACE COMMAND"]
        for server in self.servers.values():
            for number, client in server.clients.items():
                if only not in (None, client.pid):
                    continue
                pid, device = self.settings.show_pid(client.pid), client.device[:12] or "-"
                command = self.settings.command_of(client.pid)
                lines.append(f"{pid:<9} {number:<5} {server.pid:<8} {device:<18} {client.pid:<9} {command}")
        return "\n".join(lines)

    def terminate_client(self, words: list[str]) -> str:
        server, pid = self._server(words), int(words[1])
        if not any(client.pid == pid for client in server.clients.values()):
            return self.settings.switch("bad-client-code")
        self._actions.append(("terminate", server.pid, str(pid)))
        return ""

    # Thread percentage

    def _percentage(self, text: str) -> float:
        value = float(text)
        if 0 < value <= 100:
            return value
        if math.isnan(value) or self.settings.switch("percentage-range") == "reject":
            raise ValueError
        return 100.0 if value > 100 else 0.1

    def set_default_active_thread_percentage(self, words: list[str]) -> str:
        self.threads = self._percentage(words[0])
        return f"{self.threads:.1f}"

    def get_default_active_thread_percentage(self, words: list[str]) -> str:
        return f"{self.threads:.1f}"

    def set_active_thread_percentage(self, words: list[str]) -> str:
        server = self._server(words)
        server.threads = self._percentage(words[1])
        self._actions.append(("send", server.pid, f"threads {server.threads}"))
        return f"{server.threads:.1f}"

    def get_active_thread_percentage(self, words: list[str]) -> str:
        return f"{self._server(words).threads:.1f}"

    # Pinned memory limits

    def _parse_limit(self, text: str) -> Limit:
        size_bytes = parse_command_value(text)
        if size_bytes is None:
            raise ValueError
        return Limit(size_bytes, text)

    def _show_limit(self, limit: Limit | None) -> str:
        if limit is None:
            return self.settings.switch("unset-limit-reply")
        return show_value(limit.size_bytes, limit.text, self.settings.floor_g)

    def set_default_device_pinned_mem_limit(self, words: list[str]) -> str:
        self.set_default_limit(words[0], self._parse_limit(words[1]))
        return self.settings.switch("set-limit-reply")

    def get_default_device_pinned_mem_limit(self, words: list[str]) -> str:
        return self._show_limit(self.limits.get(words[0]))

    def set_device_pinned_mem_limit(self, words: list[str]) -> str:
        server, device, limit = self._server(words), words[1], self.settings.apply_limit(self._parse_limit(words[2]))
        server.limits.pop(device, None)
        if limit is not None:
            server.limits[device] = limit
            self._actions.append(("send", server.pid, f"limit {device} {limit.size_bytes}"))
        return self.settings.switch("set-limit-reply")

    def get_device_pinned_mem_limit(self, words: list[str]) -> str:
        return self._show_limit(self._server(words).limits.get(words[1]))

    # The rest

    def set_default_client_priority(self, words: list[str]) -> str:
        if words and words[0] not in ("0", "1"):
            raise ValueError
        self.priority = int(words[0]) if words else 0
        return ""

    def get_default_client_priority(self, words: list[str]) -> str:
        return ("0 [NORMAL]", "1 [BELOW NORMAL]")[self.priority]

    def device_query(self, words: list[str]) -> str:
        servers = [word for word in words if word != "--csv"]
        if servers:
            self._server(servers)
        separator = "," if "--csv" in words else "  "
        rows = [
            ("ORDINAL", "UUID", "NAME"),
            *((str(n), device.uuid, device.name) for n, device in enumerate(self.settings.devices)),
        ]
        return "\n".join(separator.join(row) for row in rows)

    def quit(self, words: list[str]) -> str:
        timeout_s = -1
        if words:
            if words[0] != "-t":
                raise ValueError
            timeout_s = int(words[1])
        self._actions.append(("quit", timeout_s, ""))
        return ""

    def help(self, words: list[str]) -> str:
        return HELP


_COMMANDS: dict[str, Callable[[Control2, list[str]], str]] = {
    name: getattr(Control2, name) for name in (*(line.split()[0] for line in HELP.splitlines()), "help")
}
