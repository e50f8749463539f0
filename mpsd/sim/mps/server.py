"""The emulated `nvidia-cuda-mps-server`: holds the GPU contexts, serves clients that the control daemon hands over."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time

from mpsd.sim.cudaerrors import NUMBERS, CudaError
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.files import set_process_name
from mpsd.sim.model import SERVER
from mpsd.sim.mps.faults import Faults
from mpsd.sim.mps.logs import Log
from mpsd.sim.mps.watch import watch_simulation
from mpsd.sim.pinnedlimits import server_limits, visible_devices
from mpsd.sim.switches import binary_version, major, read_switch
from mpsd.sim.wire import CHANNEL_DESCRIPTOR, LineReader, receive_message, send_line, send_message


class Client:
    """One connected client."""

    __slots__ = ("busy", "connection", "number", "pid", "reader")

    def __init__(self, number: int, pid: int, connection: socket.socket) -> None:
        self.number = number
        self.pid = pid
        self.connection = connection
        self.reader = LineReader(connection.fileno())
        self.busy = False


class Server:
    """The event loop of one server."""

    def __init__(self, simulation: str, channel: socket.socket, config: dict[str, object]) -> None:
        self._simulation = simulation
        self._driver = SimulatedDriver(simulation)
        self._channel = channel
        self._log = Log(str(config["log_directory"]), "server.log", "Server")
        self._config = config
        self._threads = float(str(config["threads"]))
        self._limits: list[tuple[str, int]] = [(str(d), int(b)) for d, b in config["limits"]]  # type: ignore[attr-defined]
        self._devices: list[str] = []
        self._clients: dict[int, Client] = {}
        self._fault = False
        self._wedged = False
        self._draining = False
        self._daemon_gone = False
        self._poll = select.poll()

    def start(self) -> None:
        """Takes the GPUs and reports READY. Raises CudaError where it may not have them."""
        pipe_directory = str(self._config["pipe_directory"])
        self._log.write("Startup")
        self._log.write(f"Connecting to control daemon on socket: {pipe_directory}/control")
        self._log.write("Initializing server process")
        if self._config["fail"]:
            raise CudaError("INVALID_VALUE")
        gpus = self._driver.gpus()
        names = {gpu.uuid: gpu.name for gpu in gpus}
        visible = visible_devices([gpu.uuid for gpu in gpus], os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._devices = self._allowed(visible)
        if not self._devices:
            raise CudaError("NO_DEVICE")
        overhead_bytes = int(read_switch(self._simulation, "server-context-bytes"))
        for ordinal, uuid in enumerate(self._devices):
            self._driver.open_context(uuid, os.getpid(), SERVER, overhead_bytes)
            self._log.write(f"Creating server context on device {ordinal} ({names[uuid]})")
        version = self._driver.version()
        self._log.write(
            "CUDA MPS Server for Linux/Unix. "
            f"Binary version: {binary_version(self._simulation, version)} | Display Driver version: {major(version)}"
        )
        self._log.write(f"Active Threads Percentage set to {self._threads:.1f}")
        for uuid, limit_bytes in server_limits(self._limits, self._devices).items():
            self._log_limit(uuid, limit_bytes)
        self._log.write("Server Priority set to 0")
        self._take_time(Faults(self._simulation, pipe_directory))
        self._log.write("Server has started")
        self._report("ready")

    def _take_time(self, faults: Faults) -> None:
        deadline_s = time.monotonic() + int(str(self._config["init_delay_ms"])) / 1000
        while (left_s := deadline_s - time.monotonic()) > 0 and faults.get("server-init-delay") is not None:
            time.sleep(min(left_s, 0.01))

    def _allowed(self, visible: list[str]) -> list[str]:
        """What `allowed-devices` of protocol 3 leaves of the visible devices."""
        spec = str(self._config.get("devices") or "")
        if not spec:
            return visible
        allowed = visible_devices(visible, spec)
        whole = len(allowed) == len(spec.split(","))
        return allowed if whole or read_switch(self._simulation, "bad-allowed-device") == "cut" else []

    def fail(self, error: CudaError) -> None:
        """Says why the start failed, in the log and to the daemon."""
        self._report(f"failed {error.code}")
        self._log.write(f"Failed to start : {error}")
        self._log.write("MPS server failed to start")

    def serve(self) -> int:
        """Runs until told to end; the exit status."""
        wakeup = watch_simulation((self._simulation,))
        self._poll.register(self._channel, select.POLLIN)
        self._poll.register(wakeup, select.POLLIN)
        while os.path.exists(os.path.join(self._simulation, "driver.json")):
            for descriptor, _ in self._poll.poll():
                if descriptor == wakeup:
                    os.read(wakeup, 4096)
                elif descriptor == self._channel.fileno():
                    if not self._on_channel():
                        return 0
                elif descriptor in self._clients:
                    self._on_client(self._clients[descriptor])
            if self._draining and not self._clients:
                return 0
            if self._daemon_gone and not self._clients and self._after_daemon() == "until-clients-leave":
                return 0
        return 0  # the simulation is gone, and with it all that could end this process

    def _after_daemon(self) -> str:
        return read_switch(self._simulation, "server-after-daemon-death")

    def _report(self, text: str) -> None:
        send_message(self._channel, text)

    def _log_limit(self, uuid: str, limit_bytes: int) -> None:
        self._log.write(
            f"Device pinned memory limit for device {self._devices.index(uuid)} set to {limit_bytes:#x} bytes"
        )

    def _on_channel(self) -> bool:
        """One message of the daemon; False ends the server."""
        message = receive_message(self._channel)
        if message is None:
            self._daemon_gone = True
            self._poll.unregister(self._channel)
            return self._after_daemon() != "exit"
        text, descriptor = message
        verb, *words = text.split()
        if verb == "client" and descriptor is not None:
            self._connect(int(words[0]), int(words[1]), words[2:], socket.socket(fileno=descriptor))
        elif verb == "limit":
            self._limits = [entry for entry in self._limits if entry[0] != words[0]]
            self._limits.append((words[0], int(words[1])))
            for uuid, limit_bytes in server_limits(self._limits[-1:], self._devices).items():
                self._log_limit(uuid, limit_bytes)
        elif verb == "threads":
            self._threads = float(words[0])
            self._log.write(f"Active Threads Percentage set to {self._threads:.1f}")
        elif verb == "terminate":
            self._terminate(int(words[0]))
        elif verb == "evicted":
            for client in [c for c in self._clients.values() if c.number == int(words[0])]:
                send_line(client.connection, words[1])
        elif verb == "fault":
            self._on_fault()
        elif verb == "drain":
            self._draining = True
        elif verb == "exit":
            return False
        return True

    def _terms(self, terms: list[str]) -> dict[str, object]:
        """What a client is told of its limits."""
        limits, threads = server_limits(self._limits, self._devices), self._threads
        if terms[0] == "limits":
            limits = {} if terms[1] == "-" else dict.fromkeys(self._devices, int(terms[1]))
            threads = float(terms[2])
        return {"limits": {} if terms[0] == "unlimited" else limits, "threads": threads}

    def _connect(self, number: int, pid: int, terms: list[str], connection: socket.socket) -> None:
        connection.setblocking(False)
        name = f"{{PID: {pid}, Context ID: 0}}"
        self._log.write(f"Received new client request for {name}")
        if self._wedged:
            client = Client(number, pid, connection)  # never answered: its CUDA init hangs
        elif self._fault:
            self._refuse(number, connection, "MPS_SERVER_NOT_READY")
            return
        elif len(self._clients) >= int(read_switch(self._simulation, "max-clients")):
            self._log.write(f"Client {name} refused: too many clients")
            self._refuse(number, connection, "MPS_MAX_CLIENTS_REACHED")
            return
        else:
            client = Client(number, pid, connection)
            facts = {"protocol": self._config["protocol"], "server": os.getpid(), "devices": self._devices}
            send_line(connection, "ok " + json.dumps({**facts, **self._terms(terms)}))
            self._log.write(f"Client {name} connected")
            self._log.write(f"Creating worker thread for client {name}")
        self._clients[connection.fileno()] = client
        self._poll.register(connection, select.POLLIN)

    def _refuse(self, number: int, connection: socket.socket, error: str) -> None:
        send_line(connection, f"error {NUMBERS[error]}")
        connection.close()
        self._report(f"leave {number}")

    def _on_client(self, client: Client) -> None:
        lines = client.reader.read()
        if lines is None:
            self._disconnect(client)
            return
        for line in lines:
            verb, *words = line.split()
            if verb == "context":
                self._report(f"device {client.number} {words[0]}")
                self._log.write(f"Volta MPS: status of client {{{client.pid}, 1}} is ACTIVE")
            elif verb == "busy":
                client.busy = True
            elif verb == "fault":
                self._on_fault()
            elif verb == "evict" and self._daemon_gone:
                send_line(client.connection, "no-victim")
            elif verb == "evict":
                self._report(f"evict {client.number} {words[0]}")

    def _on_fault(self) -> None:
        self._fault = True
        self._log.write("Volta MPS: Server is handling a fatal GPU error.")
        self._log.write("Volta MPS: The following devices")
        for ordinal in range(len(self._devices)):
            self._log.write(str(ordinal))
        self._log.write("Volta MPS: The following clients have a sticky error set:")
        for other in self._clients.values():
            self._log.write(str(other.pid))
            send_line(other.connection, f"error {NUMBERS['LAUNCH_FAILED']}")
        self._report("state FAULT")
        self._recover()

    def _terminate(self, pid: int) -> None:
        """Destroys a client's contexts, not its process."""
        for client in [c for c in self._clients.values() if c.pid == pid]:
            for uuid in self._devices:
                self._driver.release(uuid, pid)
            client.busy = False
            send_line(client.connection, f"error {NUMBERS['MPS_CLIENT_TERMINATED']}")
            self._disconnect(client)
        self._report(f"terminated {pid} 0")

    def _disconnect(self, client: Client) -> None:
        self._poll.unregister(client.connection)
        del self._clients[client.connection.fileno()]
        client.connection.close()
        self._log.write("Receive command failed, assuming client exit")
        self._log.write("Client process disconnected")
        self._report(f"leave {client.number}")
        if client.busy and major(self._driver.version()) < int(read_switch(self._simulation, "fix-driver")):
            # Killed with work in flight: peers fault, and whoever comes later hangs while the status says ACTIVE.
            self._wedged = True
            for other in self._clients.values():
                send_line(other.connection, f"error {NUMBERS['ILLEGAL_ADDRESS']}")
        self._recover()

    def _recover(self) -> None:
        """Leaves FAULT when the clients that saw it are gone."""
        if self._fault and not self._clients:
            self._fault = False
            for ordinal in range(len(self._devices)):
                self._log.write(f"Volta MPS: Destroy server context on device {ordinal}")
                self._log.write(f"Volta MPS: Creating server context on device {ordinal}")
            self._report("state ACTIVE")


def main(simulation: str) -> int:
    """Entry of the server's launcher; only the control daemon runs it, with its channel as descriptor 3."""
    set_process_name("nvidia-cuda-mps-server")
    try:
        channel = socket.socket(fileno=CHANNEL_DESCRIPTOR)
    except OSError:
        sys.stderr.write("cannot start an MPS server by hand: start nvidia-cuda-mps-control -d\n")
        return 1
    os.set_inheritable(CHANNEL_DESCRIPTOR, False)
    message = receive_message(channel)
    if message is None:
        return 1
    server = Server(simulation, channel, json.loads(message[0]))
    try:
        server.start()
    except (CudaError, FileNotFoundError) as error:
        server.fail(error if isinstance(error, CudaError) else CudaError("NO_DEVICE"))
        return 1
    return server.serve()
