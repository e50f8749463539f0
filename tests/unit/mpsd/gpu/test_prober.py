"""The prober over a scripted backend and a clock that only the test moves."""

import threading

import pytest

from mpsd.gpu.backend import GpuError, GpuLostError, GpuNotSupportedError, XidEvent
from mpsd.gpu.model import ComputeMode, GpuHealth, GpuProcess, Inventory
from mpsd.gpu.prober import Prober
from mpsd.gpu.reasons import NOT_PROBED
from tests.unit.mpsd.gpu.scripted import Receiver, ScriptedBackend, gpu_uuid, probing, state
from tests.waiting import WAIT_S

OK, SICK, UNRESPONSIVE, LOST = GpuHealth.OK, GpuHealth.SICK, GpuHealth.UNRESPONSIVE, GpuHealth.LOST


def whole(inventory: Inventory) -> bool:
    return len(inventory.gpus) == 2


def test_first_inventory_holds_everything() -> None:
    backend = ScriptedBackend()
    backend.running[gpu_uuid(1)] = (GpuProcess(pid=7, used_bytes=5), GpuProcess(pid=3))
    backend.modes[gpu_uuid(0)] = ComputeMode.EXCLUSIVE_PROCESS
    with probing(backend) as rig:
        inventory = rig.seen.await_one(whole)
        assert rig.seen.all == [inventory]
        assert rig.prober.inventory == inventory
    assert inventory.driver_version == "580.95.05"
    assert inventory.reason is None
    assert [s.info.index for s in inventory.gpus] == [0, 1]
    assert [s.health for s in inventory.gpus] == [OK, OK]
    assert inventory.gpus[0].compute_mode is ComputeMode.EXCLUSIVE_PROCESS
    assert [p.pid for p in inventory.gpus[1].processes] == [3, 7]


def test_equal_inventories_are_not_published_again() -> None:
    backend = ScriptedBackend()
    with probing(backend) as rig:
        first = rig.seen.await_one(whole)
        rig.rounds(5)
        assert rig.seen.all == [first]
        backend.running[gpu_uuid(0)] = (GpuProcess(pid=9),)
        rig.prober.kick()
        changed = rig.seen.await_one(lambda i: i != first)
        rig.rounds(2)
        assert rig.seen.all == [first, changed]


def test_order_of_processes_is_no_change() -> None:
    backend = ScriptedBackend()
    backend.running[gpu_uuid(0)] = (GpuProcess(pid=1), GpuProcess(pid=2))
    with probing(backend) as rig:
        rig.seen.await_one(whole)
        backend.running[gpu_uuid(0)] = (GpuProcess(pid=2), GpuProcess(pid=1))
        rig.rounds(2)
        assert len(rig.seen.all) == 1


def test_calls_that_are_not_offered_take_their_defaults() -> None:
    backend = ScriptedBackend(1)
    for call in ("compute_mode", "processes"):
        backend.fail[call, gpu_uuid(0)] = GpuNotSupportedError("cannot: not supported", 3)
    with probing(backend) as rig:
        gpu = state(rig.seen.await_health(gpu0=OK), 0)
    assert (gpu.compute_mode, gpu.processes) == (ComputeMode.UNKNOWN, ())


def test_driver_that_comes_late_is_found_with_backoff() -> None:
    backend = ScriptedBackend()
    backend.fail["open", ""] = GpuError("cannot initialise NVML: driver not loaded", 9)
    with probing(backend) as rig:
        inventory = rig.seen.await_one(lambda i: True)
        assert (inventory.gpus, inventory.driver_version) == ((), None)
        assert "driver not loaded" in str(inventory.reason)
        del backend.fail["open", ""]
        rig.advance(1.0)
        assert rig.seen.await_one(whole).reason is None


def test_who_asks_is_told_why_the_driver_cannot_be_used() -> None:
    backend = ScriptedBackend()
    mismatch = GpuError("cannot initialise NVML: driver/library version mismatch", 18)
    backend.fail["open", ""] = mismatch
    with probing(backend) as rig:
        assert rig.errors.get(timeout=WAIT_S) is mismatch


def test_driver_that_opens_slowly_is_reported_and_then_used() -> None:
    backend = ScriptedBackend()
    gate = backend.gates["open", ""] = threading.Event()
    with probing(backend) as rig:
        backend.await_calls(1, "open")
        rig.advance(10.0)
        assert "driver call open() has not returned for over 10 s" in str(rig.seen.await_one(lambda i: True).reason)
        gate.set()
        inventory = rig.seen.await_one(whole)
        assert (inventory.driver_version, inventory.reason) == ("580.95.05", None)
        assert backend.count("open") == 1


def test_pauses_between_attempts_grow() -> None:
    backend = ScriptedBackend()
    backend.fail["open", ""] = GpuError("cannot", 9)
    prober = Prober(backend, Receiver(), clock=lambda: 0.0)
    pauses = []
    for _ in range(7):
        prober._take_list(GpuError("cannot", 9))
        pauses.append(prober._open_at_s)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


def test_no_gpu_is_a_normal_state_and_looks_afresh() -> None:
    backend = ScriptedBackend(0)
    with probing(backend) as rig:
        assert "lists none" in str(rig.seen.await_one(lambda i: True).reason)
        backend.listed = [gpu_uuid(0)]
        rig.advance(30.0)
        assert rig.seen.await_health(gpu0=OK).reason is None
        assert backend.count("open") == 2


def test_a_driver_that_cannot_list_is_opened_afresh_at_once() -> None:
    backend = ScriptedBackend()
    with probing(backend) as rig:
        first = rig.seen.await_one(whole)
        backend.fail["uuids", ""] = GpuError("cannot count", 1)
        original_open = backend.open

        def heal() -> None:
            backend.fail.clear()
            original_open()

        backend.open = heal  # type: ignore[method-assign]
        rig.rounds(3)
        assert backend.count("open") == 2
        assert rig.seen.all == [first]


def test_a_dead_driver_makes_gpus_unresponsive_not_lost() -> None:
    backend = ScriptedBackend()
    with probing(backend) as rig:
        rig.seen.await_one(whole)
        backend.fail["uuids", ""] = GpuError("cannot count the GPUs", 999)
        rig.prober.kick()
        inventory = rig.seen.await_health(gpu0=UNRESPONSIVE, gpu1=UNRESPONSIVE)
        assert "cannot count the GPUs" in str(inventory.reason)
        assert "cannot count the GPUs" in str(state(inventory, 0).reason)
        backend.fail.clear()
        rig.advance(30.0)
        rig.seen.await_health(gpu0=OK, gpu1=OK)


@pytest.mark.parametrize("call", ["info", "compute_mode", "processes"])
def test_one_hanging_gpu_leaves_the_others_alone(call: str) -> None:
    backend = ScriptedBackend()
    with probing(backend) as rig:
        rig.seen.await_one(whole)
        gate = backend.gates[call, gpu_uuid(0)] = threading.Event()
        before = backend.count(call, gpu_uuid(0))
        rig.prober.kick()
        backend.await_calls(before + 1, call, gpu_uuid(0))
        rig.advance(10.0)
        inventory = rig.seen.await_health(gpu0=UNRESPONSIVE, gpu1=OK)
        assert str(state(inventory, 0).reason) == f"driver call {call}() has not returned for over 10 s"
        assert state(inventory, 0).info.memory_total_bytes == 80 << 30

        backend.running[gpu_uuid(1)] = (GpuProcess(pid=5),)
        rig.prober.kick()
        inventory = rig.seen.await_one(lambda i: bool(state(i, 1).processes))
        assert state(inventory, 0).health is UNRESPONSIVE

        rig.advance(10.0)
        rig.seen.await_one(lambda i: "over 20 s" in str(state(i, 0).reason))
        assert backend.count(call, gpu_uuid(0)) == before + 1

        gate.set()
        assert state(rig.seen.await_health(gpu0=OK, gpu1=OK), 0).reason is None


def test_gpu_that_hangs_from_the_start_is_named() -> None:
    backend = ScriptedBackend()
    backend.gates["info", gpu_uuid(0)] = threading.Event()
    with probing(backend) as rig:
        backend.await_calls(1, "info", gpu_uuid(0))
        backend.await_calls(1, "processes", gpu_uuid(1))
        rig.advance(10.0)
        inventory = rig.seen.await_one(lambda i: len(i.gpus) == 1)
        assert gpu_uuid(0) in str(inventory.reason)
        assert "info()" in str(inventory.reason)
        backend.gates["info", gpu_uuid(0)].set()
        assert rig.seen.await_one(whole).reason is None


def test_a_hanging_list_call_leaves_known_gpus_probed() -> None:
    backend = ScriptedBackend()
    with probing(backend) as rig:
        rig.seen.await_one(whole)
        gate = backend.gates["uuids", ""] = threading.Event()
        before = backend.count("uuids")
        rig.prober.kick()
        backend.await_calls(before + 1, "uuids")
        backend.running[gpu_uuid(1)] = (GpuProcess(pid=5),)
        rig.advance(10.0)
        inventory = rig.seen.await_one(lambda i: bool(state(i, 1).processes))
        assert "uuids() has not returned for over 10 s" in str(inventory.reason)
        assert [s.health for s in inventory.gpus] == [OK, OK]
        gate.set()
        rig.seen.await_one(lambda i: i.reason is None)


def test_a_lost_and_a_hanging_gpu_at_once_do_not_make_it_spin() -> None:
    backend = ScriptedBackend(3)
    with probing(backend) as rig:
        rig.seen.await_one(lambda i: len(i.gpus) == 3)
        backend.gates["info", gpu_uuid(0)] = threading.Event()
        before = backend.count("info", gpu_uuid(0))
        rig.prober.kick()
        backend.await_calls(before + 1, "info", gpu_uuid(0))
        backend.listed = [gpu_uuid(0), gpu_uuid(2)]
        backend.fail["info", gpu_uuid(1)] = GpuLostError("cannot call: GPU is lost (NVML 15)", 15)
        rig.advance(1000.0)
        rig.seen.await_health(gpu0=UNRESPONSIVE, gpu2=OK)
        rig.rounds(1)
        rig.seen.await_health(gpu0=UNRESPONSIVE, gpu1=LOST, gpu2=OK)
        lists = backend.count("uuids")
        rig.rounds(1)
        assert backend.count("uuids") <= lists + 4
        assert backend.count("open") == 1


def test_driver_is_not_closed_under_a_hanging_call() -> None:
    backend = ScriptedBackend()
    with probing(backend) as rig:
        rig.seen.await_one(whole)
        backend.gates["processes", gpu_uuid(0)] = threading.Event()
        before = backend.count("processes", gpu_uuid(0))
        rig.prober.kick()
        backend.await_calls(before + 1, "processes", gpu_uuid(0))
        rig.advance(10.0)
        rig.seen.await_health(gpu0=UNRESPONSIVE, gpu1=OK)
        backend.fail["uuids", ""] = GpuError("cannot count", 999)
        rig.rounds(3)
        assert backend.count("close") == 0
        assert state(rig.prober.inventory, 1).health is OK
        assert "cannot count" in str(rig.prober.inventory.reason)


def test_lost_gpu_keeps_its_facts_and_needs_two_good_probes() -> None:
    backend = ScriptedBackend()
    with probing(backend) as rig:
        rig.seen.await_one(whole)
        backend.fail["info", gpu_uuid(1)] = GpuLostError("cannot read GPU 1: GPU is lost (NVML 15)", 15)
        rig.prober.kick()
        inventory = rig.seen.await_health(gpu0=OK, gpu1=LOST)
        assert "NVML 15" in str(state(inventory, 1).reason)
        assert state(inventory, 1).info.name == "Fake"
        rig.rounds(3)
        published = len(rig.seen.all)
        del backend.fail["info", gpu_uuid(1)]
        rig.rounds(2)
        rig.seen.await_health(gpu0=OK, gpu1=OK)
        assert len(rig.seen.all) == published + 1


def test_vanished_gpu_is_lost_and_looked_for_afresh_with_backoff() -> None:
    backend = ScriptedBackend()
    with probing(backend) as rig:
        rig.seen.await_one(whole)
        backend.listed = [gpu_uuid(0)]
        backend.fail["info", gpu_uuid(1)] = GpuError("cannot call: Unknown Error (NVML 999)", 999)
        rig.rounds(2)
        inventory = rig.seen.await_health(gpu0=OK, gpu1=LOST)
        assert "no longer lists" in str(state(inventory, 1).reason)
        rig.rounds(5)
        assert backend.count("open") <= 2  # kicks do not shorten the pauses
        backend.listed = [gpu_uuid(0), gpu_uuid(1)]
        backend.fail.clear()
        rig.rounds(3)
        rig.seen.await_health(gpu0=OK, gpu1=OK)


def test_gpus_lost_since_before_the_start_are_counted_and_those_lost_by_name_are_not() -> None:
    backend = ScriptedBackend()
    backend.left_out = 1
    with probing(backend) as rig:
        assert rig.seen.await_one(whole).never_seen == 1
        backend.listed, backend.left_out = [gpu_uuid(0)], 2
        backend.fail["info", gpu_uuid(1)] = GpuError("cannot call: Unknown Error (NVML 999)", 999)
        rig.rounds(2)
        assert rig.seen.await_health(gpu0=OK, gpu1=LOST).never_seen == 1


def test_a_gpu_that_answers_is_not_lost_whatever_the_list_says() -> None:
    backend = ScriptedBackend()
    with probing(backend) as rig:
        rig.seen.await_one(whole)
        backend.listed = [gpu_uuid(0)]
        rig.rounds(4)
        assert len(rig.seen.all) == 1


def test_a_hanging_gpu_that_leaves_the_list_is_lost() -> None:
    backend = ScriptedBackend()
    with probing(backend) as rig:
        rig.seen.await_one(whole)
        gate = backend.gates["info", gpu_uuid(1)] = threading.Event()
        before = backend.count("info", gpu_uuid(1))
        rig.prober.kick()
        backend.await_calls(before + 1, "info", gpu_uuid(1))
        rig.advance(10.0)
        rig.seen.await_health(gpu0=OK, gpu1=UNRESPONSIVE)
        backend.listed = [gpu_uuid(0)]
        rig.rounds(3)
        rig.seen.await_health(gpu0=OK, gpu1=LOST)
        gate.set()
        backend.listed = [gpu_uuid(0), gpu_uuid(1)]
        rig.rounds_until(gpu0=OK, gpu1=OK)


def test_a_listed_gpu_that_was_never_read_is_named_from_the_first_inventory_on() -> None:
    backend = ScriptedBackend()
    backend.fail["info", gpu_uuid(1)] = GpuError("cannot call: Unknown Error (NVML 999)", 999)
    with probing(backend) as rig:
        rig.seen.await_health(gpu0=OK)
        assert gpu_uuid(1) in str(rig.seen.all[0].reason)
        backend.fail.clear()
        rig.rounds(1)
        rig.seen.await_one(whole)
        assert rig.seen.all[-1].reason is None


def test_one_failed_probe_changes_nothing_two_make_it_sick() -> None:
    backend = ScriptedBackend()
    with probing(backend) as rig:
        rig.seen.await_one(whole)
        backend.fail["processes", gpu_uuid(0)] = GpuError("cannot list the processes: Unknown Error (NVML 999)", 999)
        before = backend.count("processes", gpu_uuid(0))
        rig.prober.kick()
        backend.await_calls(before + 1, "processes", gpu_uuid(0))
        assert len(rig.seen.all) == 1
        rig.rounds(1)
        assert "NVML 999" in str(state(rig.seen.await_health(gpu0=SICK, gpu1=OK), 0).reason)
        backend.fail.clear()
        rig.rounds(2)
        rig.seen.await_health(gpu0=OK)


def test_an_unforeseen_exception_is_a_failed_probe() -> None:
    backend = ScriptedBackend(1)
    with probing(backend) as rig:
        rig.seen.await_health(gpu0=OK)
        backend.fail["info", gpu_uuid(0)] = ValueError("surprise")
        rig.rounds(2)
        assert "surprise" in str(state(rig.seen.await_health(gpu0=SICK), 0).reason)


def test_critical_xid_makes_sick_until_quiet() -> None:
    backend = ScriptedBackend()
    with probing(backend) as rig:
        rig.seen.await_one(whole)
        backend.xids.put(XidEvent(gpu_uuid(1), 79))
        inventory = rig.seen.await_health(gpu0=OK, gpu1=SICK)
        assert str(state(inventory, 1).reason).startswith("XID 79 (GPU has fallen off the bus)")
        rig.rounds(4)
        assert state(rig.prober.inventory, 1).health is SICK
        rig.advance(60.0)
        rig.rounds(2)
        rig.seen.await_health(gpu0=OK, gpu1=OK)


def test_xid_154_has_the_recovery_action_read_and_what_the_driver_asks_for_is_said_until_it_was_done() -> None:
    backend = ScriptedBackend()
    with probing(backend) as rig:
        rig.seen.await_one(whole)
        backend.actions[gpu_uuid(1)] = 2
        backend.xids.put(XidEvent(gpu_uuid(1), 154))
        inventory = rig.seen.await_health(gpu0=OK, gpu1=SICK)
        assert str(state(inventory, 1).reason) == "the driver asks for a reboot of the node"
        rig.rounds(4)
        assert state(rig.prober.inventory, 1).health is SICK
        backend.actions.clear()
        rig.rounds(3)
        rig.seen.await_health(gpu0=OK, gpu1=OK)


def test_what_cannot_be_read_of_recovery_makes_no_gpu_sick() -> None:
    backend = ScriptedBackend(1)
    backend.fail["recovery_action", gpu_uuid(0)] = GpuError("cannot read it: Unknown Error", 999)
    with probing(backend) as rig:
        rig.seen.await_health(gpu0=OK)
        rig.rounds(3)
        assert state(rig.prober.inventory, 0).health is OK


def test_no_list_of_processes_is_not_an_empty_one() -> None:
    backend = ScriptedBackend()
    backend.fail["processes", gpu_uuid(0)] = GpuNotSupportedError("cannot list", 3)
    with probing(backend) as rig:
        inventory = rig.seen.await_one(whole)
        assert [state(inventory, n).processes_told for n in (0, 1)] == [False, True]


@pytest.mark.parametrize("event", [XidEvent(gpu_uuid(0), 31), XidEvent("GPU-elsewhere", 79)])
def test_application_errors_and_unknown_gpus_change_nothing(event: XidEvent) -> None:
    backend = ScriptedBackend()
    with probing(backend) as rig:
        rig.seen.await_one(whole)
        backend.xids.put(event)
        backend.xids.put(XidEvent(gpu_uuid(1), 62))
        rig.seen.await_health(gpu1=SICK)  # events come in order
        assert state(rig.prober.inventory, 0).health is OK
        assert len(rig.seen.all) == 2
    assert rig.xids == [(event.uuid, event.xid), (gpu_uuid(1), 62)], "each is told"


def test_lost_gpu_while_waiting_for_events_wakes_the_prober() -> None:
    backend = ScriptedBackend()
    with probing(backend) as rig:
        rig.seen.await_one(whole)
        backend.fail["info", gpu_uuid(0)] = GpuLostError("cannot read: lost", 15)
        backend.xids.put(GpuLostError("cannot wait for XID events: GPU is lost", 15))
        rig.seen.await_health(gpu0=LOST, gpu1=OK)


def test_a_failing_receiver_does_not_stop_probing() -> None:
    backend = ScriptedBackend(1)
    seen, failures = Receiver(), []

    def receive(inventory: Inventory) -> None:
        seen(inventory)
        failures.append(inventory)
        raise ValueError("receiver")

    prober = Prober(backend, receive)
    prober.start()
    try:
        seen.await_health(gpu0=OK)
        backend.modes[gpu_uuid(0)] = ComputeMode.PROHIBITED
        prober.kick()
        seen.await_one(lambda i: i.gpus[0].compute_mode is ComputeMode.PROHIBITED)
    finally:
        prober.close()
    assert len(failures) == 2


def test_close_does_not_wait_for_a_hanging_call_and_then_leaves_the_driver_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mpsd.gpu.prober._JOIN_S", 0.2)
    backend = ScriptedBackend(1)
    gate = backend.gates["info", gpu_uuid(0)] = threading.Event()
    prober = Prober(backend, Receiver())
    prober.start()
    backend.await_calls(1, "info", gpu_uuid(0))
    prober.close()
    assert backend.count("close") == 0
    assert prober.inventory == Inventory(reason=NOT_PROBED)  # an unfinished round is no news
    gate.set()


def test_close_closes_the_driver() -> None:
    backend = ScriptedBackend()
    with probing(backend) as rig:
        rig.seen.await_one(whole)
    assert backend.count("close") == 1


def test_threads_are_one_per_gpu_and_three_more() -> None:
    before = threading.active_count()
    with probing(ScriptedBackend(8)) as rig:
        rig.seen.await_one(lambda i: len(i.gpus) == 8)
        assert threading.active_count() - before == 11
