"""Starts mpsd's program again in the same process, to have it load the driver's new libraries."""

import os
import signal
import sys
from collections.abc import Mapping
from typing import NoReturn

VERSION_MISMATCH = 18
"""NVML_ERROR_LIB_RM_VERSION_MISMATCH of nvml.h: library and kernel module are of different drivers."""
INTERVAL_S = 300.0
VARIABLE = "GPUFRAC_REEXEC"
"""Tells the next program when the last one began anew, in Unix seconds."""


def last_reexec(environ: Mapping[str, str]) -> float | None:
    """When this process began anew last, in Unix seconds; None when it never did."""
    try:
        return float(environ[VARIABLE])
    except (KeyError, ValueError):
        return None


def reexec_due(error_code: int, last_reexec_unix_s: float | None, now_unix_s: float) -> bool:
    """Whether to begin anew for this NVML error: the library stays loaded for the life of a program. At most once in
    five minutes, for while the old module is still loaded it does not help."""
    if error_code != VERSION_MISMATCH:
        return False
    return last_reexec_unix_s is None or not 0 <= now_unix_s - last_reexec_unix_s < INTERVAL_S


def reexec(now_unix_s: float, more: Mapping[str, str]) -> NoReturn:
    """Runs the same command line in place of this program: same PID, all descriptors but the standard ones closed.

    Args:
        more: beside our environment, what was taken out of it for its children's sake.

    May be called from any thread; nothing is cleaned up, so only what survives a SIGKILL may be open. Raises OSError.
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2:
                os.set_inheritable(int(name), False)  # the driver's library need not open its devices so
        except OSError:
            continue  # the listing's own, or closed by another thread
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # a mask outlives the program, and only this thread's counts
    environment = {**os.environ, **more, VARIABLE: f"{now_unix_s:.0f}"}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606 - our own command line
