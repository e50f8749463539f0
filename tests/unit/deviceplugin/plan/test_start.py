"""When a container may start, and what it mounts."""

import re
from collections.abc import Callable

import pytest
from msgspec import structs

from deviceplugin.nri.model import Runtime
from deviceplugin.nri.runtimes import takes_cdi
from deviceplugin.plan.allocation import Allocation, ContainerRef
from deviceplugin.plan.enforcement import not_hard
from deviceplugin.plan.model import NO_CDI_OF_PLUGINS, HardAbility
from deviceplugin.plan.start import (
    Way,
    hard_objection,
    loosened,
    start_objection,
    way,
    with_effective_enforcement,
)
from mpsd.config.model import GIB, Delivery, Enforcement, MpsConfig
from mpsd.gpu.model import GpuHealth, Mode
from mpsd.localapi.snapshot import Attached, DaemonState, DaemonStatus, GpuStatus
from tests.builders import HARD, HOOKED_KIND, NOT_HARD, PLAIN_KIND, allocation, info, status, uuid

ONE = allocation("a", f"{uuid(0)}::0")
PAIR = allocation("pair", "pair0::0", gpus=(uuid(0), uuid(1)))
SLICED = allocation("t", f"{uuid(0)}::0", mode=Mode.TIME_SLICING)


def daemon(protocol: int = 2, **changes: object) -> DaemonStatus:
    fields: dict[str, object] = {
        "state": DaemonState.READY,
        "protocol": protocol,
        "pipe_directory": "/run/mps",
        "pinned_limit_bytes": 8 * GIB if protocol == 2 else None,
    }
    if protocol == 3:
        fields["attached"] = tuple(Attached(a.key, f"/run/ns/{a.group}", a.limit_bytes) for a in (ONE, PAIR))
    return DaemonStatus(**(fields | changes))  # type: ignore[arg-type]


def reported(live: Allocation, served: DaemonStatus | None, *others: GpuStatus) -> dict[str, GpuStatus]:
    """All its GPUs as mpsd would have them, then `others` in their stead."""
    gpus = [status(info(n), group=live.group, daemon=served, mode=live.mode) for n in range(len(live.gpus))]
    gpus += [status(info(5))]
    return {gpu.info.uuid: gpu for gpu in (*gpus, *others)}


@pytest.mark.parametrize("live", [ONE, PAIR], ids=["one", "pair"])
@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("state", [DaemonState.READY, DaemonState.DRAINING])
def test_it_may_start_on_a_daemon_that_serves(live: Allocation, protocol: int, state: DaemonState) -> None:
    gpus = reported(live, daemon(protocol, state=state))
    assert start_objection(live, gpus, NOT_HARD) is None
    assert way(live, gpus, MpsConfig()).pipe_directory == ("/run/mps" if protocol == 2 else f"/run/ns/{live.group}")


def attached(**changes: object) -> Callable[[Allocation], tuple[Attached, ...]]:
    return lambda live: (structs.replace(Attached(live.key, "/run/ns/x", live.limit_bytes), **changes),)


@pytest.mark.parametrize("live", [ONE, PAIR], ids=["one", "pair"])
@pytest.mark.parametrize(
    ("protocol", "changes", "said"),
    [
        (2, {"state": DaemonState.BACKOFF, "reason": "it died"}, "waiting for the MPS daemon of "),
        (2, {"wedged": True, "reason": "queries hang"}, "waiting for the MPS daemon of "),
        (3, {"state": DaemonState.DRAINING, "wedged": True}, "waiting for the MPS daemon of "),
        (2, {"pipe_directory": ""}, "names no pipe directory"),
        (2, {"pinned_limit_bytes": None}, "is below"),
        (2, {"pinned_limit_bytes": 8 * GIB - 1}, "is below"),
        (3, {"attached": ()}, "no MPS namespace yet"),
        (3, {"attached": attached(key="0" * 20)}, "no MPS namespace yet"),
        (3, {"attached": attached(objection="it has clients")}, "it has clients"),
        (3, {"attached": attached(limit_bytes=9 * GIB)}, f"limited to {9 * GIB} bytes, not to {8 * GIB}"),
        (3, {"attached": attached(pipe_directory="")}, "names no directory"),
    ],
)
def test_it_may_not_start_on_one_that_does_not_hold_its_limit(
    live: Allocation, protocol: int, changes: dict[str, object], said: str
) -> None:
    made = {key: value(live) if callable(value) else value for key, value in changes.items()}
    assert said in str(start_objection(live, reported(live, daemon(protocol, **made)), NOT_HARD))


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"daemon": daemon(unheld="none is up")}, "GPU 1: a process that skips MPS could take its GPU: none is up"),
        ({"mode": None, "reason": "foreign processes"}, "GPU 1: its GPU is not in sm-sharing yet: foreign processes"),
        ({"health": GpuHealth.LOST, "reason": "off the bus"}, "GPU 1: off the bus"),
        ({"daemon": None}, "waiting for the MPS daemon of group pair0 (GPU 0, 1)"),
        ({"daemon": daemon(name=uuid(1))}, "its 2 GPUs have 2 MPS daemons still, and it needs one for all of them"),
    ],
)
def test_every_member_of_a_group_must_be_fit(second: dict[str, object], said: str) -> None:
    made = daemon(name="pair0")
    fields: dict[str, object] = {"group": "pair0", "daemon": made, "mode": Mode.SM_SHARING}
    gpus = reported(PAIR, made, status(info(1), **(fields | second)))
    assert said in str(start_objection(PAIR, gpus, NOT_HARD))


def test_a_daemon_of_more_gpus_numbers_them_otherwise() -> None:
    gpus = reported(PAIR, daemon(), status(info(2), group="pair0", daemon=daemon(), mode=Mode.SM_SHARING))
    assert "serves 3 GPUs, and it uses 2 of them" in str(start_objection(PAIR, gpus, NOT_HARD))
    del gpus[uuid(1)]
    assert f"its GPU {uuid(1)} is not known to mpsd" in str(start_objection(PAIR, gpus, NOT_HARD))


def test_time_slicing_needs_no_daemon() -> None:
    gpus = reported(SLICED, None)
    assert start_objection(SLICED, gpus, NOT_HARD) is None
    assert way(SLICED, gpus, MpsConfig()) == Way()


def hard(mode: Mode, **changes: object) -> Allocation:
    fields = {"mode": mode, "enforcement": Enforcement.HARD, "gpu_kind": HOOKED_KIND}
    return structs.replace(ONE, **(fields | changes))


BURST = {"limit_bytes": 16 * GIB, "soft_bytes": 8 * GIB}


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(
    ("ability", "changes", "said", "level"),
    [
        (HARD, {}, "", {"hard"}),
        (HARD, BURST, "", {"hard"}),
        (HardAbility(), {}, "not known yet", None),
        (HARD, {"gpu_kind": PLAIN_KIND}, "has no hook", None),
        (HARD, {"gpu_kind": ""}, "nvidia runtime", None),
        (NOT_HARD, {}, "", {"cooperative", "none"}),
        (NOT_HARD, {"minimum": Enforcement.HARD}, "needs a hard limit", None),
        (NOT_HARD, BURST, "this node has lost them: driver 580.95.05", None),
    ],
)
def test_what_was_granted_hard_starts_as_the_node_can_and_its_resource_accepts(
    mode: Mode, ability: HardAbility, changes: dict[str, object], said: str, level: set[str] | None
) -> None:
    live = hard(mode, **changes)
    made = daemon(3, attached=(Attached(live.key, "/run/ns/x", live.limit_bytes),))
    got = start_objection(live, reported(live, made), ability)
    assert said in str(got) if said else got is None
    if level is not None:
        assert with_effective_enforcement(live, ability).enforcement in level


@pytest.mark.parametrize(
    ("ability", "changes", "said"),
    [
        ({}, {"gpu_kind": ""}, NO_CDI_OF_PLUGINS.message),
        ({"kind": ""}, {"gpu_kind": ""}, "nvidia runtime"),
        ({}, {"gpu_kind": PLAIN_KIND}, "has no hook"),
        ({}, {}, ""),
        ({"starts_wait": True}, {"gpu_kind": ""}, ""),
    ],
)
def test_who_sets_no_limit_of_an_annotated_container_is_named(
    ability: dict[str, object], changes: dict[str, object], said: str
) -> None:
    ref = ContainerRef(namespace="ns", pod="p", pod_uid="u", container="c")
    live = hard(Mode.TIME_SLICING, container=ref, **changes)
    got = hard_objection(live, structs.replace(HARD, **({"starts_wait": False} | ability)))
    assert said in str(got) if said else got is None


def test_an_annotated_container_gets_its_gpus_as_the_nvidia_runtime_makes_them_where_that_sets_limits() -> None:
    """A runtime that takes no CDI devices from plugins, and a toolkit whose nvidia runtime injects the hook."""
    ability = structs.replace(HARD, starts_wait=False, takes_cdi=False, hooked=frozenset((HOOKED_KIND, "")))
    assert ability.of_annotated().kind == ""
    assert not_hard(Delivery.CDI, ability.of_annotated()) is None


def test_the_runtimes_named_are_the_first_that_take_cdi_devices_of_plugins() -> None:
    versions = re.findall(r"(containerd|CRI-O) (\d+)\.(\d+)", NO_CDI_OF_PLUGINS.message)
    assert len(versions) == 2
    for name, major, minor in versions:
        assert takes_cdi(Runtime(name=name.lower(), version=f"{major}.{minor}.0"))
        assert not takes_cdi(Runtime(name=name.lower(), version=f"{major}.{int(minor) - 1}.9"))


@pytest.mark.parametrize("mode", Mode)
def test_a_level_that_is_lost_is_told_in_english(mode: Mode) -> None:
    got = hard_objection(hard(mode, minimum=Enforcement.HARD), NOT_HARD)
    assert ("enforces none by now" if mode is Mode.TIME_SLICING else "enforces cooperative ones by now") in str(got)


@pytest.mark.parametrize(
    ("served", "said"),
    [
        (daemon(3, attached=(Attached(ONE.key, "/run/ns/_main", 0),)), ""),
        (daemon(3, attached=()), "no way to its MPS daemon yet"),
        (daemon(3, attached=(Attached(ONE.key, "", 0),)), "names no directory"),
        (daemon(2, pinned_limit_bytes=80 * GIB), "speaks protocol 2"),
        (daemon(3, state=DaemonState.BACKOFF), "waiting for the MPS daemon of"),
    ],
)
def test_a_time_slicing_share_among_borrowers_needs_the_daemons_main_socket(served: DaemonStatus, said: str) -> None:
    live = hard(Mode.TIME_SLICING, soft_bytes=8 * GIB)
    gpus = reported(live, served)
    got = start_objection(live, gpus, HARD)
    assert said in str(got) if said else got is None
    if not said:
        assert way(live, gpus, MpsConfig()).pipe_directory == "/run/ns/_main"


@pytest.mark.parametrize(
    ("live", "protocol", "loose"),
    [
        (PAIR, 2, True),
        (structs.replace(PAIR, enforcement=Enforcement.NONE), 2, False),
        (structs.replace(PAIR, enforcement=Enforcement.HARD), 2, False),
        (PAIR, 3, False),
        (ONE, 2, False),
    ],
)
def test_a_group_whose_one_limit_was_raised_holds_nobody_to_the_old(
    live: Allocation, protocol: int, loose: bool
) -> None:
    gpus = reported(live, daemon(protocol, pinned_limit_bytes=40 * GIB))
    assert bool(loosened(live, gpus)) is loose
    assert loosened(live, reported(live, daemon(protocol, pinned_limit_bytes=8 * GIB))) is None


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_container_mounts_the_shared_memory_that_the_daemon_which_runs_has(protocol: int) -> None:
    """Not what the config says: it may have been switched on while a daemon keeps its clients."""
    for directory in ("", "/run/mps.shm"):
        gpus = reported(ONE, daemon(protocol, shared_memory=directory))
        for mps in (MpsConfig(), MpsConfig(shared_memory=True)):
            assert way(ONE, gpus, mps).shared_memory == directory


@pytest.mark.parametrize("protocol", [2, 3])
def test_of_an_mpsd_that_does_not_tell_the_shared_memory_the_config_does(protocol: int) -> None:
    """An older one, until it is replaced, too: a container without it would not reach its daemon."""
    gpus = reported(ONE, daemon(protocol, shared_memory=None))
    assert way(ONE, gpus, MpsConfig()).shared_memory == ""
    assert way(ONE, gpus, MpsConfig(shared_memory=True)).shared_memory.endswith(".shm")
