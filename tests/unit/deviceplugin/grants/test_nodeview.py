"""The planner's view is made anew only where something that it is made of changed."""

from pathlib import Path
from typing import Any

import pytest

from deviceplugin.grants import nodeview
from deviceplugin.plan import view
from deviceplugin.plan.model import NodeView
from tests.builders import config, fixed, resource
from tests.world import SHARE, World

A = "gpufrac.dev/a"


def test_a_grant_and_a_look_without_news_make_no_view(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(short_tmp, config(resource("a", fixed(8))))
    made: list[NodeView] = []
    real = view.node_view

    def node_view(*args: Any, **kwargs: Any) -> NodeView:
        made.append(real(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(nodeview, "node_view", node_view)
    world.broker.publish()
    made.clear()
    world.broker.allocate(A, (SHARE,))
    world.broker.publish()
    first_grant = len(made)
    world.broker.publish()
    assert (first_grant, len(made)) == (1, 1), "the first grant on a group is one that the view keeps"
    world.broker.apply_config(config(resource("a", fixed(4))))
    world.broker.publish()
    assert len(made) == 2
    world.ledger.close()
