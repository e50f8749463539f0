"""The emulated control daemon of protocol 3: many named servers at once, and a socket for each of their namespaces."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator

from mpsd.common.socketpath import MAX_SOCKET_PATH_BYTES
from mpsd.sim.cudaerrors import NUMBERS
from mpsd.sim.mps.control3 import CONTEXT_SHARE, MEMACCT, Action3, Control3
from mpsd.sim.mps.daemon import RESTART_PAUSE_S, Daemon
from mpsd.sim.mps.grammar3 import QUIT, name_of
from mpsd.sim.mps.options import Options, StartError
from mpsd.sim.mps.peers import Peer, Target, Waiting
from mpsd.sim.mps.state3 import DEFAULT, Server3
from mpsd.sim.mps.views import INITIALIZING, Refused, ServerView
from mpsd.sim.switches import major
from mpsd.sim.wire import WORD_END, LineReader, send_line, send_message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mpsd.sim.mps.config3 import Config


class Registered:
    """A client that shares no context, known for memory accounting alone."""

    __slots__ = ("connection", "pid", "reader")

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.pid = pid
        self.reader = LineReader(connection.fileno())


class Daemon3(Daemon):
    """See Daemon."""

    protocol = 3
    terminate_command = "client terminate"

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._control = Control3(self._settings, options.pipe_directory, os.getuid(), options.multiuser)
        self._config: Config | None = None
        self._wanted: dict[Server3, float] = {}
        """Servers to start, and not before when (monotonic seconds)."""
        self._failed_starts: dict[Server3, int] = {}
        self._registered: dict[int, Registered] = {}
        self._evicting: dict[tuple[int, int], tuple[str, list[Callable[[str], None]]]] = {}
        """Evictions on the way, by (server, client): the GPU, and who waits for it."""
        self._evictions: dict[str, list[int]] = {}
        """By GPU: requests, evictions, requests without a victim."""

    # Start and end

    def _refuse_long_path(self) -> StartError:
        return StartError("Failed to initialize MPS control daemon")

    def _prepare(self) -> None:
        path = self._options.config_path
        if path is None:
            return
        from mpsd.sim.mps.config3 import ConfigError, parse_config  # costs what only a daemon with a file needs

        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
            self._config = parse_config(text, major(self._version), self._switch("unknown-config-key"))
            Control3(self._settings, "", os.getuid(), self._options.multiuser).load(self._config)
        except (OSError, UnicodeDecodeError, ConfigError, Refused) as error:
            raise StartError(f"Failed to apply configuration file {path}: {error}") from error

    def _has_pid_file(self) -> bool:
        return self._switch("pid-file-3") == "yes"

    def _opened(self) -> None:
        pipe = self._options.pipe_directory
        self._log.write(f"To connect CUDA applications to this daemon, set CUDA_MPS_PIPE_DIRECTORY={pipe}")
        if self._config is not None:
            for action in self._control.load(self._config):
                self._act(action)

    def _cleaned(self) -> None:
        if self._switch("directories-at-exit") == "remove":
            for server in self._control.servers.values():
                self._remove_directories(server)

    def _remove_directories(self, server: Server3) -> None:
        for namespace in (*server.namespaces, ""):
            with contextlib.suppress(OSError):
                os.rmdir(self._control.directory(server, namespace))

    # Commands

    def _name_of(self, line: str) -> str:
        return name_of(_words(line))

    def _execute(self, peer: Peer, line: str) -> None:
        words = _words(line)
        if words == [QUIT]:
            self._quit(peer)
            return
        if name_of(words) == self.terminate_command and (text := self._faults.get("terminate-fails")) is not None:
            self._answer(peer, text or "Failed to terminate client", 1)
            return
        status, reply, actions = self._control.execute(words, peer.uid)
        answered_now = True
        for action in actions:
            if action[0] == "terminate":
                process = action[1].process
                assert process is not None
                self._await_terminate(peer, process.pid, action[2])
                answered_now = False
            else:
                self._act(action)
        if answered_now:
            self._answer(peer, reply, status)

    def _quit(self, peer: Peer) -> None:
        if peer.uid not in (0, os.getuid()):
            self._answer(peer, f"Insufficient privileges for UID {peer.uid}. 'QUIT' requires server owner.", 1)
            return
        verb = "exit" if self._switch("quit-with-clients") == "force" else "drain"
        if self._switch("quit-blocks") == "yes":
            self._begin_quit(peer, verb=verb)
        else:
            self._answer(peer, "")
            self._begin_quit(None, verb=verb)

    def _act(self, action: Action3) -> None:
        """Carries out one effect of a command."""
        verb, server, text = action
        if verb == "make server":
            mode = " [multiuser enabled]" if self._options.multiuser else ""
            self._log.write(f"Adding server '{server.name}'{mode}")
            self._make_directory(server)
            self._open_log_pipe(os.path.join(self._control.directory(server), "log"))
            self._make_directory(server, DEFAULT)
            if self._switch("server-start") == "create":
                self._wanted[server] = 0.0
        elif verb == "make namespace":
            self._make_directory(server, text)
        elif verb == "remove namespace":
            directory = self._control.directory(server, text)
            self._loop.remove_below(directory)
            with contextlib.suppress(OSError):
                os.rmdir(directory)
        elif verb == "evict" and server.process is not None:
            send_message(self._channels[server.process.pid], f"terminate {text}")
        elif verb == "remove server":
            self._forget_server(server)

    def _make_directory(self, server: Server3, namespace: str = "") -> None:
        directory = self._control.directory(server, namespace)
        os.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, "control")
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            self._log.write(f"Failed to bind socket {path}")  # clients that are sent there run without MPS
        else:
            self._listen(path, (server.name, namespace or DEFAULT))

    def _forget_server(self, server: Server3) -> None:
        """Takes away what is outside of the control's memory of a server: its process and its sockets."""
        self._wanted.pop(server, None)
        self._failed_starts.pop(server, None)
        if server.process is not None:
            self._end_server(server.process, "exit")
        self._loop.remove_below(self._control.directory(server))
        self._remove_directories(server)

    def _terminated(self, peer: Peer, code: str) -> None:
        if code == "0":
            self._answer(peer, self._switch("client-terminate-reply"))
        else:
            self._answer(peer, "Failed to terminate client", 1)

    # Clients

    def _is_up(self, target: Target) -> bool:
        server = self._control.servers.get(target[0])
        return server is not None and server.process is not None and server.process.state != INITIALIZING

    def _route(self) -> None:
        if self._quitting:
            return
        if not self._faults.names("wedge", "clients"):
            for waiting in list(self._waiting):
                self._route_one(waiting)
        now = time.monotonic()
        for server, not_before in list(self._wanted.items()):
            if not_before <= now:
                del self._wanted[server]
                if server.process is None:
                    self._start_server(server)
        self._wake_at = min(self._wanted.values(), default=None)

    def _route_one(self, waiting: Waiting) -> None:
        name, namespace_name = waiting.target
        sharing = self._control.features[CONTEXT_SHARE] and (bool(name) or self._control.default_socket)
        if not sharing and (rule := self._switch("without-context-sharing")) != "share":
            if rule != "plain":
                self._dismiss(waiting, f"error {NUMBERS['NOT_PERMITTED']}")
            elif name or self._switch("memacct-main-socket") != "yes" or not self._accounts(waiting.pid):
                self._dismiss(waiting, "plain")
            else:
                self._register(waiting)
            return
        if name:
            server = self._control.servers.get(name)
        else:
            server, actions = self._control.server_of_user(waiting.uid)
            for action in actions:
                self._act(action)
        namespace = server.namespaces.get(namespace_name or DEFAULT) if server is not None else None
        if server is None or namespace is None:
            self._dismiss(waiting, "plain")  # it vanished meanwhile, and with it the socket
            return
        waiting.target = (server.name, namespace.name)
        if not self._options.multiuser and waiting.uid != server.uid:
            self._dismiss(waiting, f"error {NUMBERS['NOT_PERMITTED']}")
        elif server.process is None:
            self._wanted.setdefault(server, 0.0)
        elif server.process.state == INITIALIZING:
            return
        else:
            self._accounts(waiting.pid)
            limit = "-" if namespace.limit is None else str(namespace.limit.size_bytes)
            self._hand_over(waiting, server.process, f"limits {limit} {namespace.percent}", namespace.name)

    # Memory accounting

    def _accounts(self, pid: int) -> bool:
        """Registers a client for memory accounting; False where that is off or fails."""
        if not self._control.features[MEMACCT]:
            return False
        known = self._settings.show_pid(pid)
        if known == 0:
            self._log.write("[memacct] failed to register client pid 0")
        return known != 0

    def _register(self, waiting: Waiting) -> None:
        """Takes a client that goes on without sharing a context."""
        number = self._number()
        client = self._registered[number] = Registered(waiting.connection, waiting.pid)
        self._unqueue(waiting)
        self._loop.watch(client.connection.fileno(), lambda: self._on_registered(number))
        send_line(client.connection, "registered")
        self._log.write(f"[memacct] registered client pid {waiting.pid}")

    def _on_registered(self, number: int) -> None:
        client = self._registered[number]
        lines = client.reader.read()
        if lines is None:
            self._unregister(number)
            return
        for line in lines:
            if line.startswith("evict "):
                self._evict(client.pid, line.split()[1], lambda answer: self._answer_registered(number, answer))

    def _answer_registered(self, number: int, answer: str) -> None:
        if number in self._registered:
            send_line(self._registered[number].connection, answer)

    def _unregister(self, number: int) -> None:
        connection = self._registered.pop(number).connection
        self._loop.forget(connection.fileno())
        connection.close()

    def _on_evict(self, server: ServerView, number: int, uuid: str) -> None:
        def answer(text: str) -> None:
            if server.pid in self._channels:
                send_message(self._channels[server.pid], f"evicted {number} {text}")

        self._evict(server.clients[number].pid, uuid, answer)

    def _evict(self, pid: int, uuid: str, answer: Callable[[str], None]) -> None:
        """Ends a client over its soft limit in favour of one within its own; answers once the memory is free."""
        counts = self._evictions.setdefault(uuid, [0, 0, 0])
        counts[0] += 1
        under_way = next((answers for gpu, answers in self._evicting.values() if gpu == uuid), None)
        victim = None if under_way is not None else self._victim(pid, uuid)
        counts[1] += victim is not None
        counts[2] += victim is None and under_way is None
        self._log.write(f"[memacct] device {uuid}: requests {counts[0]}, evictions {counts[1]}, no-victim {counts[2]}")
        if under_way is not None:
            under_way.append(answer)
        elif victim is None:
            answer("no-victim")
        elif (process := victim[1]) is not None:
            victim_pid = process.clients[victim[0]].pid
            self._evicting[process.pid, victim_pid] = (uuid, [answer])
            send_message(self._channels[process.pid], f"terminate {victim_pid}")
        else:
            client = self._registered[victim[0]]
            for device in self._settings.uuids:
                self._driver.release(device, client.pid)
            send_line(client.connection, f"error {NUMBERS['MPS_CLIENT_TERMINATED']}")
            self._unregister(victim[0])
            answer("retry")

    def _victim(self, requester: int, uuid: str) -> tuple[int, ServerView | None] | None:
        """Number and server of who has to go."""
        if not self._control.features[MEMACCT] or self._settings.show_pid(requester) == 0:
            return None
        over = self._driver.over_soft(uuid)
        candidates = [
            (number, over[pid], server)
            for number, pid, server in self._accounted()
            if pid in over and pid != requester and self._settings.show_pid(pid) != 0
        ]
        newest = self._switch("eviction-order") == "newest"
        candidates.sort(key=lambda candidate: (0 if newest else candidate[1], candidate[0]))
        return (candidates[-1][0], candidates[-1][2]) if candidates else None

    def _accounted(self) -> Iterator[tuple[int, int, ServerView | None]]:
        """Number, PID and server of all clients."""
        for server in self._servers.values():
            for number, view in server.clients.items():
                yield number, view.pid, server
        for number, client in self._registered.items():
            yield number, client.pid, None

    def _finish_terminate(self, done: tuple[int, int], code: str) -> None:
        super()._finish_terminate(done, code)
        for answer in self._evicting.pop(done, ("", []))[1]:
            answer("retry")

    # Servers

    def _start_server(self, server: Server3) -> None:
        default = server.namespaces[DEFAULT]
        limits = [] if default.limit is None else [(uuid, default.limit.size_bytes) for uuid in self._settings.uuids]
        config = {
            "pipe_directory": self._control.directory(server),
            "log_directory": os.path.join(self._options.log_directory, server.name),
            "limits": limits,
            "threads": default.percent,
            "devices": server.allowed_devices,
        }
        pid = self._spawn(server.uid, config)
        server.process = self._servers[pid] = ServerView(pid, server.uid)

    def _server_of(self, process: ServerView) -> Server3 | None:
        return next((server for server in self._control.servers.values() if server.process is process), None)

    def _server_ready(self, server: ServerView) -> None:
        owner = self._server_of(server)
        if owner is not None:
            self._failed_starts.pop(owner, None)

    def _server_ended(self, server: ServerView, failed: bool) -> None:
        for done in [done for done in self._evicting if done[0] == server.pid]:
            self._finish_terminate(done, "")  # what it held is free as well
        owner = self._server_of(server)
        if owner is None or self._quitting:
            return
        owner.process = None
        vanishes = server.error == NUMBERS["NO_DEVICE"] if failed else self._switch("server-after-crash") == "vanish"
        if vanishes:
            self._vanish(owner)
            return
        if failed:
            failed_starts = self._failed_starts.pop(owner, 0) + (not self._restart_loop)
            self._failed_starts[owner] = failed_starts
            if self._gives_up(failed_starts):
                del self._failed_starts[owner]
                for waiting in [w for w in self._waiting if w.target[0] == owner.name]:
                    self._dismiss(waiting, f"error {NUMBERS['MPS_SERVER_NOT_READY']}")
                return
        if failed or self._switch("server-start") == "create":
            self._wanted[owner] = time.monotonic() + RESTART_PAUSE_S

    def _vanish(self, server: Server3) -> None:
        del self._control.servers[server.name]
        self._forget_server(server)

    def _on_faults(self) -> None:
        named = self._faults.take("server-vanishes")
        if named is not None:
            for server in list(self._control.servers.values()):
                if not named or server.name in named.split():
                    self._vanish(server)


def _words(line: str) -> list[str]:
    return line.split(WORD_END) if WORD_END in line else line.split()
