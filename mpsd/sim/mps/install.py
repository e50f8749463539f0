"""Puts the emulator where a supervisor looks for the real binary."""

import os
import shlex
import sys

from mpsd.sim.files import install_root

# Shell and Python at once: no limit on the interpreter's path, and the launcher's name stays among the arguments.
# -I -S: no environment, no site; a call is twice as fast and the package is found where it was installed from.
_LAUNCHER = """#!/bin/sh
''''exec {python} -I -S "$0" "$@" # '''
import sys
sys.path.insert(0, {root!r})
{body}
"""

_CONTROL = """from mpsd.sim.mps.frontend import main
raise SystemExit(main({simulation!r}, sys.argv[1:]))"""

_SERVER = """from mpsd.sim.mps.server import main
raise SystemExit(main({simulation!r}))"""


def install_emulator(bin_directory: str, simulation_directory: str) -> str:
    """Writes launchers for control daemon and server that work on one simulation; the path of nvidia-cuda-mps-control.

    May be repeated; running daemons are not touched.
    """
    os.makedirs(bin_directory, exist_ok=True)
    root = install_root()
    simulation = os.path.abspath(simulation_directory)
    for name, body in (("nvidia-cuda-mps-server", _SERVER), ("nvidia-cuda-mps-control", _CONTROL)):
        path = os.path.join(os.path.abspath(bin_directory), name)
        text = _LAUNCHER.format(python=shlex.quote(sys.executable), root=root, body=body.format(simulation=simulation))
        temporary = f"{path}.{os.getpid()}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o755)  # noqa: S103 - an executable
        os.rename(temporary, path)
    return path
