"""Annotations on a pod that asks for a resource of the device plugin: they may lower the limit of its share."""

from collections.abc import Callable

from deviceplugin.annotated import devices
from deviceplugin.annotated.contract import Ask
from deviceplugin.annotated.reasons import AnnotationCode, RefusedError
from deviceplugin.grants.broker import Broker
from deviceplugin.grants.holders.model import Holder
from deviceplugin.grants.nodestate import NodeState
from deviceplugin.grants.reader import Reader
from deviceplugin.nri.model import Container
from deviceplugin.plan import render
from deviceplugin.plan.allocation import Allocation, ContainerRef
from deviceplugin.plan.isolation import level_left
from mpsd.common.marker import MARKER
from mpsd.common.quantity import format_bytes
from mpsd.common.reason import Reason
from mpsd.config.model import Enforcement

FRESH_S = 0.5
"""How old the last look at the kubelet may be where its word decides. Whoever is refused is tried again later, and the
kubelet must not be asked once for each."""


def share_of(
    reader: Reader, ref: ContainerRef, container: Container, observe: Callable[[float], object] | None = None
) -> Allocation | None:
    """The share that a container of a device plugin pod holds. Any pod can set our marker, so the kubelet's word
    counts on whose it is.

    Args:
        observe: looks at the kubelet once more, where its last look is older than so long; called where what is known
            does not make it the container's. With 0.0 where no holder is known at all: the share may be younger than
            the last look, however young that is.
    """
    key = key_of(container)
    if key is None:
        return None
    found = reader.share(key)
    if observe is not None and found is not None and not _holds(found[1], ref):
        observe(0.0 if found[1] is None else FRESH_S)
        found = reader.share(key)
    return found[0] if found is not None and _holds(found[1], ref) else None


def key_of(container: Container) -> str | None:
    """Of the allocation that a container says it has: by the annotation in the plugin's answer, which only the kubelet
    sets, else by our marker."""
    for key in (container.annotations.get(render.KIND), container.variable(MARKER)):
        if key and render.is_key(key):
            return key
    return None


def is_ours(container: Container) -> bool:
    """Whether the kubelet gave it an answer of ours."""
    return render.is_key(container.annotations.get(render.KIND, ""))


def objection(node: NodeState, share: Allocation, ask: Ask, *, mode_given: bool) -> str:
    """Why annotations ask for more than to lower the limit, empty when they don't."""
    named = f"its container holds {share.resource}, and annotations may only lower the limit of a share"
    if ask.limit_bytes > share.limit_bytes or ask.request_bytes > share.request_bytes:
        return (
            f"{named}: the share has {format_bytes(share.request_bytes)} to {format_bytes(share.limit_bytes)}, and "
            f"they ask for {format_bytes(ask.request_bytes)} to {format_bytes(ask.limit_bytes)}"
        )
    if ask.limit_bytes < share.limit_bytes and (reason := _not_held(node, share)):
        return f"{named}, but {reason}"
    if ask.mode is not share.mode and mode_given:
        return f"{named}: the share is {share.mode}, and they ask for {ask.mode}"
    if ask.devices:
        gpus = devices.resolve(ask.devices, [gpu.info for gpu in node.gpus])
        if isinstance(gpus, str) or set(gpus) != set(share.gpus):
            return f"{named}: the share is on {', '.join(share.gpus)}, and they name other GPUs"
    return ""


def check_isolation(share: Allocation, kept_apart: Reason | None) -> None:
    """Raises GpufracError where what keeps its container from the host leaves less of its level than it must have."""
    left = level_left(kept_apart, share.enforcement)
    if kept_apart is not None and left.rank < min(share.enforcement.rank, share.minimum.rank):
        raise RefusedError(AnnotationCode.KEPT_APART, f"it needs a {share.minimum} limit, and {kept_apart}")


def lower(broker: Broker, share: Allocation, ask: Ask, *, mode_given: bool) -> Allocation:
    """The share with the limit that annotations ask for. Raises GpufracError where they ask for anything else."""
    if reason := objection(broker.node, share, ask, mode_given=mode_given):
        raise RefusedError(AnnotationCode.SHARE_NOT_LOWERED, reason)
    return broker.lower_limit(share.key, ask.limit_bytes)


def _not_held(node: NodeState, share: Allocation) -> str:
    """Why nothing would hold a share to a lower limit, empty when something does."""
    if share.enforcement is Enforcement.NONE:
        return "nothing holds this one to any"
    if share.enforcement is Enforcement.COOPERATIVE and len(share.gpus) > 1 and node.protocol(share.gpus[0]) == 2:
        return "MPS protocol 2 has one limit for all containers on a group of several GPUs"
    return ""


def _holds(holder: Holder | None, ref: ContainerRef) -> bool:
    if holder is None:
        return False
    if holder.container != ref.container or holder.pod_uid not in ("", ref.pod_uid):
        return False
    if not holder.pod:  # of a plain init container only the checkpoint tells, by UID
        return holder.pod_uid == ref.pod_uid
    return (holder.namespace, holder.pod) == (ref.namespace, ref.pod)
