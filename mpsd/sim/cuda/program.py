"""A simulated CUDA process: `python -m mpsd.sim.cuda --allocate 9Gi --hold`.

It prints the bytes granted, or the name of the CUDA error with exit status 1. What it reads of its environment is in
`client`; the simulation directory may be given as --simulation.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence

from mpsd.sim.cuda.client import Cuda
from mpsd.sim.cudaerrors import CudaError
from mpsd.sim.files import install_root

_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def cuda_command() -> list[str]:
    """How to run this program in any environment: one must not reach our interpreter (-E), and our package need not be
    installed in it."""
    code = f"import sys; sys.path.append({install_root()!r}); from mpsd.sim.cuda.program import main; sys.exit(main())"
    return [sys.executable, "-E", "-c", code]


def parse_size(text: str) -> int:
    """Bytes of `9Gi`, `512Mi` or a plain number. Raises ValueError."""
    number = text.rstrip("KMGTi")
    if not (number.isascii() and number.isdigit()) or text[len(number) :] not in _UNITS:
        raise ValueError(f"cannot read {text!r} as a size: write for example 9Gi, 512Mi or 1048576")
    return int(number) * _UNITS[text[len(number) :]]


def main(arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """The simulated program: 0 when all was granted, 1 for a CUDA error (its name on stdout), 2 for wrong usage."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m mpsd.sim.cuda", description="A simulated CUDA process.")
    parser.add_argument("--allocate", type=parse_size, metavar="SIZE", help="device memory to allocate, e.g. 9Gi")
    parser.add_argument("--device", type=int, default=0, help="ordinal as this process sees it (default 0)")
    parser.add_argument("--hold", action="store_true", help="keep it until stdin ends, SIGTERM, or trouble with MPS")
    parser.add_argument("--stay", action="store_true", help="with --hold: report trouble, but do not exit for it")
    parser.add_argument("--busy", action="store_true", help="have GPU work in flight while holding")
    parser.add_argument("--fault", action="store_true", help="cause a fatal GPU fault after allocating")
    parser.add_argument("--simulation", metavar="DIR", help="the simulation directory, instead of the environment's")
    parser.add_argument("--info", action="store_true", help="first print what CUDA found, as one line of JSON")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.SIG_DFL if options.busy else _on_sigterm)
    if options.simulation is not None:
        environment = {**environment, "GPUFRAC_SIM_DIRECTORY": options.simulation}
    try:
        cuda = Cuda(environment)
        try:
            return _run(cuda, options.allocate, options.device, options)
        finally:
            cuda.close()
    except CudaError as error:
        print(error.name, flush=True)  # noqa: T201
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    except FileNotFoundError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2


def _on_sigterm(number: int, frame: object) -> None:
    raise SystemExit(0)


def _run(cuda: Cuda, size_bytes: int | None, ordinal: int, options: object) -> int:
    device = cuda.open_device(ordinal)
    if getattr(options, "info", False):
        free_bytes, total_bytes = cuda.memory_info
        facts = {
            "pid": os.getpid(),
            "mps": cuda.mps,
            "server_pid": cuda.server_pid,
            "devices": cuda.devices,
            "device": device,
            "limit_bytes": cuda.limit_bytes,
            "free_bytes": free_bytes,
            "total_bytes": total_bytes,
            "thread_percent": cuda.thread_percent,
        }
        print(json.dumps(facts), flush=True)  # noqa: T201
    granted_bytes = 0 if size_bytes is None else cuda.allocate(size_bytes)
    if getattr(options, "busy", False) or getattr(options, "fault", False):
        cuda.launch(faulty=getattr(options, "fault", False))
    print(granted_bytes, flush=True)  # noqa: T201
    if getattr(options, "hold", False):
        _hold(cuda, getattr(options, "stay", False))
    elif getattr(options, "fault", False):
        cuda.wait(None)
    return 0


def _hold(cuda: Cuda, stay: bool) -> None:
    failed = False
    while True:
        ready = select.select([0] if failed else [0, *cuda.descriptors()], [], [])[0]
        if 0 in ready and not os.read(0, 4096):
            return
        if len(ready) > 1 or 0 not in ready:
            try:
                cuda.wait(0)
            except CudaError as error:
                if not stay:
                    raise
                print(error.name, flush=True)  # noqa: T201
                failed = True
