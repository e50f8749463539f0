"""How a control daemon is started so that it is outside of mpsd's pod from its first instruction on."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence

from mpsd.host import launcher
from mpsd.host.cgroups import RIGHTS

_HINTS = {
    launcher.JOIN: RIGHTS,
    launcher.ENTER: RIGHTS,
    launcher.RUN: "is the driver's MPS package installed on the host, and are mps.binary and mps.driverRoot right?",
}


def command(
    program: Sequence[str],
    environment: Iterable[tuple[str, str]],
    procs_files: Sequence[str] = (),
    namespaces: Sequence[str] = (),
    shared_memory: str = "",
) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a process that becomes `program` once it is where it belongs.

    Args:
        program: with its arguments; looked up in the PATH of `environment`, in the mount namespace entered. With
            none the process ends with 0 when it got that far.
        procs_files: what `cgroups.prepare` gave.
        namespaces: files in /proc/<pid>/ns to enter; `survival.probe` says which.
        shared_memory: directory that the program sees as /dev/shm; empty for that of its mount namespace.

    Returns:
        What `subprocess.Popen` takes. Working directory, umask, descriptors and session stay as Popen made them.
    """
    variables = dict(environment)
    if program and not (procs_files or namespaces or shared_memory):
        return list(program), variables
    # A v2 cgroup is joined from inside the cgroup namespace that sees it; afterwards its path may be gone.
    mounts = [file for file in namespaces if os.path.basename(file) == "mnt"]
    options = [
        *(("--enter", file) for file in namespaces if file not in mounts),
        *(("--join", file) for file in procs_files),
        *(("--enter", file) for file in mounts),
        *([("--shm", shared_memory)] if shared_memory else []),
        *(("--set", f"{name}={value}") for name, value in variables.items()),
    ]
    words = [word for option in options for word in option]
    return [sys.executable, "-I", "-S", launcher.__file__, *words, "--", *program], _ours(os.environ)


def _ours(environ: Mapping[str, str]) -> dict[str, str]:
    """The launcher's own environment: the program's could name the libraries of another driver root, which break it."""
    return {name: environ[name] for name in ("LD_LIBRARY_PATH",) if name in environ}


def explain(returncode: int, output: str) -> str:
    """What kept the launcher from its program, empty when it was the program that ended so."""
    line = output.strip().partition("\n")[0]
    if returncode not in _HINTS or not line.startswith("cannot "):
        return ""
    return f"{line}: {_HINTS[returncode]}"
