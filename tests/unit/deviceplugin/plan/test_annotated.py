"""What an annotated container gets, and why one gets nothing."""

from msgspec import structs

from deviceplugin.plan.accounts import Accounts
from deviceplugin.plan.allocation import Allocation, ContainerAsk, ContainerRef, Refusal
from deviceplugin.plan.annotated import plan_container
from deviceplugin.plan.ids import device_id
from deviceplugin.plan.model import HardAbility, NodeView
from mpsd.config.model import GIB, AnnotationsConfig, Enforcement, GpuSelection, ShortfallPolicy
from mpsd.gpu.model import GpuInfo, Mode
from mpsd.localapi.snapshot import GpuClient
from mpsd.shares.groups import set_name
from tests.builders import HARD, NOT_HARD, allocation, config, info, node, uuid
from tests.refusals import Kind
from tests.unit.deviceplugin.plan.test_allocate import refused

MAIN = ContainerRef(namespace="ns", pod="p", pod_uid="uid", container="main")
COOPERATIVE = AnnotationsConfig(gpus=GpuSelection(), enforcement=Enforcement.COOPERATIVE)
ANY = AnnotationsConfig(gpus=GpuSelection(), enforcement=Enforcement.NONE)
PAIR = (("pair", (uuid(0), uuid(1))),)
OLD = info(0, compute_capability=(6, 1))


def asking(
    gib: int = 8, limit_gib: int = 0, mode: Mode = Mode.SM_SHARING, gpus: tuple[int, ...] = (0,), **changes: object
) -> ContainerAsk:
    ask = ContainerAsk(
        container=MAIN,
        request_bytes=gib * GIB,
        limit_bytes=(limit_gib or gib) * GIB,
        mode=mode,
        gpus=tuple(map(uuid, gpus)),
    )
    return structs.replace(ask, **changes)


def seen(
    *gpus: GpuInfo,
    annotations: AnnotationsConfig = COOPERATIVE,
    protocol: int = 2,
    hard: HardAbility = NOT_HARD,
    **changes: object,
) -> NodeView:
    cfg = config(annotations=annotations, **changes)
    return node(cfg, *(gpus or (info(0), info(1))), protocol=protocol, hard=hard)


def plan(ask: ContainerAsk, view: NodeView, *others: Allocation, force: bool = False) -> Allocation | Refusal:
    accounts = Accounts()
    for other in others:
        accounts.add(other)
    return plan_container(ask, view, accounts, generation=7, force=force)


def granted(outcome: Allocation | Refusal) -> Allocation:
    assert isinstance(outcome, Allocation), outcome
    return outcome


def other(gib: int = 8, container: str = "", **changes: object) -> Allocation:
    """What somebody else has on GPU 0: a share, or with `container` another container of the same pod."""
    found = structs.replace(allocation("a", device_id(uuid(0), 0), gib=gib), **changes)
    return structs.replace(found, container=structs.replace(MAIN, container=container)) if container else found


def test_a_container_gets_what_it_asks_for() -> None:
    got = granted(plan(asking(8), seen()))
    assert (got.resource, got.device_ids, got.container) == ("annotations", ("uid/main",), MAIN)
    assert (got.request_bytes, got.limit_bytes, got.asked_request_bytes) == (8 * GIB, 8 * GIB, 8 * GIB)
    assert (got.group, got.gpus, got.mode, got.enforcement) == (
        uuid(0),
        (uuid(0),),
        Mode.SM_SHARING,
        Enforcement.COOPERATIVE,
    )


def test_a_node_without_the_section_serves_nobody() -> None:
    assert "has no `annotations`" in refused(plan(asking(), node(config(), info(0))), Kind.INVALID)


def test_gpus_that_are_not_there_are_named() -> None:
    assert refused(plan(asking(gpus=(0, 5)), seen()), Kind.INVALID) == f"GPU {uuid(5)} is not on this node"
    assert "GPU (none) is not" in refused(plan(asking(gpus=()), seen()), Kind.INVALID)


def test_a_request_above_its_limit_or_above_a_gpu_is_never_granted() -> None:
    exact = seen(annotations=structs.replace(COOPERATIVE, shortfall=ShortfallPolicy.REFUSE))
    assert "is above its limit of 4Gi" in refused(plan(asking(8, 4), exact), Kind.INVALID)
    assert "ask for at most that" in refused(plan(asking(90), seen()), Kind.INVALID)


def test_what_only_the_scheduler_does_not_count_is_taken_off_and_no_more() -> None:
    view = seen(memory_reserve_bytes=30 * GIB)
    got = granted(plan(asking(80), view))
    assert (got.request_bytes, got.limit_bytes, got.asked_request_bytes) == (50 * GIB, 50 * GIB, 80 * GIB)
    much = seen(memory_reserve_bytes=41 * GIB)
    text = refused(plan(asking(80), much), Kind.INVALID)
    assert "its request of 80Gi is above the 39Gi usable" in text, "less than half would be left"


def test_a_group_that_is_no_longer_declared_takes_nothing_new() -> None:
    held = {"pair": (uuid(0), uuid(1))}
    view = node(config(annotations=ANY), info(0), info(1), held=held)
    text = refused(plan(asking(gpus=(0, 1)), view), Kind.NO_ROOM)
    assert text.startswith("group pair (GPU 0, 1) takes nothing new: ")


def test_any_gpus_are_joined_where_nobody_uses_their_daemons() -> None:
    view = seen(hard=HARD, protocol=3)
    for mode in Mode:
        got = granted(plan(asking(8, 16, mode, (1, 0)), view))
        assert (got.group, got.gpus) == (set_name((uuid(0), uuid(1))), (uuid(1), uuid(0)))
        assert (got.soft_bytes, got.needs_daemon, got.takes_back) == (8 * GIB, True, True)


def used(view: NodeView, client: GpuClient) -> NodeView:
    """The same with a client on GPU 0."""
    gpu = structs.replace(view.gpus[uuid(0)], clients=(client,), daemon=uuid(0))
    return structs.replace(view, gpus={**view.gpus, uuid(0): gpu})


def test_who_uses_a_daemon_keeps_it_and_is_named() -> None:
    one = other(container="one", created_unix_s=1_000_000.0)
    view = used(seen(hard=HARD, protocol=3), GpuClient(pid=7, allocation_key=one.key))
    text = refused(plan(asking(gpus=(0, 1)), view, one), Kind.NO_ROOM)
    assert text.startswith("its 2 GPUs (0, 1) have 2 MPS daemons, and it needs one for all of them")
    assert "ns/p/one (since 1970-01-12 13:46:40Z) does: wait for that" in text
    stranger = used(seen(hard=HARD, protocol=3), GpuClient(pid=7, command="x"))
    assert "process 7 (x) does" in refused(plan(asking(gpus=(0, 1)), stranger), Kind.NO_ROOM)
    assert granted(plan(asking(gpus=(0, 1)), seen(hard=HARD, protocol=3), one)).group, "nobody uses it now"


def test_time_slicing_needs_no_daemon_where_limits_add_up_to_no_more_than_there_is() -> None:
    borrower = other(
        mode=Mode.TIME_SLICING, limit_bytes=40 * GIB, enforcement=Enforcement.HARD, soft_bytes=8 * GIB, container="one"
    )
    view = used(seen(hard=HARD, protocol=3), GpuClient(pid=7, allocation_key=borrower.key))
    fits = granted(plan(asking(39, mode=Mode.TIME_SLICING, gpus=(0, 1)), view, borrower))
    assert (fits.group, fits.soft_bytes, fits.needs_daemon) == ("", 39 * GIB, False)
    text = refused(plan(asking(40, mode=Mode.TIME_SLICING, gpus=(0, 1)), view, borrower), Kind.NO_ROOM)
    assert "those on GPU 0" in text
    assert "its own daemon: its 2 GPUs (0, 1) have 2 MPS daemons" in text
    assert "ns/p/one" in text
    burst = asking(8, 40, Mode.TIME_SLICING)
    text = refused(plan(burst, view, fits, borrower), Kind.NO_ROOM)
    assert text.endswith("to end")
    assert "set its limit to at most" not in text, "nothing is left for one"


def test_memory_is_lent_with_hard_limits_and_under_protocol_3_only() -> None:
    burst = asking(8, 16)
    assert "needs hard enforcement" in refused(plan(burst, seen(protocol=3)), Kind.INVALID)
    assert "under MPS protocol 3 only" in refused(plan(burst, seen(hard=HARD)), Kind.INVALID)
    assert granted(plan(burst, seen(hard=HARD, protocol=3))).soft_bytes == 8 * GIB


def test_several_gpus_of_one_daemon_have_one_limit_under_protocol_2() -> None:
    view = seen(groups=PAIR)
    first = granted(plan(asking(gpus=(0, 1)), view))
    assert (first.group, first.enforcement) == ("pair", Enforcement.COOPERATIVE)
    second = structs.replace(first, container=structs.replace(MAIN, container="q"), key="q" * 20)
    second = structs.replace(second, device_ids=("uid/q",))
    assert granted(plan(asking(gpus=(0, 1)), view, second)).group == "pair", "the same limit"
    text = refused(plan(asking(9, gpus=(0, 1)), view, second), Kind.NO_ROOM)
    assert text.startswith("it asks for 9Gi, and MPS protocol 2 has one limit for all containers on several GPUs, ")
    assert granted(plan(asking(9, gpus=(0, 1)), seen(groups=PAIR, annotations=ANY), second)).group == "pair"
    free = seen()
    joint = structs.replace(second, group=set_name((uuid(0), uuid(1))))
    assert granted(plan(asking(gpus=(0, 1)), free)).group == joint.group
    text = refused(plan(asking(1), free, joint), Kind.NO_ROOM)
    assert "with that protocol all containers of a daemon use the same GPUs" in text
    text = refused(plan(asking(gpus=(0, 1)), free, other(container="one")), Kind.NO_ROOM)
    assert "ns/p/one" in text, "what runs keeps its daemon for good"


def test_old_gpus_hold_nobody_by_mps() -> None:
    text = refused(plan(asking(thread_percent=50), seen(OLD)), Kind.INVALID)
    assert text.endswith("name another GPU, or no thread percentage")
    text = refused(plan(asking(), seen(OLD)), Kind.INVALID)
    assert "demands cooperative limits" in text
    assert "GPU 0 has compute capability 6.1" in text
    assert granted(plan(asking(), seen(OLD, annotations=ANY))).enforcement is Enforcement.NONE


def test_a_full_gpu_says_what_is_free_and_what_the_same_pod_holds() -> None:
    full = refused(plan(asking(8), seen(), other(75)), Kind.NO_ROOM)
    assert "4Gi of 79Gi usable is free" in full
    assert full.endswith("wait for one to end, or ask for less")
    own = refused(plan(asking(8), seen(), other(75, container="init")), Kind.NO_ROOM)
    assert own.endswith("75Gi of it are of init in the same pod, which have not ended as far as the container runtime "
                        "tells: wait for that, or ask for less")  # fmt: skip


def test_a_gpu_takes_so_many_mps_clients() -> None:
    old = seen(OLD, annotations=ANY)
    many = [structs.replace(other(1), key=f"k{n}", device_ids=(device_id(uuid(0), n),)) for n in range(16)]
    text = refused(plan(asking(1), old, *many), Kind.NO_ROOM)
    assert "its 16 MPS clients are taken: wait for an allocation to end" in text


def test_what_runs_already_counts_whatever_it_takes() -> None:
    got = granted(plan(asking(8, mode=Mode.TIME_SLICING), seen(), other(75, mode=Mode.TIME_SLICING), force=True))
    assert got.adopted
    assert got.enforcement is Enforcement.NONE
