"""Whether an allocation that was read back can be one that we granted (pure).

Every value by itself is checked where it is declared; here is what they must be to one another: a record that lost a
bit or was edited must not become a limit.
"""

from deviceplugin.plan import ids
from deviceplugin.plan.allocation import ANNOTATED, Allocation, allocation_key
from mpsd.common.errors import ProtocolError
from mpsd.config.model import Enforcement
from mpsd.gpu.model import Mode
from mpsd.shares.groups import is_set_name, set_name


def flaw(allocation: Allocation) -> str:
    """Why it can't be, empty when it can."""
    if not allocation.gpus or not allocation.device_ids:
        return "it names no GPU, or no share"
    if len(set(allocation.gpus)) < len(allocation.gpus) or len(set(allocation.device_ids)) < len(allocation.device_ids):
        return "it names a GPU or a share twice"
    if allocation.limit_bytes > allocation.memory_total_bytes and not allocation.adopted:
        return "its limit is more than its GPU has"
    if allocation.soft_bytes > allocation.request_bytes:
        return "more of it is protected than was requested"
    if allocation.mode is Mode.TIME_SLICING and allocation.enforcement is Enforcement.COOPERATIVE:
        return "MPS holds nobody to a limit in time-slicing, and it says so"
    if is_set_name(allocation.group) and allocation.group != set_name(allocation.gpus):
        return "its GPUs are not those that it is named by"
    if allocation.key in allocation.after:
        return "it waits for its own end"
    # One that was adopted has the key that its container was started with.
    key = allocation_key(allocation.resource, allocation.device_ids, allocation.generation)
    if key != allocation.key and not allocation.adopted:
        return "its key is not that of its shares"
    if (allocation.container is None) != (allocation.resource != ANNOTATED):
        return "it is neither a share nor a container's"
    return _of_share(allocation) if allocation.container is None else _of_container(allocation)


def _of_share(allocation: Allocation) -> str:
    try:
        groups = ids.groups_of(allocation.device_ids)
    except ProtocolError as error:
        return str(error)
    # Versions without groups of GPUs named none: a GPU alone is its own.
    group = allocation.group or allocation.gpus[0]
    if groups != (group,):
        return f"its shares are of {', '.join(groups)}, and it is of {group}"
    if allocation.request_bytes != allocation.share_bytes * len(allocation.device_ids):
        return "its request is not the sum of its shares"
    if allocation.may_borrow and allocation.enforcement is not Enforcement.HARD and not allocation.adopted:
        return "its limit is above its request, which only hard limits allow"
    if is_set_name(group) and (allocation.slot is not None or len(allocation.device_ids) > 1):
        return "it has several shares of a set of GPUs, or a slot there"
    slots = [ids.slot_of(identifier) for identifier in allocation.device_ids]
    if allocation.slot is not None and [allocation.slot] != slots:
        return "its slot is not the one that it names"
    return ""


def _of_container(allocation: Allocation) -> str:
    assert allocation.container is not None
    if allocation.device_ids != (allocation.container.id,):
        return "it is not of the container that it names"
    return ""
