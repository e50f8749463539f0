"""The supervisor's thread: messages in order, a turn after each, and nothing that ends it but its end."""

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from mpsd.common import threads
from mpsd.common.errors import ConfigError, TransientError
from mpsd.supervision.loop import Loop
from tests.waiting import WAIT_S


class Owner:
    """Has a loop whose turns and messages it writes down."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.ended = self.turn_fails = False
        self.turned = threading.Event()
        self.loop = Loop(self.turn, lambda: self.pause_s, lambda: self.ended)
        self.pause_s = 3600.0

    def turn(self) -> None:
        if self.turn_fails:
            raise ZeroDivisionError
        self.done.append("turn")
        self.turned.set()

    def say(self, word: str) -> None:
        self.done.append(word)

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    owner.loop.start()
    yield owner
    owner.loop.end(owner.end, WAIT_S)


def test_a_turn_follows_each_message_in_the_order_they_came(owner: Owner) -> None:
    for word in "abc":
        owner.loop.post(partial(owner.say, word))
    assert owner.loop.ask(lambda: list(owner.done)) == ["a", "turn", "b", "turn", "c", "turn"]


def test_a_turn_comes_without_a_message_when_the_pause_is_over(owner: Owner) -> None:
    owner.pause_s = 0.01
    owner.loop.post(owner.turned.clear)
    assert owner.turned.wait(WAIT_S)


def test_a_question_raises_what_its_answer_raised_and_the_loop_goes_on(owner: Owner) -> None:
    def refuse() -> None:
        raise ConfigError("no such thing")

    with pytest.raises(ConfigError, match="no such thing"):
        owner.loop.ask(refuse)
    assert owner.loop.ask(lambda: "on") == "on"


def test_a_message_that_fails_is_counted_and_costs_no_other(owner: Owner) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    before = threads.failures().get("supervisor", 0)
    owner.loop.post(fail)
    assert owner.loop.ask(lambda: "on") == "on"
    assert threads.failures()["supervisor"] == before + 1


def _wait(gate: threading.Event) -> None:
    assert gate.wait(WAIT_S)


def test_a_question_is_not_waited_for_for_ever(owner: Owner) -> None:
    gate = threading.Event()
    owner.loop.post(partial(_wait, gate))
    with pytest.raises(TransientError, match=r"within 0\.01 s"):
        owner.loop.ask(lambda: None, timeout_s=0.01)
    gate.set()


def test_it_turns_when_it_is_made_to(owner: Owner) -> None:
    assert owner.loop.turns(WAIT_S)
    assert owner.done == ["turn"]


def test_a_turn_that_fails_is_none(owner: Owner) -> None:
    owner.turn_fails = True
    assert not owner.loop.turns(0.05)
    owner.turn_fails = False
    assert owner.loop.turns(WAIT_S)


def test_a_loop_that_hangs_does_not_turn(owner: Owner) -> None:
    gate = threading.Event()
    owner.loop.post(partial(_wait, gate))
    assert not owner.loop.turns(0.01)
    gate.set()
    assert owner.loop.turns(WAIT_S)


def test_it_ends_by_its_last_message_and_one_that_never_ran_at_once(owner: Owner) -> None:
    owner.loop.end(owner.end, WAIT_S)
    owner.loop.post(partial(owner.say, "too late"))
    with pytest.raises(TransientError):
        owner.loop.ask(lambda: None, timeout_s=0.01)
    assert "too late" not in owner.done
    Owner().loop.end(owner.end, WAIT_S)
