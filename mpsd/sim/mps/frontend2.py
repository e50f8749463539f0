"""What the front-end does under protocol 2: flags, and commands on stdin."""

from __future__ import annotations

import sys

from mpsd.sim.mps.console import Connection, print_version, say
from mpsd.sim.switches import read_switch

USAGE = """usage: nvidia-cuda-mps-control [-d | -f] [-multiuser-server | -M] [-v] [-h]
  -d  start the control daemon in the background
  -f  start the control daemon in the foreground
  -multiuser-server, -M      one server for all users
  -v  print the version
Without a flag: read commands from stdin."""

_MULTIUSER = ("-multiuser-server", "--multiuser-server", "-M")
_FLAGS = ("-d", "-f", "-v", "-h", "--help", *_MULTIUSER)


def talk(simulation: str, daemon: Connection, arguments: list[str]) -> int:
    """Carries out a call that a daemon of protocol 2 answers; the exit status."""
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


def without_daemon(simulation: str, arguments: list[str]) -> int:
    """Carries out a call that no daemon answers: flags, and commands that reach none; the exit status."""
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
    from mpsd.sim.mps.daemon2 import Daemon2
    from mpsd.sim.mps.daemonize import run
    from mpsd.sim.mps.options import Options

    multiuser = any(flag in arguments for flag in _MULTIUSER)
    options = Options(simulation, 2, foreground="-f" in arguments, multiuser=multiuser)
    return run(Daemon2, options)
