"""A plugin that has lost its records takes nothing away before it has looked at who runs."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from deviceplugin.grants.ledger import LedgerError
from deviceplugin.plan.allocation import ANNOTATED, Allocation
from deviceplugin.reconcile.firstlook import FirstLook
from mpsd.common.errors import NotReachableError
from mpsd.config.model import AnnotationsConfig, Enforcement, GpuSelection
from mpsd.gpu.model import Mode
from mpsd.localapi.snapshot import Desired, DesiredAllocation, GpuStatus, Snapshot
from tests.builders import info, snapshot, status, uuid
from tests.world import CONFIG, World, answer_with

ANNOTATIONS = AnnotationsConfig(gpus=GpuSelection(), enforcement=Enforcement.COOPERATIVE)


def running(world: World) -> Allocation:
    got = world.grant()
    world.run(got)
    world.holds((got, "uid-1"))
    world.write_checkpoint([world.checkpoint(got, "uid-1") | {"AllocResp": answer_with(got.key)}])
    world.keeper.observe()
    world.keeper.attach()
    return got


def lose_records(world: World) -> None:
    for allocation in world.broker.allocations():
        world.ledger.remove(allocation.key)


def told(world: World) -> set[str]:
    return {allocation.key for allocation in world.mpsd.told[-1].allocations}


def see_no_kubelet(world: World) -> None:
    world.kubelet.down = True


def see_no_checkpoint(world: World) -> None:
    (world.root / "device-plugins" / "kubelet_internal_checkpoint").rename(world.root / "aside")


def see_again(world: World) -> None:
    world.kubelet.down = False
    if (world.root / "aside").exists():
        (world.root / "aside").rename(world.root / "device-plugins" / "kubelet_internal_checkpoint")


@pytest.mark.parametrize("see_nothing", [see_no_kubelet, see_no_checkpoint])
@pytest.mark.parametrize("runs", [True, False])
def test_what_has_no_record_stays_until_the_kubelet_was_looked_at(
    world: World, see_nothing: Callable[[World], None], runs: bool
) -> None:
    got = running(world)
    lose_records(world)
    world.kubelet.containers.clear()  # a plain init container: in the checkpoint alone
    if not runs:
        world.write_checkpoint([])
    see_nothing(world)
    world.restart()
    world.now_s += 100
    world.keeper.attach()
    assert told(world) == set(world.specs.files) == {got.key}
    see_again(world)
    world.keeper.observe()
    world.tell()
    world.keeper.attach()
    assert told(world) == set(world.specs.files) == ({got.key} if runs else set())


def test_what_cannot_be_recorded_yet_is_not_taken_for_looked_at(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are gone and the disk is full: who runs was seen, and can be adopted only later."""
    got = running(world)
    lose_records(world)

    def full(allocation: Allocation) -> None:
        raise LedgerError("cannot record the allocation: No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(world.ledger, "put", full)
        world.restart()
        world.pass_time(100)
        assert world.broker.allocations() == []
        assert told(world) == set(world.specs.files) == {got.key}
    world.pass_time(5)
    world.tell()
    world.keeper.attach()
    assert told(world) == set(world.specs.files) == {got.key} == {a.key for a in world.broker.allocations()}


def test_what_has_a_record_and_may_not_start_is_withdrawn_all_the_same(world: World) -> None:
    running(world)
    world.kubelet.down = True
    world.infos = []  # mpsd sees no GPU
    world.restart()
    assert world.specs.files == {}


def test_gpus_that_mpsd_has_not_shown_are_no_reason_to_take_anything_away(world: World) -> None:
    got = running(world)
    lose_records(world)

    def partly(gpus: tuple[GpuStatus, ...]) -> Snapshot:
        return structs.replace(snapshot(*gpus), reason="GPU 0 has not been read")

    world.infos = [info(1)]
    world.tell = lambda daemon=None: world.broker.observe_snapshot(partly((status(info(1)),)))  # type: ignore[method-assign]
    world.restart()
    assert told(world) == set(world.specs.files) == {got.key}


def test_what_is_released_before_the_first_look_is_over_does_not_come_back(world: World) -> None:
    """A GPU that mpsd can't read keeps the look from being over for as long as it is so."""
    restored = running(world)

    def tell(daemon: object = None) -> None:
        world.broker.observe_snapshot(structs.replace(snapshot(status(info(0))), reason="GPU 1 has not been read"))

    world.tell = tell  # type: ignore[method-assign]
    world.restart()
    young = world.grant("b", f"{uuid(0)}::0")
    world.keeper.attach()
    assert told(world) == {restored.key, young.key}
    for allocation in (restored, young):
        world.broker.release(allocation.key)
    world.keeper.attach()
    assert told(world) == set()


def wanted(key: str, resource: str) -> DesiredAllocation:
    return DesiredAllocation(
        key=key, resource=resource, group=uuid(0), gpus=(uuid(0),), mode=Mode.SM_SHARING, limit_bytes=1 << 30
    )


def test_annotated_pods_are_asked_of_the_runtime(short_tmp: Path) -> None:
    world = World(short_tmp, structs.replace(CONFIG, annotations=ANNOTATIONS))
    world.mpsd.told.append(Desired(allocations=(wanted("a1", ANNOTATED), wanted("s1", "gpufrac.dev/a"))))
    world.keeper.attach()
    assert told(world) == {"a1"}, "the kubelet has shown that nobody has the share"
    world.broker.observe_pods(set())
    world.keeper.attach()
    assert told(world) == set()
    world.ledger.close()


def test_who_cannot_say_what_he_was_told_is_told_nothing(world: World) -> None:
    class Silent:
        def desired(self) -> Desired:
            raise NotReachableError("cannot reach mpsd")

    look = FirstLook(world.broker, Silent())
    with pytest.raises(NotReachableError):
        look.with_unknown(Desired(), look.looked())
    look.adopted(checkpoint=True, recorded=True)
    assert look.with_unknown(Desired(), look.looked()) == Desired()
