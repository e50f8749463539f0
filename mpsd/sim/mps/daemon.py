"""What the emulated control daemons of both protocols share: front-ends, clients, servers and signals.

It is blocked in poll while nothing happens. `daemon2` and `daemon3` add what their protocol means. Over 400 lines: one
object owns all that a daemon's connections and processes change.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Mapping

from mpsd.common.socketpath import MAX_SOCKET_PATH_BYTES
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.mps.faults import Faults
from mpsd.sim.mps.logs import Log
from mpsd.sim.mps.loop import Loop, unlink
from mpsd.sim.mps.options import Options, StartError
from mpsd.sim.mps.peers import Peer, Target, Waiting
from mpsd.sim.mps.views import ACTIVE, INITIALIZING, ClientView, DeviceView, Limit, ServerView, Settings
from mpsd.sim.mps.watch import watch_simulation
from mpsd.sim.pinnedlimits import parse_command_value, visible_devices
from mpsd.sim.switches import AUTO, binary_version, major, read_switch
from mpsd.sim.wire import (
    CHANNEL_DESCRIPTOR,
    WORD_END,
    peer_credentials,
    receive_message,
    send_line,
    send_message,
)

RESTART_PAUSE_S = 0.05


class Daemon:
    """The control daemon of one pipe directory. What differs between the protocols is below 'Of the protocol'."""

    protocol: int
    terminate_command: str
    """Name of the command that ends a client's use of MPS."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._faults = Faults(options.simulation, options.pipe_directory)
        self._driver = SimulatedDriver(options.simulation)
        self._settings = self._read_settings()
        self._loop = Loop()
        self._peers: dict[int, Peer] = {}
        self._waiting: list[Waiting] = []
        self._servers: dict[int, ServerView] = {}
        """Running servers, and those that are ending, by PID."""
        self._channels: dict[int, socket.socket] = {}
        self._next_number = 0
        self._wake_at: float | None = None
        self._quit_by: Peer | None = None
        self._quitting = False
        self._quit_at: float | None = None
        self._status = 0

    def _switch(self, name: str) -> str:
        return read_switch(self._options.simulation, name)

    def _read_settings(self) -> Settings:
        try:
            version, gpus = self._driver.version(), {gpu.uuid: gpu for gpu in self._driver.gpus()}
        except FileNotFoundError as error:
            raise StartError(str(error)) from error
        display = self._switch("limit-display")
        self._version = version
        visible = visible_devices(list(gpus), os.environ.get("CUDA_VISIBLE_DEVICES"))
        return Settings(
            devices=[DeviceView(uuid, gpus[uuid].name, gpus[uuid].pci_bus_id) for uuid in visible],
            switch=self._switch,
            floor_g=major(version) >= 595 if display == AUTO else display == "floor-g",
            command_of=_command_of,
            show_pid=lambda pid: 0 if self._faults.get("pid-zero") is not None else pid,
            apply_limit=self._apply_limit,
        )

    def _apply_limit(self, limit: Limit) -> Limit | None:
        text = self._faults.get("limit-not-applied")
        if text is None:
            return limit
        size_bytes = parse_command_value(text)
        return None if size_bytes is None else Limit(size_bytes, text)

    # Of the protocol

    def _prepare(self) -> None:
        """Before anything is made. Raises StartError."""

    def _refuse_long_path(self) -> StartError:
        """How a start fails whose socket path does not fit."""
        raise NotImplementedError

    def _has_pid_file(self) -> bool:
        """Whether its PID is written into the pipe directory."""
        return True

    def _opened(self) -> None:
        """After the main socket is there: what else there is to make, and to log."""
        raise NotImplementedError

    def _name_of(self, line: str) -> str:
        """What faults call a command."""
        raise NotImplementedError

    def _execute(self, peer: Peer, line: str) -> None:
        """Carries out a command, and answers it now or later."""
        raise NotImplementedError

    def _terminated(self, peer: Peer, code: str) -> None:
        """Answers the command that waited for a client's end. `code`: CUresult, empty where the server ended."""
        raise NotImplementedError

    def _is_up(self, target: Target) -> bool:
        """Whether a server runs for clients of this target."""
        raise NotImplementedError

    def _route(self) -> None:
        """Gives waiting clients to their servers as far as these can take them; starts what must be started."""
        raise NotImplementedError

    def _server_ready(self, server: ServerView) -> None:
        """After a server's process said that it is up."""
        raise NotImplementedError

    def _server_ended(self, server: ServerView, failed: bool) -> None:
        """After a server's process ended. `failed`: before it was ready."""
        raise NotImplementedError

    def _on_evict(self, server: ServerView, number: int, uuid: str) -> None:
        """A client of a server found no memory on a GPU, though it is within what it is guaranteed there."""

    def _on_faults(self) -> None:
        """Looks for faults that only this protocol has, after a change."""

    def _cleaned(self) -> None:
        """After the daemon's sockets were removed at its end."""

    # Start

    def start(self) -> None:
        """Binds and listens. Raises StartError."""
        pipe = self._options.pipe_directory
        path = os.path.join(pipe, "control")
        refusal = self._faults.get("refuse-start")
        if refusal is not None:
            raise StartError(refusal)
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise self._refuse_long_path()
        self._prepare()
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
        if os.path.lexists(path) and self._switch("stale-socket") == "refuse":
            self._log.write(f"Failed to bind socket {path}")
            raise StartError("")
        self._listen(path, ("", ""))
        if self._has_pid_file():
            with open(self._pid_file, "w", encoding="ascii") as file:
                file.write(str(os.getpid()) + ("\n" if self._switch("pid-file-newline") == "yes" else ""))
        self._log.write(f"Starting control daemon using socket {path}")
        self._opened()
        self._log.write(f"CUDA MPS Control binary version: {binary_version(self._options.simulation, self._version)}")

    @property
    def _pid_file(self) -> str:
        return os.path.join(self._options.pipe_directory, "nvidia-cuda-mps-control.pid")

    def _listen(self, path: str, target: Target) -> None:
        """Makes a socket for front-ends and clients of one target."""
        self._loop.listen(path, lambda connection: self._on_connection(connection, target))

    def _open_log_pipe(self, path: str) -> None:
        self._loop.open_fifo(path, self._log.write)

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
        self._loop.watch(self._wakeup, self._on_signal)
        stdin = self._switch("foreground-stdin")
        if self._options.foreground and (stdin == "commands" or (stdin == AUTO and self.protocol == 3)):
            self._peers[0] = Peer(None, os.getuid())
            self._loop.watch(0, lambda: self._on_peer(self._peers[0]))
        while not (self._quitting and not self._servers and not self._hung_quit()):
            self._loop.turn(self._timeout_ms())
            self._on_time()
            for peer in list(self._peers.values()):
                self._pump(peer)
            self._route()
        self._loop.remove_below(self._options.pipe_directory)
        unlink(self._pid_file)
        self._cleaned()
        if self._quit_by is not None and self._quit_by.connection is not None:
            send_line(self._quit_by.connection, f"exit {self._status}")
        return self._status

    def _timeout_ms(self) -> float | None:
        times = [at for at in (self._wake_at, self._quit_at) if at is not None]
        return max(0.0, min(times) - time.monotonic()) * 1000 + 1 if times else None

    def _on_time(self) -> None:
        now = time.monotonic()
        if self._wake_at is not None and now >= self._wake_at:
            self._wake_at = None
        if self._quit_at is not None and now >= self._quit_at and not self._hung_quit():
            self._quit_at = None
            for pid in self._servers:
                self._status = 1
                os.kill(pid, signal.SIGKILL)

    def _hung_quit(self) -> bool:
        return self._faults.get("hung-quit") is not None

    def _on_signal(self) -> None:
        numbers = os.read(self._wakeup, 4096)
        if not os.path.exists(os.path.join(self._options.simulation, "driver.json")):
            # The simulation's directory was removed: nobody can talk to this daemon any more.
            for pid in self._servers:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if signal.SIGTERM in numbers and not self._quitting:
            self._begin_quit(None)
        if self._faults.take("server-crash") is not None:
            for pid in self._servers:
                os.kill(pid, signal.SIGKILL)
        if self._faults.take("fault-state") is not None:
            for channel in self._channels.values():
                send_message(channel, "fault")
        self._on_faults()
        self._reap()

    def _reap(self) -> None:
        for pid in list(self._servers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._on_server_end(self._servers[pid], os.waitstatus_to_exitcode(status))

    # Peers

    def _on_connection(self, connection: socket.socket, target: Target) -> None:
        peer = Peer(connection, peer_credentials(connection)[1], target)
        self._peers[peer.descriptor] = peer
        self._loop.watch(peer.descriptor, lambda: self._on_peer(peer))

    def _on_peer(self, peer: Peer) -> None:
        lines = peer.reader.read()
        if lines is None:
            self._close(peer)
            if peer.connection is None:
                self._begin_quit(None)  # the foreground daemon's stdin ended
            return
        connection = peer.connection
        if not peer.hello and lines and connection is not None:
            verb, *words = lines.pop(0).split() or [""]
            if verb == "CLIENT" and len(words) == 1:
                self._on_client(peer, words[0])
                return
            if verb != "UI":
                self._log.write("Unable to read new connection type information")
                self._close(peer)
                return
            peer.hello = True
            send_line(connection, str(self.protocol))
            self._log.write("Accepting connection...")
            self._log.write("NEW UI")
        peer.lines += lines

    def _close(self, peer: Peer) -> None:
        self._loop.forget(peer.descriptor)
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
            name = self._name_of(line)
            hangs = name == self.terminate_command and self._faults.get("terminate-hangs") is not None
            if hangs or self._faults.names("wedge", name):
                return
            del peer.lines[0]
            if not line:
                self._answer(peer, "")
                continue
            time.sleep(self._faults.number("slow", 0) / 1000)
            self._log.write(f"Cmd:{line.replace(WORD_END, ' ')}")
            for number in range(self._faults.number("log-flood", 1000)):
                self._log.write(f"flood {number}")
            self._execute(peer, line)

    def _answer(self, peer: Peer, reply: str, status: int = 0) -> None:
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
                peer.connection.sendall(b"%d %d\n%b" % (status, len(payload), payload))
        except OSError:
            self._close(peer)

    def _await_terminate(self, peer: Peer, server_pid: int, client_pid: str) -> None:
        """Has a client's use of MPS ended; the answer follows through `_terminated`."""
        peer.terminating = (server_pid, int(client_pid))
        send_message(self._channels[server_pid], f"terminate {client_pid}")

    def _end_server(self, server: ServerView, verb: str) -> None:
        """Ends a server: `drain` when its clients left, `exit` now."""
        server.draining = True
        send_message(self._channels[server.pid], verb)

    def _begin_quit(self, peer: Peer | None, timeout_s: int = -1, verb: str = "drain") -> None:
        """Ends servers, then the daemon. With a time: by force after it. `peer` is answered at the end."""
        self._quit_by = peer
        self._quitting = True
        if timeout_s >= 0:
            self._quit_at = time.monotonic() + timeout_s
        for waiting in self._waiting:
            self._loop.forget(waiting.connection.fileno())
            waiting.connection.close()
        self._waiting.clear()
        for server in self._servers.values():
            self._end_server(server, verb)

    # Clients

    def _on_client(self, peer: Peer, uid: str) -> None:
        self._loop.forget(peer.descriptor)
        del self._peers[peer.descriptor]
        connection = peer.connection
        assert connection is not None
        pid, real_uid = peer_credentials(connection)
        waiting = Waiting(connection, pid, int(uid) if uid.isdigit() else real_uid, peer.target)
        self._log.write("Accepting connection...")
        self._log.write("User did not send valid credentials")
        up = self._is_up(peer.target)
        state = "Server already exists" if up else "Server is not ready, push client to pending list"
        self._log.write(f"NEW CLIENT {self._settings.show_pid(pid)} from user {waiting.uid}: {state}")
        if self._quitting:
            connection.close()
            return
        self._waiting.append(waiting)
        self._loop.watch(connection.fileno(), lambda: self._dismiss(waiting))

    def _dismiss(self, waiting: Waiting, answer: str = "") -> None:
        """Ends the wait of a client. It has nothing to say meanwhile: whatever it sends is its own end."""
        if answer:
            send_line(waiting.connection, answer)
        self._unqueue(waiting)
        waiting.connection.close()

    def _unqueue(self, waiting: Waiting) -> None:
        self._loop.forget(waiting.connection.fileno())
        self._waiting.remove(waiting)

    def _number(self) -> int:
        """What a client that was taken is called."""
        self._next_number += 1
        return self._next_number

    def _hand_over(self, waiting: Waiting, server: ServerView, terms: str, namespace: str = "") -> None:
        """Gives a client to a server, which holds it to these terms: see `wire`."""
        number = self._number()
        server.clients[number] = ClientView(waiting.pid, waiting.uid, namespace)
        if self._faults.get("limit-not-enforced") is not None:
            terms = "unlimited"
        text = f"client {number} {waiting.pid} {terms}"
        send_message(self._channels[server.pid], text, waiting.connection.fileno())
        self._dismiss(waiting)

    # Servers

    def _spawn(self, uid: int, config: Mapping[str, object]) -> int:
        """Starts a server's process; its PID, which the caller puts into `_servers`."""
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
        faults = {
            "init_delay_ms": self._faults.number("server-init-delay", 0),
            "fail": self._restart_loop,
        }
        send_message(ours, json.dumps({"protocol": self.protocol, **config, **faults}))
        self._channels[pid] = ours
        self._loop.watch(ours.fileno(), lambda: self._on_server(pid))
        return pid

    def _on_server(self, pid: int) -> None:
        server = self._servers[pid]
        message = receive_message(self._channels[pid])
        if message is None:
            self._loop.forget(self._channels[pid].fileno())  # SIGCHLD follows
            return
        verb, *words = message[0].split()
        if verb == "ready":
            server.state = ACTIVE
            self._log.write(f"NEW SERVER {pid}: Ready")
            self._server_ready(server)
        elif verb == "failed":
            server.error = int(words[0])
        elif verb == "leave":
            server.clients.pop(int(words[0]), None)
        elif verb == "device" and int(words[0]) in server.clients:
            server.clients[int(words[0])].device = words[1]
        elif verb == "state":
            server.state = words[0]
        elif verb == "terminated":
            self._finish_terminate((pid, int(words[0])), words[1])
        elif verb == "evict" and int(words[0]) in server.clients:
            self._on_evict(server, int(words[0]), words[1])

    def _finish_terminate(self, done: tuple[int, int], code: str) -> None:
        for peer in list(self._peers.values()):
            if peer.terminating == done:
                peer.terminating = None
                self._terminated(peer, code)

    def _on_server_end(self, server: ServerView, status: int) -> None:
        del self._servers[server.pid]
        channel = self._channels.pop(server.pid)
        self._loop.forget(channel.fileno())
        channel.close()
        if status != 0 and not server.draining:
            self._log.write("Server encountered a fatal exception. Shutting down")
        self._log.write(f"Server {server.pid} exited with status {status if status >= 0 else 1}")
        for peer in list(self._peers.values()):
            if peer.terminating is not None and peer.terminating[0] == server.pid:
                self._finish_terminate(peer.terminating, "")
        if self._quitting and status != 0:
            self._status = 1
        self._server_ended(server, status != 0 and server.state == INITIALIZING)

    def _gives_up(self, failed_starts: int) -> bool:
        """Whether clients that wait for a server are turned away after so many failed starts."""
        attempts = int(self._switch("server-start-attempts"))
        return bool(attempts) and failed_starts >= attempts

    @property
    def _restart_loop(self) -> bool:
        """Whether starts fail by a fault that goes on and on; those are not counted."""
        return self._faults.get("restart-loop") is not None


def _command_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
