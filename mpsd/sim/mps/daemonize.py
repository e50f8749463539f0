"""Runs a control daemon in the foreground, or in the background as `-d` does."""

from __future__ import annotations

import os
from collections.abc import Callable

from mpsd.sim.mps.console import say
from mpsd.sim.mps.daemon import Daemon
from mpsd.sim.mps.options import Options, StartError


def run(make: Callable[[Options], Daemon], options: Options) -> int:
    """The exit status: of the daemon in the foreground, else of its start, which returns when it listens."""
    if options.foreground:
        try:
            daemon = make(options)
            daemon.start()
        except StartError as error:
            say(options.simulation, str(error))
            return error.status
        return daemon.serve()

    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as pipe:
            status, _, text = pipe.read().decode().partition(" ")
        say(options.simulation, text)
        return int(status or 1)
    os.close(reader)
    os.setsid()
    if os.fork():
        os._exit(0)
    working_directory = os.getcwd()
    _detach()
    if options.config_path is not None:
        options.config_path = os.path.join(working_directory, options.config_path)
    try:
        daemon = make(options)
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
