"""Config, GPUs and live allocations -> daemons."""

from typing import Any

import pytest

from mpsd.config.model import Enforcement, FixedMemory, GpuSelection, MpsConfig, NodeConfig, Resource, UnitMemory
from mpsd.daemon.namespaces import MAX_NAME, Namespace, share_name
from mpsd.daemon.plan import DAEMON_MARKER, DomainPlan, namespace_of, plan
from mpsd.gpu.model import MIB, GpuInfo, Mode
from mpsd.localapi.snapshot import DesiredAllocation
from tests.desired import allocation

GIB = 1024 * MIB
UUIDS = tuple(f"GPU-51000000-0000-4000-8000-00000000000{n}" for n in range(4))
PAIR = (("pair0", (0, 1)),)


def gpus(count: int = 1, **facts: Any) -> list[GpuInfo]:
    return [GpuInfo(uuid=UUIDS[i], index=i, name="", **{"memory_total_bytes": 80 * GIB, **facts}) for i in range(count)]


def resource(request_gib: int = 8, **more: object) -> Resource:
    memory = FixedMemory(request_bytes=request_gib * GIB, limit_bytes=request_gib * GIB)
    values = {"name": "x/y", "memory": memory, "mode": Mode.SM_SHARING, "enforcement": Enforcement.NONE, **more}
    return Resource(**values)  # type: ignore[arg-type]


def planned(
    config: NodeConfig, infos: list[GpuInfo], *allocations: DesiredAllocation, protocol: int = 2
) -> tuple[DomainPlan, ...]:
    return plan(config, infos, allocations, lambda _: protocol)


def test_a_shareable_gpu_gets_a_daemon() -> None:
    (group,) = planned(NodeConfig(resources=(resource(),)), gpus())
    assert (group.not_shared, group.domain.name, group.spec.gpus) == (None, UUIDS[0], (UUIDS[0],))
    assert group.spec.pinned_limit_bytes == 8 * GIB
    assert group.spec.dirs.pipe == f"/run/gpufrac/mps/{UUIDS[0]}"
    assert group.spec.dirs.log == f"/var/log/gpufrac/mps/{UUIDS[0]}"
    assert dict(group.spec.environment) == {
        "CUDA_MPS_PIPE_DIRECTORY": group.spec.dirs.pipe,
        "CUDA_MPS_LOG_DIRECTORY": group.spec.dirs.log,
        "CUDA_MPS_PROTOCOL_VERSION": "2",
        "CUDA_VISIBLE_DEVICES": UUIDS[0],
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        DAEMON_MARKER: UUIDS[0],
    }


def test_the_main_socket_is_for_whom_asks_for_it_and_only_with_protocol_3() -> None:
    config = NodeConfig(resources=(resource(mode=Mode.TIME_SLICING),), groups=PAIR)
    plain = allocation(UUIDS[2], mode=Mode.TIME_SLICING)
    burst = allocation(*UUIDS[:2], mode=Mode.TIME_SLICING, group="pair0", key="k2", default_socket=True)
    for protocol in (2, 3):
        pair, lone = planned(config, gpus(3), plain, burst, protocol=protocol)
        assert (bool(pair.spec.links), bool(lone.spec.links)) == (protocol == 3, False)
        assert pair.spec.namespaces == ()


def test_a_group_has_one_daemon_for_all_its_gpus_and_its_size_is_that_of_the_smallest() -> None:
    infos = [*gpus(1), GpuInfo(uuid=UUIDS[1], index=1, name="", memory_total_bytes=40 * GIB), *gpus(3)[2:]]
    config = NodeConfig(resources=(resource(mode=Mode.TIME_SLICING),), groups=PAIR)
    pair, lone = planned(config, infos)
    assert (pair.domain.name, pair.spec.gpus, pair.domain.has_name) == ("pair0", UUIDS[:2], True)
    assert dict(pair.spec.environment)["CUDA_VISIBLE_DEVICES"] == f"{UUIDS[0]},{UUIDS[1]}"
    assert pair.spec.pinned_limit_bytes == 39 * GIB
    assert (lone.domain.name, lone.spec.pinned_limit_bytes) == (UUIDS[2], 79 * GIB)


def test_a_group_serves_only_what_names_it() -> None:
    config = NodeConfig(resources=(resource(8), resource(20, groups=("pair0",))), groups=PAIR)
    pair, lone = planned(config, gpus(3))
    assert (pair.spec.pinned_limit_bytes, lone.spec.pinned_limit_bytes) == (20 * GIB, 8 * GIB)


@pytest.mark.parametrize(("live_gib", "pinned_gib"), [(0, 8), (4, 8), (40, 40)])
def test_the_limit_is_never_below_a_live_one(live_gib: int, pinned_gib: int) -> None:
    live = allocation(UUIDS[0], limit_bytes=live_gib * GIB)
    (group,) = planned(NodeConfig(resources=(resource(8),)), gpus(), live)
    assert group.spec.pinned_limit_bytes == pinned_gib * GIB


@pytest.mark.parametrize(("protocol", "pinned_gib"), [(2, 8), (3, 20)])
def test_a_reload_does_not_loosen_the_only_limit_that_containers_on_several_gpus_have(
    protocol: int, pinned_gib: int
) -> None:
    config = NodeConfig(resources=(resource(20, groups=("pair0",)),), groups=PAIR)
    live = allocation(*UUIDS[:2], group="pair0", limit_bytes=8 * GIB)
    (pair,) = planned(config, gpus(2), live, protocol=protocol)
    assert pair.spec.pinned_limit_bytes == pinned_gib * GIB


def test_a_resource_of_some_gpus_counts_on_those() -> None:
    config = NodeConfig(resources=(resource(8), resource(16, gpus=GpuSelection(include=(1,)))))
    first, second = planned(config, gpus(2))
    assert (first.spec.pinned_limit_bytes, second.spec.pinned_limit_bytes) == (8 * GIB, 16 * GIB)


@pytest.mark.parametrize(
    ("config", "facts", "reason"),
    [
        (NodeConfig(resources=()), {"mig_enabled": True}, "MIG is enabled on it"),
        (NodeConfig(resources=(), gpus=GpuSelection(exclude=(0,))), {}, "it is excluded by the config"),
        (NodeConfig(resources=(), gpus=GpuSelection(include=(1,))), {}, "it is excluded by the config"),
        (
            NodeConfig(resources=(), groups=(("pair0", (UUIDS[0], 1)),)),
            {},
            "group pair0: its GPU 1 is not on this node",
        ),
        (NodeConfig(resources=(), groups=(("one", (0,)),)), {"mig_enabled": True}, "GPU 0 of group one: MIG is "),
        (
            NodeConfig(resources=(), gpus=GpuSelection(include=(0,))),
            {"config_index": None},
            "it is new, and the config means another GPU by its index 0",
        ),
        (
            NodeConfig(resources=()),
            {"memory_total_bytes": GIB, "memory_reserved_bytes": 512 * MIB},
            "nothing of its 1Gi is left after 512Mi reserved by the driver and 1Gi by the config",
        ),
    ],
)
def test_a_gpu_left_alone_says_why(config: NodeConfig, facts: dict[str, Any], reason: str) -> None:
    (group,) = planned(config, gpus(**facts))
    assert str(group.not_shared).startswith(reason)


def test_sockets_whose_paths_are_too_long_are_refused_before_a_start() -> None:
    config = NodeConfig(resources=(), mps=MpsConfig(run_root="/run/" + "r" * 40))
    assert planned(config, gpus())[0].not_shared is None
    (group,) = planned(config, gpus(), protocol=3)
    assert "107 is the most" in str(group.not_shared)
    assert "mps.runRoot" in str(group.not_shared)


def test_no_gpus_no_plans() -> None:
    assert planned(NodeConfig(resources=()), []) == ()
    gone = allocation(UUIDS[1])
    assert [group.domain.name for group in planned(NodeConfig(resources=()), gpus(), gone)] == [UUIDS[0]]


# Namespaces


def test_each_fixed_share_has_a_namespace_and_no_protocol_2_daemon_has_any() -> None:
    config = NodeConfig(resources=(resource(30, thread_percent=50), resource(8, name="x/t", mode=Mode.TIME_SLICING)))
    (group,) = planned(config, gpus(), protocol=3)
    assert group.spec.namespaces == tuple(Namespace(share_name("x/y", slot), 30 * GIB, 50) for slot in range(2))
    assert planned(config, gpus())[0].spec.namespaces == ()


def test_units_have_one_for_each_allocation_and_live_limits_win() -> None:
    units = resource(name="x/units", memory=UnitMemory(unit_bytes=GIB))
    config = NodeConfig(resources=(units, resource(40)))
    live = (
        allocation(UUIDS[0], key="a" * 20, resource="x/units", slot=None, limit_bytes=5 * GIB),
        allocation(UUIDS[0], key="b" * 20, resource="x/y", slot=0, limit_bytes=20 * GIB, thread_percent=10),
        allocation(UUIDS[0], key="c" * 20, resource="x/gone", slot=7, limit_bytes=2 * GIB),
        allocation(UUIDS[0], key="d" * 20, mode=Mode.TIME_SLICING),
    )
    (group,) = planned(config, gpus(), *live, protocol=3)
    assert set(group.spec.namespaces) == {
        Namespace("u_" + "a" * 20, 5 * GIB, None),
        Namespace(share_name("x/y", 0), 20 * GIB, 10),
        Namespace(share_name("x/gone", 7), 2 * GIB, None),
    }
    assert namespace_of(live[1], UUIDS[0]) in group.spec.namespaces


def test_the_client_limit_bounds_namespaces() -> None:
    config = NodeConfig(resources=(resource(1),), mps=MpsConfig(client_limit=4))
    assert len(planned(config, gpus(), protocol=3)[0].spec.namespaces) == 4


@pytest.mark.parametrize("name", ["gpufrac.dev/gpu-8gi", "A.B/UPPER_case-and.dots", "x/" + "n" * 63, "x/-"])
def test_namespace_names_are_what_mps_takes(name: str) -> None:
    made = share_name(name, 59)
    assert len(made) <= MAX_NAME
    assert set(made) <= set("abcdefghijklmnopqrstuvwxyz0123456789_")
    assert made != share_name(name, 58)
    assert made != share_name(name + "x", 59)
