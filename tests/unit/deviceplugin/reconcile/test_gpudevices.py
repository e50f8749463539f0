"""Which CDI kind gives containers their GPUs."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from cdi.model import ContainerEdits, Device, Hook, Spec
from cdi.registry import MEMORY_HOOK, Registry
from deviceplugin.plan.model import HardAbility
from deviceplugin.reconcile import gpudevices
from deviceplugin.reconcile.gpudevices import RUNTIME, Choice, DeviceChooser, choose
from deviceplugin.reconcile.toolkit import Toolkit
from mpsd.config.model import CdiConfig, GpuDevices
from mpsd.localapi.snapshot import HardLimits
from tests.builders import CAN, CANNOT, HOOKED_KIND, PLAIN_KIND, snapshot, uuid
from tests.unit.cdi.support import env_spec, registry_of
from tests.world import CONFIG, World

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
        chooser.choose(snapshot(*world.broker.node.gpus, hard_limits=told))
        assert (chooser.choice.kind, world.broker.node.hard.kind) == (kind, kind)
    world.ledger.close()


def test_before_any_gpu_is_known_nothing_is_forgotten() -> None:
    for setting in (GpuDevices.AUTO, GpuDevices.ENVVAR):
        assert choose(setting, registry_of(), (), BEFORE, hard=True).hooked == BEFORE.hooked
    assert choose(GpuDevices.ENVVAR, registry_of(), (), BEFORE, hard=True).kind == RUNTIME


@pytest.mark.parametrize(
    ("registry", "toolkit", "before", "sets"),
    [
        (registry_of(HOOKED), None, Choice(""), True),  # who writes it into a spec injects it, too
        (registry_of(PLAIN), None, Choice(""), False),
        (registry_of(), None, Choice(""), False),
        (registry_of(), True, Choice(""), True),
        (registry_of(PLAIN), True, Choice(""), True),
        (registry_of(), False, Choice("", hooked=frozenset({RUNTIME})), False),
        (registry_of(), None, Choice("", hooked=frozenset({RUNTIME})), True),  # specs come back late after a reboot
        (registry_of(PLAIN), None, Choice("", hooked=frozenset({RUNTIME})), False),
    ],
)
def test_the_nvidia_runtime_sets_limits_where_its_toolkit_has_the_hook(
    registry: Registry, toolkit: bool | None, before: Choice, sets: bool
) -> None:
    got = choose(GpuDevices.ENVVAR, registry, UUIDS, before, hard=True, toolkit=toolkit)
    assert got.kind == RUNTIME
    assert (RUNTIME in got.hooked) is sets
    ability = HardAbility(CAN, got.kind, got.hooked)
    assert (ability.missing == ()) is sets
    assert sets or "1.20.1" in str(ability.missing[0])


@pytest.mark.parametrize(
    ("says", "hooks"),
    [
        ("NVIDIA Container Toolkit CLI version 1.20.1\ncommit: abc", True),
        ("NVIDIA Container Toolkit CLI version 1.21.0-rc.1", True),
        ("NVIDIA Container Toolkit CLI version 1.20.0", False),
        ("NVIDIA Container Toolkit CLI version 1.17.8", False),
        ("what?", None),
    ],
)
def test_the_version_of_a_toolkit_is_asked_once_until_its_program_changes(
    short_tmp: Path, says: str, hooks: bool | None
) -> None:
    program, count = short_tmp / "nvidia-ctk", short_tmp / "count"
    program.write_text(f"#!/bin/sh\necho >> {count}\ncat <<E\n{says}\nE\n")
    program.chmod(0o755)
    toolkit = Toolkit(str(program))
    assert [toolkit.hooks(), toolkit.hooks()] == [hooks, hooks]
    assert len(count.read_text().splitlines()) == 1
    program.unlink()
    assert Toolkit(str(program)).hooks() is None


def test_a_toolkit_is_not_asked_on_the_way_to_a_registration(short_tmp: Path) -> None:
    asked: list[bool] = []

    def hooks() -> bool:
        asked.append(True)
        return True

    world = World(short_tmp, structs.replace(CONFIG, cdi=CdiConfig(gpu_devices=GpuDevices.ENVVAR)))
    chooser = DeviceChooser(world.broker, lambda _: registry_of(PLAIN), Choice(""), hooks)
    chooser.choose()
    assert (asked, chooser.choice.hooked) == ([], frozenset())
    for _ in range(2):
        chooser.choose_if_due()
    assert (asked, chooser.choice.hooked) == ([True], frozenset({RUNTIME}))
    world.ledger.close()


def test_specs_of_others_that_come_late_are_read_soon(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reboot they are made when we already run; our own files come and go with every pod."""
    monkeypatch.setattr(gpudevices, "STATIC_DIRECTORY", str(short_tmp / "not-there"))
    world = World(short_tmp, structs.replace(CONFIG, cdi=CdiConfig(directory=str(short_tmp / "cdi"))))
    (short_tmp / "cdi").mkdir()
    scans: list[int] = []

    def scan(directories: Sequence[str]) -> Registry:
        scans.append(1)
        return Registry()

    chooser = DeviceChooser(world.broker, scan, Choice(""))
    chooser.choose_if_due()
    before = len(scans)
    assert not chooser.specs_changed(), "nothing to compare with yet"
    (short_tmp / "cdi" / "gpufrac.dev-allocation_0123.json").write_text("{}")
    assert not chooser.specs_changed()
    chooser.choose_if_due()
    assert len(scans) == before
    (short_tmp / "cdi" / "nvidia.yaml").write_text("")
    assert chooser.specs_changed()
    chooser.choose_if_due()
    assert len(scans) == before + 1
    assert not chooser.specs_changed()
    world.ledger.close()
