"""Fixtures of the front end for annotated pods."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import config, fixed, resource
from tests.unit.deviceplugin.annotated.frontendnode import Node, annotated


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    while Node.opened:
        Node.opened.pop().ledger.close()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, config(resource("a", fixed(8)), annotations=annotated()))
