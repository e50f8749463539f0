"""Refused Allocates: each is counted, and told."""

from deviceplugin.kubelet.refusals import Refusals
from deviceplugin.plan.allocation import Refusal
from deviceplugin.plan.reasons import OfferCode
from tests.heard import Heard

FULL = Refusal(OfferCode.ALL_TAKEN, "all shares are taken")
TAKEN = Refusal(OfferCode.MEMORY_TAKEN, "the memory is taken")


def test_each_refusal_is_counted_and_told() -> None:
    heard = Heard()
    refusals = Refusals(heard)
    for resource, refusal in (("a", FULL), ("a", FULL), ("b", FULL), ("a", TAKEN)):
        refusals.note(resource, refusal)
    assert refusals.counts == {"a": {"AllTaken": 2, "MemoryTaken": 1}, "b": {"AllTaken": 1}}
    assert [(word.kind, word.subject.resource, word.reason) for word in heard.words] == [
        ("Refused", "a", FULL),
        ("Refused", "a", FULL),
        ("Refused", "b", FULL),
        ("Refused", "a", TAKEN),
    ]
