"""Who gives way to whom."""

from mpsd.localapi.seats import KEPT, MAX_CONNECTIONS, Admission, Seats


def full(*, asking: bool) -> Seats[int]:
    seats: Seats[int] = Seats()
    for number in range(MAX_CONNECTIONS):
        assert seats.admit(number, float(number), ours=False) == Admission(admitted=True)
        if asking:
            assert seats.asks(number)
    return seats


def test_who_is_silent_for_longest_gives_way() -> None:
    seats = full(asking=False)
    assert seats.asks(0)
    seats.answered(1, 1000.0)
    assert seats.admit(100, 2000.0, ours=False) == Admission(admitted=True, leaves=2)
    assert len(seats) == MAX_CONNECTIONS
    assert not seats.asks(2), "its request came too late"


def test_who_is_served_is_never_sent_away_and_ours_have_places_besides() -> None:
    seats = full(asking=True)
    assert not seats.admit(100, 0.0, ours=False).admitted
    for number in range(KEPT):
        assert seats.admit(200 + number, 0.0, ours=True) == Admission(admitted=True)
        assert seats.asks(200 + number)
    assert not seats.admit(300, 0.0, ours=True).admitted
    seats.leave(0)
    assert not seats.admit(100, 0.0, ours=False).admitted
    assert seats.admit(300, 0.0, ours=True).admitted
