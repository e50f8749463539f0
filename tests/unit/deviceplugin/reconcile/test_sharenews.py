"""What is told of shares: that they are granted, may start or not, and are given back; each once."""

from pathlib import Path

from deviceplugin.reconcile.sharenews import PATIENCE_S
from mpsd.localapi.snapshot import DaemonState, DaemonStatus
from tests.builders import uuid
from tests.world import World

DOWN = DaemonStatus(state=DaemonState.BACKOFF, reason="it died", reason_code="Exited")


def test_a_share_is_told_from_its_grant_to_its_release(world: World) -> None:
    got = world.grant()
    world.tell()
    world.keeper.attach()
    world.run(got)
    world.keeper.observe()
    world.pass_time(20.0)
    granted = world.heard.words[0]
    assert world.heard.take() == [("Granted", ""), ("PermissionGiven", "")]
    assert (granted.subject.key, granted.subject.gpus, granted.subject.indices) == (got.key, (uuid(0),), (0,))
    assert (granted.detail, granted.unix_s) == ("8Gi, sm-sharing", got.created_unix_s)
    world.kubelet.containers.clear()
    world.pass_time(120.0)
    (released,) = world.heard.words
    assert (released.kind, released.subject.key, released.subject.gpus) == ("Released", got.key, (uuid(0),))


def test_a_permission_that_is_withdrawn_is_told_with_the_reason_and_so_is_its_return(world: World) -> None:
    world.run(world.grant())
    world.heard.take()
    for _ in range(3):
        world.tell(DOWN)
        world.keeper.attach()
    assert world.heard.take() == [("PermissionWithdrawn", "WaitsForDaemon")]
    world.broker.observe_snapshot(None)
    world.keeper.attach()
    assert world.heard.take() == [("PermissionWithdrawn", "MpsdAway")], "another reason is news"
    world.tell()
    world.keeper.attach()
    assert world.heard.take() == [("PermissionGiven", "")]


def test_a_share_that_waits_is_told_after_a_while(world: World) -> None:
    world.daemon = DOWN
    world.tell()
    world.run(world.grant())
    assert world.heard.take() == [("Granted", "")]
    world.now_s += PATIENCE_S
    world.keeper.attach()
    world.keeper.attach()
    assert world.heard.take() == [("PermissionDelayed", "WaitsForDaemon")]
    world.daemon = None
    world.tell()
    world.keeper.attach()
    assert world.heard.take() == [("PermissionGiven", "")]


def test_a_plugin_that_starts_says_what_there_is_and_whoever_writes_knows_what_is_news(short_tmp: Path) -> None:
    world = World(short_tmp)
    got = world.grant()
    world.run(got)
    world.heard.take()
    world.heard.settled.clear()
    world.restart()
    assert world.heard.settled == [("Released", frozenset({got.key}))]
    assert world.heard.take() == [("Granted", ""), ("PermissionGiven", "")]
    world.ledger.close()


def test_what_is_there_is_told_only_once_it_was_looked_at_what_files_are_there(short_tmp: Path) -> None:
    world = World(short_tmp)
    world.grant()
    world.heard.take()
    world.broker.close()
    world.broker = world.open_broker(world.broker.node.config)
    world.tell = lambda daemon=None: None  # type: ignore[method-assign]
    world.begin()
    world.keeper.attach()
    assert world.heard.take() == [], "mpsd did not say anything yet, so files are as an earlier run left them"
    world.ledger.close()
