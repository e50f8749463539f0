"""The front-end of the emulated `nvidia-cuda-mps-control`, and the entry of its launcher. Imports stay tiny.

Which protocol a call speaks: the running daemon's; where none runs, or one is started, CUDA_MPS_PROTOCOL_VERSION, then
`-p`, then 2 ('MPS v3 Interface' r615). What is special to protocol 3 is in `frontend3`.
"""

from __future__ import annotations

import _socket as socket
import os
import select
import sys
from io import BufferedReader

from mpsd.sim.files import set_process_name
from mpsd.sim.mps.switches import read_switch
from mpsd.sim.mps.wire import peer_credentials, pipe_directory

USAGE = """usage: nvidia-cuda-mps-control [-d | -f] [-S] [-multiuser-server | -M] [-v] [-h]
  -d  start the control daemon in the background
  -f  start the control daemon in the foreground
  -S, --static-partitioning  static SM partitions
  -multiuser-server, -M      one server for all users
  -v  print the version
Without a flag: read commands from stdin."""

FIRST_DRIVER_3 = 615
"""Major version of the first driver with protocol 3."""

_MULTIUSER = ("-multiuser-server", "--multiuser-server", "-M")
_STATIC = ("-S", "--static-partitioning")
_FLAGS = ("-d", "-f", "-v", "-h", "--help", *_STATIC, *_MULTIUSER)
_PROTOCOL = ("-p", "--protocol")


def main(simulation: str, arguments: list[str]) -> int:
    """Runs as nvidia-cuda-mps-control with these arguments in a simulation directory; the exit status."""
    set_process_name("nvidia-cuda-mps-control")
    asked = os.environ.get("CUDA_MPS_PROTOCOL_VERSION")
    if any(argument.startswith(_PROTOCOL) for argument in arguments) and knows_protocol_3(simulation):
        flag, arguments = _take_protocol(arguments)
        asked = asked or flag
        if asked not in ("2", "3"):
            say(simulation, f"Invalid protocol version: {asked}")
            return 1
    if not arguments or not arguments[0].startswith("-") or arguments[0] in ("-q", "--quit"):
        daemon = Connection.open(asked == "3")
        if daemon is not None:
            with daemon:
                return _talk(simulation, daemon, arguments)
    if asked == "3" and knows_protocol_3(simulation):
        from mpsd.sim.mps.frontend3 import without_daemon

        return without_daemon(simulation, arguments)
    if asked == "3" and read_switch(simulation, "old-binary-protocol") == "refuse":
        say(simulation, "Unsupported protocol version: 3")
        return 1
    return _without_daemon(simulation, arguments)


def knows_protocol_3(simulation: str) -> bool:
    """Whether the binary of this driver does. Looked up only where somebody asks for it: that costs milliseconds."""
    from mpsd.sim.driver import SimulatedDriver
    from mpsd.sim.mps.switches import major

    try:
        return major(SimulatedDriver(simulation).version()) >= FIRST_DRIVER_3
    except FileNotFoundError:
        return False


def _take_protocol(arguments: list[str]) -> tuple[str, list[str]]:
    """The value of `-p 3`, `--protocol 3` or `--protocol=3`, and the arguments without it."""
    rest, value = [], ""
    words = iter(arguments)
    for word in words:
        if word in _PROTOCOL:
            value = next(words, "")
        elif word.startswith("--protocol="):
            value = word.partition("=")[2]
        else:
            rest.append(word)
    return value, rest


def say(simulation: str, text: str) -> None:
    """Prints an error where this simulation prints them."""
    if text:
        stream = sys.stdout if read_switch(simulation, "error-stream") == "stdout" else sys.stderr
        stream.write(text + "\n")
        stream.flush()


class Connection:
    """A front-end's connection to the daemon of this pipe directory; `protocol` is the daemon's."""

    def __init__(self, connection: socket.socket, replies: BufferedReader, protocol: int) -> None:
        self._connection = connection
        self._replies = replies
        self.protocol = protocol
        self.ended = False
        """The daemon has broken off, or quit."""

    @classmethod
    def open(cls, asks_for_3: bool) -> Connection | None:
        """Connects; None where no daemon answers."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(os.path.join(pipe_directory(3 if asks_for_3 else 2), "control"))
            connection.sendall(b"UI\n")
            replies = open(connection.fileno(), "rb", closefd=False)  # noqa: SIM115 - closed with the connection
            return cls(connection, replies, int(replies.readline()))
        except (OSError, ValueError):
            connection.close()
            return None

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self._replies.close()
        self._connection.close()

    def exchange(self, command: bytes) -> tuple[int, bytes]:
        """One command: exit status and reply. After `ended` there is none any more."""
        quits = command.split()[:1] == [b"quit"]
        daemon = self._open_daemon() if quits else None
        try:
            self._connection.sendall(command + b"\n")
            header = self._replies.readline().split()
            if len(header) == 2 and header[0] != b"exit":
                return int(header[0]), self._replies.read(int(header[1]))
        except OSError:
            header = []
        self.ended = True
        if not header:
            return 1, b""
        if daemon is not None:
            select.select([daemon], [], [])  # quit returns when the daemon's process is gone
        return int(header[1]), b""

    def _open_daemon(self) -> int | None:
        try:
            return os.pidfd_open(peer_credentials(self._connection)[0])
        except OSError:
            return None


def _talk(simulation: str, daemon: Connection, arguments: list[str]) -> int:
    if daemon.protocol == 3:
        from mpsd.sim.mps.frontend3 import talk

        return talk(simulation, daemon, arguments)
    if not arguments:
        return _pass_on(daemon, [])
    if read_switch(simulation, "argv-commands") == "yes":
        return _pass_on(daemon, [" ".join(arguments).encode()])
    return _refuse_flag(simulation, arguments[0])


def _pass_on(daemon: Connection, lines: list[bytes]) -> int:
    """Sends commands, of stdin without `lines`; prints replies. 0: talked to the daemon, whatever it said."""
    for line in lines or sys.stdin.buffer:
        command = line.strip()
        if not command:
            continue
        status, reply = daemon.exchange(command)
        if daemon.ended:
            return status
        sys.stdout.buffer.write(reply)
        sys.stdout.buffer.flush()
    return 0


def _refuse_flag(simulation: str, flag: str) -> int:
    sys.stderr.write(f"Unknown option: {flag}\n")
    return int(read_switch(simulation, "unknown-flag-status"))


def _without_daemon(simulation: str, arguments: list[str]) -> int:
    """Protocol 2 where no daemon is asked: flags, and commands that reach none."""
    is_command = not arguments or not arguments[0].startswith("-")
    if is_command and (not arguments or read_switch(simulation, "argv-commands") == "yes"):
        say(simulation, "Cannot find MPS control daemon process")
        return 1
    unknown = next((argument for argument in arguments if argument not in _FLAGS), None)
    if unknown is not None:
        return _refuse_flag(simulation, unknown)
    if "-h" in arguments or "--help" in arguments:
        sys.stdout.write(USAGE + "\n")
        return 0
    if "-v" in arguments:
        print_version(simulation)
        return 0
    from mpsd.sim.mps.daemon import Options
    from mpsd.sim.mps.daemon2 import Daemon2
    from mpsd.sim.mps.daemonize import run

    multiuser, static = (any(flag in arguments for flag in flags) for flags in (_MULTIUSER, _STATIC))
    options = Options(simulation, 2, foreground="-f" in arguments, multiuser=multiuser, static=static)
    return run(Daemon2, options)


def print_version(simulation: str) -> None:
    from mpsd.sim.driver import SimulatedDriver
    from mpsd.sim.mps.switches import binary_version

    sys.stdout.write(f"{binary_version(simulation, SimulatedDriver(simulation).version())}\n")
