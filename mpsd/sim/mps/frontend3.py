"""What the front-end does under protocol 3: flags, modules with verbs, help."""

from __future__ import annotations

import sys

from mpsd.sim.mps.console import Connection, print_version, say
from mpsd.sim.mps.grammar3 import QUIT, help_for
from mpsd.sim.switches import read_switch
from mpsd.sim.wire import WORD_END

_LONG = {
    "--help": "-h",
    "--daemon": "-d",
    "--foreground": "-f",
    "--multiuser": "-m",
    "--apply": "-a",
    "--quit": "-q",
    "--version": "-v",
}


def talk(simulation: str, daemon: Connection, arguments: list[str]) -> int:
    """Carries out a call that a daemon of protocol 3 answers; the exit status."""
    if not arguments:
        return _stdin(simulation, daemon)
    if arguments[0] in ("-q", "--quit"):
        return _command(simulation, daemon, [QUIT])
    text = help_for(arguments)
    if text is not None:
        sys.stdout.write(text + "\n")
        return 0
    return _command(simulation, daemon, arguments)


def _stdin(simulation: str, daemon: Connection) -> int:
    if read_switch(simulation, "stdin-commands-3") == "refuse":
        say(simulation, "Commands on standard input are not supported by this control daemon")
        return 1
    status = 0
    for line in sys.stdin:
        if line.strip() and not daemon.ended:
            status = _command(simulation, daemon, line.split()) or status
    return status


def _command(simulation: str, daemon: Connection, words: list[str]) -> int:
    status, reply = daemon.exchange(WORD_END.join(words).replace("\n", " ").encode(errors="replace"))
    if status == 0:
        sys.stdout.buffer.write(reply)
        sys.stdout.buffer.flush()
    else:
        say(simulation, reply.decode(errors="replace").rstrip("\n"))
    return status


def without_daemon(simulation: str, arguments: list[str]) -> int:
    """Carries out a call that no daemon answers: it starts one, prints something, or fails; the exit status."""
    text = help_for(arguments) if arguments and not arguments[0].startswith("-") else None
    if text is not None:
        sys.stdout.write(text + "\n")
        return 0
    if not arguments or not arguments[0].startswith("-") or arguments[0] in ("-q", "--quit"):
        say(simulation, read_switch(simulation, "no-daemon-reply-3"))
        return 1
    flags, config_path = [], None
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        flag = _LONG.get(name, name)
        if flag == "-a":
            config_path = value if equals else next(words, None)
            if not config_path:
                say(simulation, f"Option {name} requires a file")
                return 1
        elif flag not in _LONG.values() or equals:
            say(simulation, f"Unknown option: {word}")
            return int(read_switch(simulation, "unknown-flag-status"))
        flags.append(flag)
    if "-h" in flags:
        sys.stdout.write(f"{help_for([])}\n")
        return 0
    if "-v" in flags:
        print_version(simulation)
        return 0
    from mpsd.sim.mps.daemon3 import Daemon3
    from mpsd.sim.mps.daemonize import run
    from mpsd.sim.mps.options import Options

    options = Options(simulation, 3, foreground="-f" in flags, multiuser="-m" in flags, config_path=config_path)
    return run(Daemon3, options)
