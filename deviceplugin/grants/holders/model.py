"""Who holds an allocation, and what a kubelet shows of that at one moment (values)."""

from collections.abc import Collection, Mapping

import msgspec

Shares = tuple[str, tuple[str, ...]]
"""Resource and sorted device IDs of one container."""
Pods = Mapping[str, Collection[str]]
"""Key of a live allocation -> UIDs of the pods that held it; empty while none is known."""


class Holder(msgspec.Struct, frozen=True):
    """A container that holds shares. `pod_uid` and `key` (of its cached answer) come from the checkpoint only."""

    namespace: str = ""
    pod: str = ""
    container: str = ""
    pod_uid: str = ""
    key: str | None = None


class Observation(msgspec.Struct, frozen=True):
    """What a kubelet shows at one moment.

    `listed`: PodResources, one entry per container and resource. `checkpointed`: entries of the checkpoint whose pod
    directory exists, or None where the checkpoint can't be read: unknown is not absent, so nothing is believed gone.
    Of several entries with the same shares it has one; `keyed` has each by the key of its cached answer. `removed` and
    `there`: of the pods that were seen to hold something, those whose directory is gone, or is there.
    """

    listed: dict[Shares, Holder]
    checkpointed: dict[Shares, Holder] | None
    keyed: dict[str, Holder] = {}
    removed: frozenset[str] = frozenset()
    there: frozenset[str] = frozenset()
