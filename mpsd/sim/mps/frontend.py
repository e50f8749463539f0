"""The front-end of the emulated `nvidia-cuda-mps-control`, and the entry of its launcher. Imports stay tiny.

Which protocol a call speaks: the running daemon's; where none runs, or one is started, CUDA_MPS_PROTOCOL_VERSION, then
`-p`, then 2 ('MPS v3 Interface' r615). What they do under each is in `frontend2` and `frontend3`.
"""

from __future__ import annotations

import os

from mpsd.sim.files import set_process_name
from mpsd.sim.mps import frontend2
from mpsd.sim.mps.console import Connection, say
from mpsd.sim.switches import read_switch

FIRST_DRIVER_3 = 615
"""Major version of the first driver with protocol 3."""

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
                if daemon.protocol == 3:
                    from mpsd.sim.mps import frontend3

                    return frontend3.talk(simulation, daemon, arguments)
                return frontend2.talk(simulation, daemon, arguments)
    if asked == "3" and knows_protocol_3(simulation):
        from mpsd.sim.mps import frontend3

        return frontend3.without_daemon(simulation, arguments)
    if asked == "3" and read_switch(simulation, "old-binary-protocol") == "refuse":
        say(simulation, "Unsupported protocol version: 3")
        return 1
    return frontend2.without_daemon(simulation, arguments)


def knows_protocol_3(simulation: str) -> bool:
    """Whether the binary of this driver does. Looked up only where somebody asks for it: that costs milliseconds."""
    from mpsd.sim.driver import SimulatedDriver
    from mpsd.sim.switches import major

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
