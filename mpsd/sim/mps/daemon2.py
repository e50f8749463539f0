"""The emulated control daemon of protocol 2: one socket, at most one server, for one user at a time."""

from __future__ import annotations

import os
import time

from mpsd.sim.cudaerrors import NUMBERS
from mpsd.sim.mps.control2 import Action, Control2, Server2
from mpsd.sim.mps.daemon import RESTART_PAUSE_S, Daemon
from mpsd.sim.mps.options import Options, StartError
from mpsd.sim.mps.peers import Peer, Target
from mpsd.sim.mps.views import INITIALIZING, Limit, ServerView
from mpsd.sim.pinnedlimits import parse_environment
from mpsd.sim.wire import send_message


class Daemon2(Daemon):
    """See Daemon."""

    protocol = 2
    terminate_command = "terminate_client"

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._control = Control2(self._settings)
        self._failed_starts = 0

    def _refuse_long_path(self) -> StartError:
        return StartError("", int(self._switch("overlong-start-status")))

    def _opened(self) -> None:
        pipe = self._options.pipe_directory
        self._open_log_pipe(os.path.join(pipe, "log"))
        for device, size_bytes in parse_environment(os.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "")):
            if size_bytes is not None:
                self._control.set_default_limit(device, Limit(size_bytes, f"{size_bytes // (1024 * 1024)}M"))
        threads = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        if threads:
            self._control.execute(f"set_default_active_thread_percentage {threads}")
        self._log.write(f"To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY={pipe}")

    # Commands

    def _name_of(self, line: str) -> str:
        return line.split(maxsplit=1)[0] if line else ""

    def _execute(self, peer: Peer, line: str) -> None:
        name = self._name_of(line)
        if name == self.terminate_command and (code := self._faults.get("terminate-fails")) is not None:
            self._answer(peer, code or "1")
            return
        reply, actions = self._control.execute(line)
        if reply and name.startswith("set_"):
            self._log.write(reply)
        answered_now = True
        for action in actions:
            answered_now = self._act(peer, action) and answered_now
        if answered_now:
            self._answer(peer, reply)

    def _act(self, peer: Peer, action: Action) -> bool:
        """Carries out one effect of a command; False where the reply comes later."""
        verb, target, text = action
        if verb == "start":
            self._start_server(target)
        elif verb == "send":
            send_message(self._channels[target], text)
        elif verb in ("drain", "exit"):
            self._end_server(self._servers[target], verb)
        elif verb == "terminate":
            self._await_terminate(peer, target, text)
            return False
        elif verb == "quit":
            self._begin_quit(peer, target)
            return False
        return True

    def _terminated(self, peer: Peer, code: str) -> None:
        self._answer(peer, code or self._switch("bad-client-code"))

    # Clients and servers

    def _is_up(self, target: Target) -> bool:
        return any(server.state != INITIALIZING for server in self._control.servers.values())

    def _route(self) -> None:
        if self._wake_at is not None or self._faults.names("wedge", "clients"):
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
                    self._end_server(server, "drain")
                if self._switch("other-uid-blocks") == "yes":
                    return
                continue
            if server.draining and not server.clients:
                return  # the next server takes it
            self._hand_over(waiting, server, "server")

    def _start_server(self, uid: int) -> None:
        control = self._control
        config = {
            "pipe_directory": self._options.pipe_directory,
            "log_directory": self._options.log_directory,
            "limits": [(device, limit.size_bytes) for device, limit in control.limits.items()],
            "threads": control.threads,
        }
        pid = self._spawn(uid, config)
        self._servers[pid] = control.servers[pid] = Server2(pid, uid, dict(control.limits), control.threads)

    def _server_ready(self, server: ServerView) -> None:
        self._failed_starts = 0

    def _server_ended(self, server: ServerView, failed: bool) -> None:
        del self._control.servers[server.pid]
        if not failed:
            return
        self._failed_starts += not self._restart_loop
        if self._gives_up(self._failed_starts):
            self._failed_starts = 0
            for waiting in list(self._waiting):
                self._dismiss(waiting, f"error {NUMBERS['MPS_SERVER_NOT_READY']}")
        else:
            self._wake_at = time.monotonic() + RESTART_PAUSE_S
