"""Backoff and buckets."""

from hypothesis import given
from hypothesis import strategies as st

from mpsd.common.pacing import Backoff, Bucket, Failure


def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_reset() -> None:
    backoff = Backoff(0.5, 60.0, lambda: 0.0)
    assert [backoff.pause_s() for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    backoff.reset()
    assert backoff.pause_s() == 0.5


def test_what_will_not_heal_at_once_is_tried_slowly_after_some_refusals() -> None:
    backoff = Backoff(0.5, 60.0, lambda: 0.0)
    assert [backoff.pause_s(kind=Failure.REFUSED) for _ in range(6)] == [0.5, 1, 2, 4, 60, 60]
    backoff.reset()
    assert backoff.pause_s(kind=Failure.REFUSED) == 0.5


@given(st.lists(st.sampled_from(Failure)))
def test_each_kind_of_failure_counts_by_itself(kinds: list[Failure]) -> None:
    """What follows when a server comes again after a long time is not what went before it."""
    together = Backoff(0.5, 60.0, lambda: 0.0)
    alone = {kind: Backoff(0.5, 60.0, lambda: 0.0) for kind in Failure}
    for kind in kinds:
        assert together.pause_s(kind=kind) == alone[kind].pause_s(kind=kind)


def test_the_server_may_ask_for_more() -> None:
    assert Backoff(0.5, 60.0, lambda: 0.0).pause_s(7.0) == 7.0
    assert Backoff(0.5, 60.0, lambda: 0.0).pause_s(0.1) == 0.5


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 200))
def test_pauses_stay_within_their_bounds(jitter: float, failures: int) -> None:
    backoff = Backoff(0.5, 60.0, lambda: jitter)
    for _ in range(failures):
        backoff.pause_s()
    assert 0.25 <= backoff.pause_s() <= 60.0


@given(st.lists(st.floats(0, 30), max_size=200))
def test_a_bucket_gives_its_burst_and_then_its_rate(gaps: list[float]) -> None:
    now_s = 100.0
    bucket = Bucket(5, 10.0, now_s)
    taken = 0
    for gap in gaps:
        now_s += gap
        waits = bucket.wait_s(now_s)
        got = bucket.take(now_s)
        assert got == (waits == 0.0)
        taken += got
        assert taken <= 5 + (now_s - 100.0) / 10.0 + 1e-6
    later_s = now_s + bucket.wait_s(now_s)
    assert bucket.take(later_s), "who waits as long as told finds one"
