"""A node with every neighbour faked, for all tests of this room that need no other."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.world import World


@pytest.fixture
def world(short_tmp: Path) -> Iterator[World]:
    made = World(short_tmp)
    yield made
    made.ledger.close()
