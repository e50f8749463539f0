from typing import Any

import pytest

from mpsd.config.model import (
    Enforcement,
    FixedMemory,
    GpuSelection,
    MpsConfig,
    NodeConfig,
    Resource,
)
from mpsd.gpu.model import MIB, GpuInfo, GpuState, Inventory, Mode
from mpsd.plan import DAEMON_MARKER, daemon_spec, plan

GIB = 1024 * MIB
UUID = "GPU-51000000-0000-4000-8000-00000000000{}"


def inventory(count: int = 1, **facts: Any) -> Inventory:
    infos = [
        GpuInfo(uuid=UUID.format(i), index=i, name="", **{"memory_total_bytes": 80 * GIB, **facts})
        for i in range(count)
    ]
    return Inventory(gpus=tuple(GpuState(info=info) for info in infos))


def resource(request_gib: int = 8, **more: object) -> Resource:
    memory = FixedMemory(request_bytes=request_gib * GIB, limit_bytes=request_gib * GIB)
    values = {"mode": Mode.SM_SHARING, "enforcement": Enforcement.NONE, **more}
    return Resource(name="x/y", memory=memory, **values)  # type: ignore[arg-type]


def test_a_shareable_gpu_gets_a_daemon() -> None:
    (gpu,) = plan(NodeConfig(resources=(resource(),)), inventory())
    assert gpu.not_shared == ""
    assert gpu.usable_bytes == 79 * GIB
    assert gpu.daemon is not None
    assert gpu.daemon.pinned_limit_bytes == 8 * GIB
    assert gpu.daemon.dirs.pipe == f"/run/gpufrac/mps/{UUID.format(0)}"
    assert gpu.daemon.dirs.log == f"/var/log/gpufrac/mps/{UUID.format(0)}"
    assert dict(gpu.daemon.environment) == {
        "CUDA_MPS_PIPE_DIRECTORY": gpu.daemon.dirs.pipe,
        "CUDA_MPS_LOG_DIRECTORY": gpu.daemon.dirs.log,
        "CUDA_VISIBLE_DEVICES": UUID.format(0),
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        DAEMON_MARKER: UUID.format(0),
    }


def test_without_an_sm_sharing_resource_the_limit_is_all_usable_memory() -> None:
    (gpu,) = plan(NodeConfig(resources=(resource(mode=Mode.TIME_SLICING),)), inventory())
    assert gpu.daemon is not None
    assert gpu.daemon.pinned_limit_bytes == gpu.usable_bytes


@pytest.mark.parametrize(("live_gib", "pinned_gib"), [(0, 8), (4, 8), (40, 40)])
def test_the_limit_is_never_below_a_live_one(live_gib: int, pinned_gib: int) -> None:
    config = NodeConfig(resources=(resource(8),))
    spec = daemon_spec(config, inventory().gpus[0].info, live_gib * GIB)
    assert spec.pinned_limit_bytes == pinned_gib * GIB


def test_a_resource_of_some_gpus_counts_on_those() -> None:
    config = NodeConfig(resources=(resource(8), resource(16, gpus=GpuSelection(include=(1,)))))
    first, second = plan(config, inventory(2))
    assert first.daemon is not None
    assert second.daemon is not None
    assert (first.daemon.pinned_limit_bytes, second.daemon.pinned_limit_bytes) == (8 * GIB, 16 * GIB)


@pytest.mark.parametrize(
    ("config", "facts", "reason"),
    [
        (NodeConfig(resources=()), {"mig_enabled": True}, "MIG is enabled on it"),
        (NodeConfig(resources=(), gpus=GpuSelection(exclude=(0,))), {}, "it is excluded by the config"),
        (NodeConfig(resources=(), gpus=GpuSelection(include=(1,))), {}, "it is excluded by the config"),
        (
            NodeConfig(resources=(), groups=(("pair0", (UUID.format(0), 1)),)),
            {},
            "it is a member of group pair0: groups are not supported yet by this version",
        ),
        (
            NodeConfig(resources=(), groups=(("pair0", (0, 1)),)),
            {},
            "it is a member of group pair0: groups are not supported yet by this version",
        ),
        (
            NodeConfig(resources=()),
            {"memory_total_bytes": GIB, "memory_reserved_bytes": 512 * MIB},
            "nothing of its 1Gi is left after 512Mi reserved by the driver and 1Gi by the config",
        ),
        (
            NodeConfig(resources=(), mps=MpsConfig(protocol="3")),
            {},
            "mps.protocol 3 is not supported yet by this version: set it to auto or 2",
        ),
    ],
)
def test_a_gpu_left_alone_says_why(config: NodeConfig, facts: dict[str, Any], reason: str) -> None:
    (gpu,) = plan(config, inventory(**facts))
    assert (gpu.not_shared, gpu.daemon) == (reason, None)


def test_no_gpus_no_plans() -> None:
    assert plan(NodeConfig(resources=()), Inventory(reason="no driver")) == ()
