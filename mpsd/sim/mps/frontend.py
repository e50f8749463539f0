"""The front-end of the emulated `nvidia-cuda-mps-control`, and the entry of its launcher. Imports stay tiny."""

from __future__ import annotations

import os
import select
import socket
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

_MULTIUSER = ("-multiuser-server", "--multiuser-server", "-M")
_STATIC = ("-S", "--static-partitioning")
_FLAGS = ("-d", "-f", "-v", "-h", "--help", *_STATIC, *_MULTIUSER)


def main(simulation: str, arguments: list[str]) -> int:
    """Runs as nvidia-cuda-mps-control with these arguments in a simulation directory; the exit status."""
    set_process_name("nvidia-cuda-mps-control")
    unknown = next((argument for argument in arguments if argument not in _FLAGS), None)
    is_command = bool(arguments) and not arguments[0].startswith("-")
    if is_command and read_switch(simulation, "argv-commands") == "yes":
        return front_end(simulation, [" ".join(arguments).encode()])
    if unknown is not None:
        sys.stderr.write(f"Unknown option: {unknown}\n")
        return int(read_switch(simulation, "unknown-flag-status"))
    if "-h" in arguments or "--help" in arguments:
        sys.stdout.write(USAGE + "\n")
        return 0
    if "-v" in arguments:
        from mpsd.sim.driver import SimulatedDriver
        from mpsd.sim.mps.switches import binary_version

        sys.stdout.write(f"{binary_version(simulation, SimulatedDriver(simulation).version())}\n")
        return 0
    if not arguments:
        return front_end(simulation, None)
    return _daemon(simulation, arguments)


def _say(simulation: str, text: str) -> None:
    if text:
        stream = sys.stdout if read_switch(simulation, "error-stream") == "stdout" else sys.stderr
        stream.write(text + "\n")
        stream.flush()


# Front-end


def front_end(simulation: str, lines: list[bytes] | None) -> int:
    """Sends commands, prints replies. 0: talked to the daemon, whatever it said; 1: no daemon, or it broke off."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(os.path.join(pipe_directory(), "control"))
        connection.sendall(b"UI\n")
    except OSError:
        _say(simulation, "Cannot find MPS control daemon process")
        return 1
    with connection, connection.makefile("rb") as replies:
        for line in sys.stdin.buffer if lines is None else lines:
            command = line.strip()
            if not command:
                continue
            daemon = _open_peer(connection) if command.split()[0] == b"quit" else None
            status = _exchange(connection, replies, command)
            if status is None:
                continue
            if daemon is not None:
                select.select([daemon], [], [])  # quit returns when the daemon's process is gone
            return status
    return 0


def _open_peer(connection: socket.socket) -> int | None:
    try:
        return os.pidfd_open(peer_credentials(connection)[0])
    except OSError:
        return None


def _exchange(connection: socket.socket, replies: BufferedReader, command: bytes) -> int | None:
    """One command; the exit status where it is the last, None to go on."""
    try:
        connection.sendall(command + b"\n")
        header = replies.readline().split()
        if not header:
            return 1
        if header[0] == b"exit":
            return int(header[1])
        reply = replies.read(int(header[0]))
    except OSError:
        return 1
    sys.stdout.buffer.write(reply)
    sys.stdout.buffer.flush()
    return None


# Daemon


def _daemon(simulation: str, arguments: list[str]) -> int:
    from mpsd.sim.mps.daemon import Daemon, Options, StartError

    foreground = "-f" in arguments
    options = Options(
        simulation=simulation,
        server_binary=os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "nvidia-cuda-mps-server"),
        multiuser=any(flag in arguments for flag in _MULTIUSER),
        static=any(flag in arguments for flag in _STATIC),
        foreground=foreground,
    )
    if foreground:
        try:
            daemon = Daemon(options)
            daemon.start()
        except StartError as error:
            _say(simulation, str(error))
            return error.status
        return daemon.serve()

    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as pipe:
            status, _, text = pipe.read().decode().partition(" ")
        _say(simulation, text)
        return int(status or 1)
    os.close(reader)
    os.setsid()
    if os.fork():
        os._exit(0)
    _detach()
    try:
        daemon = Daemon(options)
        daemon.start()
    except StartError as error:
        os.write(writer, f"{error.status} {error}".encode())
        os._exit(1)
    os.write(writer, b"0")
    os.close(writer)
    os._exit(daemon.serve())


def _detach() -> None:
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.close(null)
