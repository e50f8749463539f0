"""What the driver asks for to make a GPU well again: NVML's recovery action -> what it means for us (pure).

Numbers are nvmlDeviceGpuRecoveryAction_t (NVML API reference). XID 154 tells that it changed.
"""

from typing import Final

NONE: Final = 0

_ASKED: Final = {
    1: "a reset of the GPU: end its processes, then nvidia-smi --gpu-reset",
    2: "a reboot of the node",
    3: "an end of peer-to-peer traffic with other GPUs: end what uses several GPUs, then reset them",
    4: "a reset once its processes have ended by themselves: drain it (gpufrac drain), then nvidia-smi --gpu-reset",
    5: "recovery of the IMEX domain: restart nvidia-imex on its nodes",
    6: "a reset of its bus: end its processes, then reboot the node",
    7: "a reboot of the whole system",
}


def asked(action: int) -> str:
    """What the driver asks for; empty for nothing."""
    if action == NONE:
        return ""
    return f"the driver asks for {_ASKED.get(action, f'recovery action {action}, which this version does not know')}"
