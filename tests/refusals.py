"""Refusals by what a pod's owner can do about them."""

from enum import Enum, auto

from deviceplugin.plan.allocation import Allocation, Refusal
from deviceplugin.plan.reasons import OfferCode


class Kind(Enum):
    INVALID = auto()
    """It can never be granted here."""
    NO_ROOM = auto()
    MODE_CONFLICT = auto()


def kind_of(outcome: Allocation | Refusal) -> Kind:
    assert isinstance(outcome, Refusal)
    if outcome.is_final:
        return Kind.INVALID
    return Kind.MODE_CONFLICT if outcome.code == OfferCode.MODE_BOUND else Kind.NO_ROOM
