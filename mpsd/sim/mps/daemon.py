"""The emulated control daemon: one loop over socket, servers and signals, blocked in poll while nothing happens."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable

from mpsd.sim.cudaerrors import NUMBERS
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.files import names_in
from mpsd.sim.mps.control import ACTIVE, INITIALIZING, Action, ClientView, Control, Limit, ServerView, Settings
from mpsd.sim.mps.faults import Faults
from mpsd.sim.mps.limits import parse_command_value, parse_environment, visible_devices
from mpsd.sim.mps.logs import Log
from mpsd.sim.mps.switches import AUTO, binary_version, major, read_switch
from mpsd.sim.mps.watch import watch_simulation
from mpsd.sim.mps.wire import (
    CHANNEL_DESCRIPTOR,
    LineReader,
    peer_credentials,
    pipe_directory,
    receive_message,
    send_line,
    send_message,
)

MAX_SOCKET_PATH_BYTES = 107
_RESTART_PAUSE_S = 0.05


class StartError(Exception):
    """The daemon cannot start: `status` for the caller, and a text, maybe empty."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


class Options:
    """Command line and environment of one daemon."""

    def __init__(self, simulation: str, server_binary: str, multiuser: bool, static: bool, foreground: bool) -> None:
        self.simulation = simulation
        self.server_binary = server_binary
        self.multiuser = multiuser
        self.static = static
        self.foreground = foreground
        self.pipe_directory = pipe_directory()
        self.log_directory = os.environ.get("CUDA_MPS_LOG_DIRECTORY") or "/var/log/nvidia-mps"


class Peer:
    """A front-end, or a connection that has not said yet what it is. Commands wait in `lines`."""

    __slots__ = ("connection", "descriptor", "hello", "lines", "reader", "terminating")

    def __init__(self, connection: socket.socket | None) -> None:
        self.connection = connection
        self.descriptor = 0 if connection is None else connection.fileno()
        self.reader = LineReader(self.descriptor)
        self.hello = connection is None  # the foreground daemon's own stdin needs none
        self.lines: list[str] = []
        self.terminating: tuple[int, int] | None = None
        """(server, client) whose end the last command waits for"""


class Waiting:
    """A client that has no server yet."""

    __slots__ = ("connection", "partition", "pid", "uid")

    def __init__(self, connection: socket.socket, pid: int, uid: int, partition: str) -> None:
        self.connection = connection
        self.pid = pid
        self.uid = uid
        self.partition = partition


class Daemon:
    """The control daemon of one pipe directory."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._faults = Faults(options.simulation, options.pipe_directory)
        self._driver = SimulatedDriver(options.simulation)
        self._control = Control(self._settings())
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._peers: dict[int, Peer] = {}
        self._waiting: list[Waiting] = []
        self._channels: dict[int, socket.socket] = {}
        self._next_number = 0
        self._failed_starts = 0
        self._wake_at: float | None = None
        self._quit_by: Peer | None = None
        self._quitting = False
        self._quit_at: float | None = None
        self._status = 0

    def _switch(self, name: str) -> str:
        return read_switch(self._options.simulation, name)

    def _settings(self) -> Settings:
        try:
            version, gpus = self._driver.version(), self._driver.gpus()
        except FileNotFoundError as error:
            raise StartError(str(error)) from error
        names = {gpu.uuid: gpu.name for gpu in gpus}
        visible = visible_devices(list(names), os.environ.get("CUDA_VISIBLE_DEVICES"))
        display = self._switch("limit-display")
        self._version = version
        return Settings(
            devices=[(uuid, names[uuid]) for uuid in visible],
            switch=self._switch,
            floor_g=major(version) >= 595 if display == AUTO else display == "floor-g",
            static=self._options.static,
            command_of=_command_of,
        )

    # Start

    def start(self) -> None:
        """Binds and listens. Raises StartError."""
        pipe = self._options.pipe_directory
        path = os.path.join(pipe, "control")
        refusal = self._faults.get("refuse-start")
        if refusal is not None:
            raise StartError(refusal)
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise StartError("", int(self._switch("overlong-start-status")))
        try:
            os.makedirs(pipe, exist_ok=True)
            self._log = Log(self._options.log_directory, "control.log", "Control", echo=self._options.foreground)
            # Held until the process ends: proof that the files beside it belong to a living daemon.
            self._lock = os.open(os.path.join(pipe, "control_lock"), os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StartError("An instance of this daemon is already running") from error
        except OSError as error:
            raise StartError(f"Failed to initialize MPS control daemon: {error}") from error
        if os.path.lexists(path):
            if self._switch("stale-socket") == "refuse":
                self._log.write(f"Failed to bind socket {path}")
                raise StartError("")
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        os.chmod(path, 0o666)  # noqa: S103 - clients of every user connect
        self._listener.listen(128)
        self._listener.setblocking(False)
        with open(os.path.join(pipe, "nvidia-cuda-mps-control.pid"), "w", encoding="ascii") as file:
            file.write(str(os.getpid()) + ("\n" if self._switch("pid-file-newline") == "yes" else ""))
        self._open_log_pipe(os.path.join(pipe, "log"))
        self._read_environment()
        self._log.write(f"Starting control daemon using socket {path}")
        self._log.write(f"To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY={pipe}")
        self._log.write(f"CUDA MPS Control binary version: {binary_version(self._options.simulation, self._version)}")

    def _open_log_pipe(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.mkfifo(path, 0o600)
        self._log_pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._watch(
            self._log_pipe, lambda: self._log.write(os.read(self._log_pipe, 4096).decode(errors="replace").strip())
        )

    def _read_environment(self) -> None:
        self._control.limit_override = self._override
        self._control.show_client_pid = self._show_pid
        for device, size_bytes in parse_environment(os.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "")):
            if size_bytes is not None:
                self._control.set_default_limit(device, Limit(size_bytes, f"{size_bytes // (1024 * 1024)}M"))
        threads = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        if threads:
            self._control.execute(f"set_default_active_thread_percentage {threads}")

    def _override(self, limit: Limit) -> Limit | None:
        text = self._faults.get("limit-not-applied")
        if text is None:
            return limit
        size_bytes = parse_command_value(text)
        return None if size_bytes is None else Limit(size_bytes, text)

    def _show_pid(self, pid: int) -> int:
        return 0 if self._faults.get("pid-zero") is not None else pid

    # The loop

    def serve(self) -> int:
        """Runs until `quit`; the exit status for its front-end."""
        for directory in self._faults.directories:
            os.makedirs(directory, exist_ok=True)
        self._wakeup = watch_simulation(
            (self._options.simulation, *self._faults.directories),
            (signal.SIGCHLD, *([signal.SIGTERM] if self._switch("sigterm") == "quit" else [])),
        )
        if self._faults.get("crash-on-start") is not None:
            os._exit(1)
        self._watch(self._wakeup, self._on_signal)
        self._watch(self._listener.fileno(), self._on_connection)
        if self._options.foreground and self._switch("foreground-stdin") == "commands":
            self._peers[0] = Peer(None)
            self._watch(0, lambda: self._on_peer(self._peers[0]))
        while not (self._quitting and not self._control.servers and not self._hung_quit()):
            ready = [(fd, self._handlers[fd]) for fd, _ in self._poll.poll(self._timeout_ms())]
            for descriptor, handler in ready:
                if self._handlers.get(descriptor) is handler:  # not closed, and maybe reused, by one before it
                    handler()
            self._on_time()
            for peer in list(self._peers.values()):
                self._pump(peer)
            self._route()
        self._remove_files()
        if self._quit_by is not None and self._quit_by.connection is not None:
            send_line(self._quit_by.connection, f"exit {self._status}")
        return self._status

    def _watch(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, select.POLLIN)

    def _forget(self, descriptor: int) -> None:
        if self._handlers.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def _timeout_ms(self) -> float | None:
        times = [at for at in (self._wake_at, self._quit_at) if at is not None]
        return max(0.0, min(times) - time.monotonic()) * 1000 + 1 if times else None

    def _on_time(self) -> None:
        now = time.monotonic()
        if self._wake_at is not None and now >= self._wake_at:
            self._wake_at = None
        if self._quit_at is not None and now >= self._quit_at and not self._hung_quit():
            self._quit_at = None
            for pid in self._control.servers:
                self._status = 1
                os.kill(pid, signal.SIGKILL)

    def _hung_quit(self) -> bool:
        return self._faults.get("hung-quit") is not None

    def _remove_files(self) -> None:
        for name in ("control", "nvidia-cuda-mps-control.pid", "log"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._options.pipe_directory, name))

    def _on_signal(self) -> None:
        numbers = os.read(self._wakeup, 4096)
        if not os.path.exists(os.path.join(self._options.simulation, "driver.json")):
            # The simulation's directory was removed: nobody can talk to this daemon any more.
            for pid in self._control.servers:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if signal.SIGTERM in numbers and not self._quitting:
            self._begin_quit(None, -1)
        if self._faults.take("server-crash"):
            for pid in self._control.servers:
                os.kill(pid, signal.SIGKILL)
        self._reap()

    def _reap(self) -> None:
        for pid in list(self._control.servers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._on_server_end(self._control.servers[pid], os.waitstatus_to_exitcode(status))

    # Peers

    def _on_connection(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        peer = Peer(connection)
        self._peers[peer.descriptor] = peer
        self._watch(peer.descriptor, lambda: self._on_peer(peer))

    def _on_peer(self, peer: Peer) -> None:
        lines = peer.reader.read()
        if lines is None:
            self._close(peer)
            if peer.connection is None:
                self._begin_quit(None, -1)  # the foreground daemon's stdin ended
            return
        if not peer.hello and lines:
            verb, *words = lines.pop(0).split() or [""]
            if verb == "CLIENT" and len(words) == 2:
                self._on_client(peer, words[0], words[1])
                return
            if verb != "UI":
                self._log.write("Unable to read new connection type information")
                self._close(peer)
                return
            peer.hello = True
            self._log.write("Accepting connection...")
            self._log.write("NEW UI")
        peer.lines += lines

    def _close(self, peer: Peer) -> None:
        self._forget(peer.descriptor)
        self._peers.pop(peer.descriptor, None)
        if peer.hello:
            self._log.write("UI closed")
        if peer.connection is not None:
            peer.connection.close()
        if self._quit_by is peer:
            self._quit_by = None

    def _pump(self, peer: Peer) -> None:
        """Answers the commands of a front-end in order, as far as nothing holds them up."""
        while peer.lines and peer.terminating is None and self._quit_by is not peer:
            line = peer.lines[0].strip()
            name = line.split()[0] if line else ""
            if names_in(self._faults.get("wedge"), name):
                return
            del peer.lines[0]
            if not line:
                self._answer(peer, "")
                continue
            time.sleep(self._faults.number("slow", 0) / 1000)
            self._log.write(f"Cmd:{line}")
            for number in range(self._faults.number("log-flood", 1000)):
                self._log.write(f"flood {number}")
            if name == "terminate_client" and (code := self._faults.get("terminate-fails")) is not None:
                self._answer(peer, code or "1")
                continue
            reply, actions = self._control.execute(line)
            if reply and name.startswith("set_"):
                self._log.write(reply)
            answered_now = True
            for action in actions:
                answered_now = self._act(peer, action) and answered_now
            if answered_now:
                self._answer(peer, reply)

    def _answer(self, peer: Peer, reply: str) -> None:
        payload = (reply + "\n").encode() if reply else b""
        if self._faults.get("drop") is not None:
            self._close(peer)
            return
        if self._faults.get("half-line") is not None:
            payload = payload[: len(payload) // 2]
        try:
            if peer.connection is None:
                os.write(1, payload)
            else:
                peer.connection.sendall(b"%d\n%b" % (len(payload), payload))
        except OSError:
            self._close(peer)

    def _act(self, peer: Peer, action: Action) -> bool:
        """Carries out one effect of a command; False where the reply comes later."""
        verb, target, text = action
        if verb == "start":
            self._start_server(target)
        elif verb == "send":
            send_message(self._channels[target], text)
        elif verb in ("drain", "exit"):
            self._control.servers[target].draining = True
            send_message(self._channels[target], verb)
        elif verb == "terminate":
            peer.terminating = (target, int(text))
            send_message(self._channels[target], f"terminate {text}")
            return False
        elif verb == "quit":
            self._begin_quit(peer, target)
            return False
        return True

    def _begin_quit(self, peer: Peer | None, timeout_s: int) -> None:
        self._quit_by = peer
        self._quitting = True
        if timeout_s >= 0:
            self._quit_at = time.monotonic() + timeout_s
        for waiting in self._waiting:
            waiting.connection.close()
        self._waiting.clear()
        for pid, server in self._control.servers.items():
            server.draining = True
            send_message(self._channels[pid], "drain")

    # Clients

    def _on_client(self, peer: Peer, uid: str, partition: str) -> None:
        self._forget(peer.descriptor)
        del self._peers[peer.descriptor]
        connection = peer.connection
        assert connection is not None
        pid, real_uid = peer_credentials(connection)
        waiting = Waiting(connection, pid, int(uid) if uid.isdigit() else real_uid, partition)
        state = next((server.state for server in self._control.servers.values()), INITIALIZING)
        self._log.write("Accepting connection...")
        self._log.write("User did not send valid credentials")
        self._log.write(
            f"NEW CLIENT {self._show_pid(pid)} from user {waiting.uid}: "
            + ("Server already exists" if state != INITIALIZING else "Server is not ready, push client to pending list")
        )
        if self._quitting:
            connection.close()
            return
        self._waiting.append(waiting)
        self._watch(connection.fileno(), lambda: self._on_waiting_end(waiting))

    def _on_waiting_end(self, waiting: Waiting) -> None:
        """A waiting client has nothing to say: whatever wakes us is its end."""
        self._forget(waiting.connection.fileno())
        self._waiting.remove(waiting)
        waiting.connection.close()

    def _route(self) -> None:
        """Hands waiting clients to the server, starting or replacing it where needed (one at a time, for one UID)."""
        if self._wake_at is not None or names_in(self._faults.get("wedge"), "clients"):
            return
        for waiting in list(self._waiting):
            server = next(iter(self._control.servers.values()), None)
            if server is None:
                self._start_server(0 if self._options.multiuser else waiting.uid)
                return
            if server.state == INITIALIZING:
                return
            if not self._options.multiuser and server.uid != waiting.uid:
                if not server.clients and not server.draining:
                    server.draining = True
                    send_message(self._channels[server.pid], "drain")
                if self._switch("other-uid-blocks") == "yes":
                    return
                continue
            if server.draining and not server.clients:
                return  # the next server takes it
            self._hand_over(waiting, server)

    def _hand_over(self, waiting: Waiting, server: ServerView) -> None:
        self._forget(waiting.connection.fileno())
        self._waiting.remove(waiting)
        if self._options.static and not self._control.partition_exists(waiting.partition):
            send_line(waiting.connection, f"error {NUMBERS['INVALID_RESOURCE_CONFIGURATION']}")
        else:
            self._next_number += 1
            server.clients[self._next_number] = ClientView(waiting.pid, waiting.uid)
            rule = "limited" if self._faults.get("limit-not-enforced") is None else "unlimited"
            text = f"client {self._next_number} {waiting.pid} {rule}"
            send_message(self._channels[server.pid], text, waiting.connection.fileno())
        waiting.connection.close()

    # Servers

    def _start_server(self, uid: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        binary = self._options.server_binary
        with theirs:
            pid = os.posix_spawn(
                binary,
                [binary],
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), CHANNEL_DESCRIPTOR)],
                setsigdef=[signal.SIGIO, signal.SIGCHLD, signal.SIGTERM],
            )
        self._log.write(f"Starting new server {pid} for user {uid}")
        control = self._control
        config = {
            "pipe_directory": self._options.pipe_directory,
            "log_directory": self._options.log_directory,
            "limits": [(device, limit.size_bytes) for device, limit in control.limits.items()],
            "threads": control.threads,
            "init_delay_ms": self._faults.number("server-init-delay", 0),
            "fail": self._faults.get("restart-loop") is not None,
        }
        send_message(ours, json.dumps(config))
        control.servers[pid] = ServerView(pid, uid, dict(control.limits), control.threads)
        self._channels[pid] = ours
        self._watch(ours.fileno(), lambda: self._on_server(pid))

    def _on_server(self, pid: int) -> None:
        server = self._control.servers[pid]
        message = receive_message(self._channels[pid])
        if message is None:
            self._forget(self._channels[pid].fileno())  # SIGCHLD follows
            return
        verb, *words = message[0].split()
        if verb == "ready":
            self._failed_starts = 0
            server.state = ACTIVE
            self._log.write(f"NEW SERVER {pid}: Ready")
        elif verb == "leave":
            server.clients.pop(int(words[0]), None)
        elif verb == "device" and int(words[0]) in server.clients:
            server.clients[int(words[0])].device = words[1]
        elif verb == "state":
            server.state = words[0]
        elif verb == "terminated":
            self._finish_terminate((pid, int(words[0])), words[1])

    def _finish_terminate(self, done: tuple[int, int], code: str) -> None:
        for peer in list(self._peers.values()):
            if peer.terminating == done:
                peer.terminating = None
                self._answer(peer, code)

    def _on_server_end(self, server: ServerView, status: int) -> None:
        del self._control.servers[server.pid]
        channel = self._channels.pop(server.pid)
        self._forget(channel.fileno())
        channel.close()
        if status != 0 and not server.draining:
            self._log.write("Server encountered a fatal exception. Shutting down")
        self._log.write(f"Server {server.pid} exited with status {status if status >= 0 else 1}")
        for peer in list(self._peers.values()):
            if peer.terminating is not None and peer.terminating[0] == server.pid:
                self._finish_terminate(peer.terminating, self._switch("bad-client-code"))
        if self._quitting and status != 0:
            self._status = 1
        if server.state != INITIALIZING or status == 0:
            return
        attempts = int(self._switch("server-start-attempts"))
        if self._faults.get("restart-loop") is None:
            self._failed_starts += 1
        if attempts and self._failed_starts >= attempts:
            self._failed_starts = 0
            for waiting in list(self._waiting):
                send_line(waiting.connection, f"error {NUMBERS['MPS_SERVER_NOT_READY']}")
                self._on_waiting_end(waiting)
            return
        self._wake_at = time.monotonic() + _RESTART_PAUSE_S


def _command_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
