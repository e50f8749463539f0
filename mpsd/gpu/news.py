"""What of an inventory is news to those who read it, and what of that is said in the log."""

import msgspec

from mpsd.common.log import get_logger
from mpsd.common.reason import Reason, message_of
from mpsd.gpu.model import GpuHealth, Inventory
from mpsd.gpu.reasons import GpuCode, XidCode
from mpsd.gpu.xid import Verdict, Xid

log = get_logger("gpu")


def news(inventory: Inventory) -> Inventory:
    """The same without the times of the readings."""
    gpus = tuple(msgspec.structs.replace(state, read_s=None) for state in inventory.gpus)
    return msgspec.structs.replace(inventory, gpus=gpus)


def log_changes(old: Inventory | None, new: Inventory) -> None:
    """Says what became worse or better."""
    if new.reason is not None and (old is None or old.reason != new.reason):
        log.warning("GPUs incomplete", reason=new.reason.message)
    before = {s.info.uuid: (s.health, s.reason) for s in old.gpus} if old else {}
    for state in new.gpus:
        uuid = state.info.uuid
        if before.get(uuid, (GpuHealth.OK, None)) == (state.health, state.reason):
            continue
        if state.health is GpuHealth.OK:
            log.info("GPU recovered", gpu=uuid)
        else:
            log.warning("GPU in trouble", gpu=uuid, health=state.health, reason=message_of(state.reason))


def meaning(row: Xid) -> Reason:
    """What an XID means for its GPU, and NVIDIA's advice where there is one."""
    advice = f"; NVIDIA's advice: {row.action}" if row.action else ""
    if row.verdict is Verdict.CRITICAL:
        return Reason(GpuCode.XID, f"nothing new is given on the GPU until it was quiet for a while{advice}")
    return Reason(XidCode.OF_A_PROGRAM, f"other programs can go on using the GPU{advice}")
