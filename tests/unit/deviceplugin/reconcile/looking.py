"""What a look at containers and their processes shows, for tests."""

from collections.abc import Mapping

from msgspec import structs

from deviceplugin.plan.allocation import Allocation
from mpsd.common.processes import PodProcess
from mpsd.localapi.snapshot import GpuClient
from tests.builders import reported, snapshot, uuid
from tests.world import World


def hold_by_checkpoint(world: World, got: Allocation) -> None:
    world.holds((got, "uid-1"))


AS_GRANTED = {"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=8192M"}


def running(
    *markers: str | None, variables: Mapping[str, str] = AS_GRANTED, unreadable: bool = False
) -> list[PodProcess]:
    """Processes of a pod: the pause container, and one container per marker."""
    pause = PodProcess(1, "sandbox", None, "pause", unreadable=unreadable)
    return [
        pause,
        *(
            PodProcess(10 + n, f"c{n}", marker, "python3", unreadable and marker is None, variables)
            for n, marker in enumerate(markers)
        ),
    ]


def looks(world: World, seconds: float) -> set[str]:
    """The unenforced after looking for that long."""
    end_s = world.now_s + seconds
    while world.now_s < end_s:
        world.now_s += 5
        world.keeper.observe()
        world.keeper.check_markers()
    return set(world.keeper.report.unenforced)


def begun(world: World, got: Allocation) -> None:
    world.run(got)
    hold_by_checkpoint(world, got)
    (world.root / "pods" / "uid-1" / "containers" / "c").mkdir(parents=True)


def client(pid: int = 42, key: str | None = None, pod_uid: str = "", *, mps: bool = True) -> GpuClient:
    return GpuClient(pid=pid, allocation_key=key, pod_uid=pod_uid, mps=mps)


def outside(world: World, *clients: GpuClient, **changes: object) -> dict[str, str]:
    """The unenforced after one look at a GPU with these clients."""
    world.mpsd.on_gpu[uuid(0)] = clients
    first, second = reported(world.broker.node.config, world.infos, world.broker.desired())
    assert first.daemon is not None
    daemon = structs.replace(first.daemon, **changes)
    world.broker.observe_snapshot(snapshot(structs.replace(first, clients=clients, daemon=daemon), second))
    world.keeper.check_markers()
    return {key: reason.message for key, reason in world.keeper.report.unenforced.items()}
