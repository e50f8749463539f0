"""When an allocation counts as gone."""

import pytest

from deviceplugin.grants.holders.model import Holder, Observation
from deviceplugin.grants.holders.shares import ABSENT_AFTER_RESTART_S, ABSENT_S, ShareHolders
from tests.builders import allocation, uuid

A = allocation("a", f"{uuid(0)}::0")
SHARES = (A.resource, A.device_ids)
LISTED = Observation({SHARES: Holder("ns", "pod", "c")}, {})
NOTHING = Observation({}, {})
CHECKPOINT_ONLY = Observation({}, {SHARES: Holder("", "", "init", "uid-1")})


def test_gone_only_after_the_grace() -> None:
    holders = ShareHolders()
    holders.observe([A], LISTED, 0)
    holders.observe([A], NOTHING, 10)
    holders.observe([A], NOTHING, 10 + ABSENT_S - 0.1)
    assert holders.releasable(1000) == set(), "a kubelet that has been silent since shows nothing"
    holders.observe([A], NOTHING, 10 + ABSENT_S)
    assert holders.releasable(10 + ABSENT_S) == {A.key}


def test_back_in_time_starts_the_grace_anew() -> None:
    holders = ShareHolders()
    holders.observe([A], NOTHING, 0)
    holders.observe([A], LISTED, 14)
    holders.observe([A], NOTHING, 16)
    assert holders.releasable(20) == set()


def test_a_plain_init_container_is_held_by_the_checkpoint() -> None:
    holders = ShareHolders()
    holders.observe([A], CHECKPOINT_ONLY, 0)
    assert holders.releasable(1000) == set()
    assert holders.checkpoint_only() == {A.key}
    holder = holders.holder(A.key)
    assert holder is not None
    assert holder.pod_uid == "uid-1"


def test_under_pressure_what_was_seen_goes_at_once_and_what_was_not_stays() -> None:
    holders = ShareHolders()
    young = allocation("a", f"{uuid(0)}::1")
    holders.observe([A], LISTED, 0)
    holders.observe([A, young], NOTHING, 1)
    assert holders.vacated() == {A.key}
    assert holders.releasable(1, pressed=True) == {A.key}
    assert holders.releasable(1) == set()


@pytest.mark.parametrize("pressed", [False, True])
def test_after_a_kubelet_restart_what_is_older_stays_for_a_minute(pressed: bool) -> None:
    holders = ShareHolders()
    holders.observe([A], LISTED, 0)
    holders.kubelet_restarted([A], 2)
    holders.observe([A], NOTHING, 3)
    assert holders.vacated() == set()
    for after_s, gone in ((ABSENT_AFTER_RESTART_S - 1, set()), (ABSENT_AFTER_RESTART_S, {A.key})):
        holders.observe([A], NOTHING, 2 + after_s)
        assert holders.releasable(2 + after_s, pressed=pressed) == gone


def test_what_the_new_kubelet_has_shown_or_granted_itself_needs_no_longer_grace() -> None:
    holders = ShareHolders()
    young = allocation("a", f"{uuid(0)}::1")
    holders.kubelet_restarted([A], 0)
    holders.observe([A, young], LISTED, 1)
    holders.observe([A, young], NOTHING, 2)
    assert holders.vacated() == {A.key}
    holders.observe([A, young], NOTHING, 2 + ABSENT_S)
    assert holders.releasable(2 + ABSENT_S) == {A.key, young.key}


def test_an_allocation_given_out_again_counts_as_not_seen_yet() -> None:
    holders = ShareHolders()
    holders.observe([A], LISTED, 0)
    holders.renew(A.key)
    holders.observe([A], NOTHING, 1)
    assert holders.releasable(1, pressed=True) == set()


def test_the_newest_generation_of_the_same_shares_is_the_one_held() -> None:
    newer = allocation("a", f"{uuid(0)}::0", generation=2)
    holders = ShareHolders()
    holders.observe([A], LISTED, 0)
    holders.observe([A, newer], LISTED, 5)
    assert holders.holder(newer.key) is not None
    assert holders.vacated() == {A.key}


def test_without_a_checkpoint_nothing_is_believed_gone() -> None:
    """It alone shows plain init containers: unknown is not absent."""
    holders = ShareHolders()
    holders.observe([A], NOTHING, 0)
    holders.observe([A], Observation({}, None), 10)
    holders.observe([A], Observation({}, None), 1000)
    assert holders.releasable(1000) == set()


KNOWN = Observation({SHARES: Holder("ns", "pod", "c")}, {SHARES: Holder("ns", "pod", "c", "uid-1", A.key)})
REMOVED = Observation({}, {}, removed=frozenset({"uid-1"}))


def test_what_is_proven_to_have_ended_goes_at_once() -> None:
    """The directory of a pod goes after its containers, and its UID never comes back."""
    holders = ShareHolders()
    holders.observe([A], KNOWN, 0)
    holders.observe([A], REMOVED, 1)
    assert holders.vacated() == holders.releasable(1) == {A.key}


def test_also_for_a_young_kubelet() -> None:
    holders = ShareHolders()
    holders.observe([A], KNOWN, 0)
    holders.kubelet_restarted([A], 1)
    holders.observe([A], REMOVED, 2)
    assert holders.releasable(2) == {A.key}


def test_what_only_pod_resources_says_keeps_its_grace() -> None:
    holders = ShareHolders()
    holders.observe([A], LISTED, 0)  # the UID of its pod is not known
    holders.observe([A], REMOVED, 1)
    assert holders.releasable(1) == set()
    assert holders.vacated() == {A.key}


def test_nothing_has_ended_that_is_shown_or_that_has_another_pod_whose_directory_is_there() -> None:
    holders = ShareHolders()
    holders.observe([A], KNOWN, 0)
    holders.observe([A], Observation(LISTED.listed, {}, removed=frozenset({"uid-1"})), 1)
    assert holders.releasable(1) == set()
    holders.observe([A], Observation({}, {SHARES: Holder("", "", "c", "uid-2")}), 2)
    holders.observe([A], REMOVED, 3)
    assert holders.releasable(3) == set()


def test_an_older_generation_is_held_by_an_entry_with_its_own_key_alone() -> None:
    newer = allocation("a", f"{uuid(0)}::0", generation=2)
    holders = ShareHolders()
    holders.observe([A], KNOWN, 0)
    both = Observation(LISTED.listed, KNOWN.checkpointed, {A.key: Holder("", "", "c", "uid-1", A.key)})
    holders.observe([A, newer], both, 1)
    assert holders.vacated() == set()
    assert holders.holder(newer.key) == Holder("ns", "pod", "c"), "not with the UID of the one before"
    holders.observe([A, newer], Observation(LISTED.listed, {}), 2)
    assert holders.vacated() == {A.key}


def test_what_an_observation_does_not_judge_stays_as_it_was() -> None:
    holders = ShareHolders()
    holders.observe([A], LISTED, 0)
    holders.observe([A], NOTHING, 1)
    holders.observe([A], LISTED, 2, {A.key})
    assert holders.vacated() == {A.key}
