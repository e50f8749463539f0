"""Which CDI kind gives containers their GPUs."""

from pathlib import Path

import pytest

from cdi.model import ContainerEdits, Device, Hook, Spec
from cdi.registry import MEMORY_HOOK, Registry
from deviceplugin.gpudevices import Choice, DeviceChooser, choose
from mpsd.config.model import GpuDevices
from mpsd.snapshot import HardLimits
from tests.builders import CAN, CANNOT, HOOKED_KIND, PLAIN_KIND, snapshot, uuid
from tests.unit.cdi.support import env_spec, registry_of
from tests.world import World

UUIDS = (uuid(0), uuid(1))
HOOK = ContainerEdits(hooks=(Hook("createRuntime", "/usr/bin/nvidia-ctk", ("nvidia-ctk", "hook", MEMORY_HOOK)),))
PLAIN = env_spec(PLAIN_KIND, *UUIDS)
HOOKED = Spec(HOOKED_KIND, tuple(Device(uuid, HOOK) for uuid in UUIDS))
BEFORE = Choice(HOOKED_KIND, hooked=frozenset({HOOKED_KIND}))


@pytest.mark.parametrize(
    ("registry", "hard", "before", "kind", "hooked"),
    [
        (registry_of(PLAIN, HOOKED), False, Choice(""), PLAIN_KIND, True),
        (registry_of(PLAIN, HOOKED), True, Choice(""), HOOKED_KIND, True),
        (registry_of(PLAIN, HOOKED), True, Choice(PLAIN_KIND), HOOKED_KIND, True),
        (registry_of(PLAIN), True, Choice(""), PLAIN_KIND, False),
        (registry_of(PLAIN), True, BEFORE, PLAIN_KIND, False),
        (registry_of(), True, BEFORE, HOOKED_KIND, True),
        (registry_of(), True, Choice(""), "", False),
    ],
    ids=["not-hard", "hard", "better-than-before", "no-hook", "hook-lost", "late-after-a-reboot", "no-cdi"],
)
def test_kind(registry: Registry, hard: bool, before: Choice, kind: str, hooked: bool) -> None:
    got = choose(GpuDevices.AUTO, registry, UUIDS, before, hard=hard)
    assert got.kind == kind
    assert (HOOKED_KIND in got.hooked) is hooked
    assert bool(got.trouble) is (registry == registry_of() and bool(before.kind))


def test_a_young_mpsd_that_has_not_looked_yet_takes_no_better_kind_away(short_tmp: Path) -> None:
    world = World(short_tmp)
    world.hard_limits = CAN
    world.tell()
    chooser = DeviceChooser(world.broker, lambda _: registry_of(PLAIN, HOOKED), Choice(""))
    for told, kind in ((HardLimits(), HOOKED_KIND), (CANNOT, PLAIN_KIND), (CAN, HOOKED_KIND)):
        chooser.choose(snapshot(*world.broker.gpus(), hard_limits=told))
        assert (chooser.choice.kind, world.broker.hard.kind) == (kind, kind)
    world.ledger.close()


def test_before_any_gpu_is_known_nothing_is_forgotten_and_envvar_sets_no_limits() -> None:
    assert choose(GpuDevices.AUTO, registry_of(), (), BEFORE, hard=True).hooked == BEFORE.hooked
    got = choose(GpuDevices.ENVVAR, registry_of(HOOKED), UUIDS, BEFORE, hard=True)
    assert (got.kind, got.hooked) == ("", frozenset())
