"""Supervisors that run while a test does."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from mpsd.config.model import MpsConfig
from mpsd.daemon.exits import ExitWatcher
from mpsd.daemon.host import ProtocolChoice
from tests.unit.mpsd.supervision.bench import CALM, FAST, PAIR, Bench, running


@pytest.fixture
def watchless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake daemons have no process to watch."""
    monkeypatch.setattr(ExitWatcher, "watch", lambda _self, _identity: None)


@pytest.fixture
def calm(short_tmp: Path, watchless: None) -> Iterator[Bench]:
    with running(Bench(short_tmp, CALM)) as bench:
        yield bench


@pytest.fixture
def fast(short_tmp: Path, watchless: None) -> Iterator[Bench]:
    with running(Bench(short_tmp, FAST)) as bench:
        yield bench


@pytest.fixture
def pair(short_tmp: Path, watchless: None) -> Iterator[Bench]:
    config = msgspec.structs.replace(PAIR, mps=MpsConfig(run_root=f"{short_tmp}/run"))
    with running(Bench(short_tmp, CALM, config)) as bench:
        yield bench


# Protocol 3
@pytest.fixture
def three(short_tmp: Path, watchless: None) -> Iterator[Bench]:
    bench = Bench(short_tmp, CALM)
    bench.host.choice = ProtocolChoice(3)
    with running(bench):
        yield bench
