"""Waiting for a signal: none is missed, and a second one ends the process."""

import os
import signal
import subprocess
import sys

import pytest

from mpsd.common.stopsignal import SIGNALS, StopSignal
from tests.waiting import WAIT_S


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_wait(number: signal.Signals) -> None:
    before = {each: signal.getsignal(each) for each in SIGNALS}
    try:
        with StopSignal() as stop:
            assert (stop.is_set(), stop.wait(0.0)) == (False, False)
            os.kill(os.getpid(), number)
            assert stop.wait(WAIT_S)
            assert stop.is_set()
            assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_without_a_signal_handlers_come_back() -> None:
    before = {each: signal.getsignal(each) for each in SIGNALS}
    with StopSignal() as stop:
        assert not stop.wait(0.001)
    assert {each: signal.getsignal(each) for each in SIGNALS} == before


PROGRAM = """
import sys
from mpsd.common.stopsignal import StopSignal
with StopSignal() as stop:
    print("ready", flush=True)
    stop.wait()
    print("stops", flush=True)
    sys.stdin.read()
"""


def test_signals_at_any_moment_are_seen_and_the_second_ends_it() -> None:
    for _ in range(10):
        with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            child.send_signal(signal.SIGTERM)
            assert child.stdout.readline() == b"stops\n"
            child.send_signal(signal.SIGTERM)
            assert child.wait(WAIT_S) == -signal.SIGTERM
