"""What reconciling knows beyond the broker: the parts' findings in one value, for status."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from deviceplugin.grants.holders.model import Shares
from deviceplugin.reconcile.hardlimits import LimitState
from mpsd.common.reason import Reason


@dataclass(frozen=True, slots=True)
class Report:
    """Reasons are None where there is nothing to say. All maps are by allocation key.

    `published`: whose CDI file is there. `stale`: shares that the kubelet's checkpoint holds for pods that are gone.
    """

    kubelet_error: Reason | None = None
    checkpoint_error: Reason | None = None
    spec_error: Reason | None = None
    spec_objections: tuple[Reason, ...] = ()
    stale: frozenset[Shares] = frozenset()
    published: frozenset[str] = frozenset()
    unenforced: Mapping[str, Reason] = field(default_factory=dict)
    doubts: Mapping[str, Reason] = field(default_factory=dict)
    release_blocked: Mapping[str, Reason] = field(default_factory=dict)
    held_back: Mapping[str, Reason] = field(default_factory=dict)
    limits: Mapping[str, LimitState] = field(default_factory=dict)
    limit_drifts: int = 0
