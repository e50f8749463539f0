"""Reasons as tests write and read them."""

from collections.abc import Mapping

from mpsd.common.reason import Reason

BECAUSE = Reason("Because", "because")


def because(message: str) -> Reason:
    """A reason with these words; whoever hands it on does not look at its code."""
    return Reason("Because", message)


def messages(reasons: Mapping[str, Reason]) -> dict[str, str]:
    """The words alone."""
    return {name: reason.message for name, reason in reasons.items()}
