"""The plugin as it runs on a node: real gRPC, real processes, kills and restarts."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit, prlimit, setrlimit

import grpc
import pytest

from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.api import deviceplugin_v1beta1_pb2_grpc as rpc
from deviceplugin.sim.kubelet.pod import AdmittedPod
from deviceplugin.sim.objects.pods import ContainerSpec, PodSpec, Role
from deviceplugin.sim.runtime.nvidia import write_nvidia_spec
from deviceplugin.status.model import PluginStatus
from mpsd.common.errors import GpufracError
from mpsd.config.model import GIB, socket_name
from mpsd.host.checks import nofile_soft
from mpsd.sim.gpus import SimulatedBackend
from mpsd.sim.model import gpu_uuid
from tests.e2e.mpsdnode import ROOT, end
from tests.e2e.pluginnode import BIG, RESOURCES, SLICED, SMALL, UNITS, PluginNode, init, kill, plugin_node
from tests.waiting import NEVER_S, WAIT_S

pytestmark = pytest.mark.leaks_ok("gRPC keeps pollers, and channels close late")


ONE_SHARE = f"""
  - {{name: {BIG}, memory: {{request: 60Gi}}, compute: {{mode: sm-sharing}}}}
"""


@pytest.fixture
def node(short_tmp: Path) -> Iterator[PluginNode]:
    with plugin_node(short_tmp) as made:
        yield made


def key(pod: AdmittedPod, container: str = "main") -> str:
    edits = pod.container(container).edits
    assert edits is not None
    return edits.env["GPUFRAC_ALLOCATION"]


@pytest.mark.parametrize("observed", [True, False])
def test_a_share_whose_last_pod_was_deleted_by_force_waits_for_its_processes(short_tmp: Path, observed: bool) -> None:
    """At once, as a controller's new pod does: sooner than anybody looks."""
    node = PluginNode(short_tmp, gpus=1, resources=ONE_SHARE)
    try:
        node.start(BIG)
        first = node.admit_running("a", BIG)
        if observed:
            node.until_status(lambda s: s.allocations[0].pod == "a")
        node.kubelet.delete(first, force=True)
        second = node.admit("a", BIG)
        assert second.phase == "Admitted", second.message
        assert second.container().devices == first.container().devices
        waits = node.until_status(lambda s: any("last owner" in a.reason for a in s.allocations))
        assert second.container().pid is None
        assert {a.key for a in waits.allocations} > {key(first)}
        node.kubelet.end_leftovers()
        assert node.kubelet.wait_settled([second], WAIT_S)
        assert key(second) != key(first)
    finally:
        node.close()


def test_lost_records_take_nothing_from_who_runs(node: PluginNode) -> None:
    plugin = node.start()
    pod = node.admit_running("a")
    node.until(lambda: node.cdi_keys() == {key(pod)})
    (path,) = (node.root / "cdi").glob("*allocation_*.json")
    mpsd_state = node.root / "state" / "mpsd.json"
    node.until(lambda: key(pod) in mpsd_state.read_text())
    before = [written.stat().st_ino for written in (path, mpsd_state)]
    kill(plugin)
    for record in (node.root / "state" / "plugin" / "allocations").glob("*.json"):
        record.unlink()
    node.start_plugin()
    status = node.until_status(lambda s: s.allocations and s.allocations[0].pod == "a")
    assert status.allocations[0].key == key(pod)
    node.until_status(lambda s: s.allocations[0].state == "attached")
    after = [written.stat().st_ino for written in (path, mpsd_state)]
    assert after == before, "a file was gone, or mpsd was told otherwise, for a while"


def test_a_pod_gets_its_share_its_daemon_and_its_limit(node: PluginNode) -> None:
    node.start()
    pod = node.admit_running("a")
    edits = pod.container().edits
    assert edits is not None
    (record,) = node.records()
    assert edits.env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8192M"
    assert edits.env["GPUFRAC_ALLOCATION"] == record.key
    assert [(inside, host) for inside, host, _ in edits.mounts] == [
        ("/tmp/nvidia-mps", f"{node.root}/run/mps/{record.gpus[0]}")
    ]
    status = node.until_status(lambda s: s.allocations[0].state == "attached")
    assert (status.allocations[0].pod, status.allocations[0].container) == ("a", "main")


def test_init_and_sidecar_containers_share_what_the_kubelet_gives_them(node: PluginNode) -> None:
    node.start()
    pod = node.admit_running(
        "p", UNITS, 20, init(UNITS, 8), init(UNITS, 4, Role.SIDECAR), ContainerSpec("other", {SMALL: 1})
    )
    assert pod.phase == "Admitted"
    gpus = {record.gpus for record in node.records() if record.resource == UNITS}
    assert len(gpus) == 1
    held = {share for record in node.records() if record.resource == UNITS for share in record.device_ids}
    assert len(held) == 24  # the init container's 8 are reused by the app container's 20; the sidecar keeps 4
    status = node.status()
    granted = {gpu.granted_bytes for gpu in status.gpus if gpu.allocations}
    assert sum(granted) == 24 * GIB + 8 * GIB


def test_the_gpu_of_an_init_container_alone_is_held_while_its_pod_lives(node: PluginNode) -> None:
    node.start()
    node.kubelet.admit(PodSpec("p", (init(SMALL), ContainerSpec("main"))))
    node.until(node.records)
    before = [record.key for record in node.records()]
    node.until_status(lambda s: s.allocations and s.allocations[0].state == "attached")
    last = node.admit_running("later", UNITS)  # its release shows that the grace has passed for all
    node.kubelet.delete(last)
    node.until(lambda: len(node.records()) == 1)
    assert [record.key for record in node.records()] == before
    node.kubelet.delete(node.kubelet.pod("p"))
    node.until(lambda: not node.records())


def test_a_full_node_refuses_with_a_sentence(node: PluginNode) -> None:
    node.start()
    for name in "abcd":
        assert node.admit(name, BIG).phase == "Admitted"
    node.until(lambda: node.allocatable(SMALL) == 0)
    refused = node.admit("e", SMALL)
    assert refused.phase == "Failed"
    assert refused.reason == "UnexpectedAdmissionError"
    reason = next(r.reason for r in node.status().resources if r.name == SMALL)
    assert "memory is taken" in reason
    two = node.admit("f", SMALL, 2)
    assert two.phase == "Failed"


def test_modes_do_not_mix_and_a_gpu_is_free_again_after_its_last_pod(node: PluginNode) -> None:
    node.start()
    shared = node.admit_running("shared")
    sliced = [node.admit_running(f"sliced{n}", SLICED) for n in range(2)]
    gpus = {record.resource: record.gpus for record in node.records()}
    assert gpus[SMALL] != gpus[SLICED]
    assert shared.container().edits is not None
    assert not [e for e in sliced[0].container().edits.env if e.startswith("CUDA_MPS")]  # type: ignore[union-attr]
    node.kubelet.delete(shared)
    node.until(lambda: node.allocatable(SLICED) == 18)


def test_a_restarted_plugin_registers_with_what_it_knew_before_mpsd_is_back(node: PluginNode) -> None:
    plugin = node.start()
    pod = node.admit_running("a")
    full = node.allocatable(SMALL)
    kill(plugin)
    node.until(lambda: node.allocatable(SMALL) == 0)
    mpsd = mpsd_pid(node)
    os.kill(mpsd, signal.SIGSTOP)
    try:
        node.start_plugin()
        node.until(lambda: node.allocatable(SMALL) == full)
    finally:
        os.kill(mpsd, signal.SIGCONT)
    assert key(pod) in {record.key for record in node.records()}


def mpsd_pid(node: PluginNode) -> int:
    pid = node.mpsd.call("status")["pid"]
    assert isinstance(pid, int)
    return pid


def test_containers_wait_while_their_daemon_is_away_and_start_when_it_is_back(node: PluginNode) -> None:
    node.start()
    node.mpsd.fault("refuse-start")
    snapshot = node.mpsd.until_ready()
    for gpu in snapshot.gpus:
        assert gpu.daemon is not None
        assert gpu.daemon.pid is not None
        os.kill(gpu.daemon.pid, signal.SIGKILL)
    node.mpsd.until(lambda s: all(gpu.daemon is not None and gpu.daemon.state != "ready" for gpu in s.gpus))
    pod = node.admit("a")
    assert pod.phase == "Admitted"
    node.until(lambda: pod.container().reason == "CreateContainerError")
    assert "unresolvable CDI devices gpufrac.dev/allocation=s" in pod.container().message
    waiting = node.until_status(lambda s: s.allocations and s.allocations[0].state == "waiting")
    assert "MPS daemon" in waiting.allocations[0].reason
    node.mpsd.clear("refuse-start")
    assert node.kubelet.wait_settled([pod], WAIT_S)
    assert pod.container().pid is not None


def test_files_are_withdrawn_while_a_daemon_is_down_and_other_gpus_keep_theirs(node: PluginNode) -> None:
    node.start()
    first = node.admit_running("a", BIG)
    node.admit_running("b", BIG)
    third = node.admit_running("c", BIG)
    gpu_of = {record.key: record.gpus[0] for record in node.records()}
    victim = gpu_of[key(first)]
    assert gpu_of[key(third)] != victim
    node.mpsd.fault("refuse-start")
    gpu = next(g for g in node.mpsd.until_ready().gpus if g.info.uuid == victim)
    assert gpu.daemon is not None
    assert gpu.daemon.pid is not None
    os.kill(gpu.daemon.pid, signal.SIGKILL)
    others = {k for k, uuid in gpu_of.items() if uuid != victim}
    node.until(lambda: node.cdi_keys() == others)
    node.mpsd.clear("refuse-start")
    node.until(lambda: node.cdi_keys() == set(gpu_of))
    assert first.container().pid is not None


def test_a_restarted_kubelet_finds_the_plugin_and_its_pods_stay(node: PluginNode) -> None:
    node.start()
    pods = [node.admit_running(name) for name in "ab"]
    keys = {record.key for record in node.records()}
    assert node.kubelet.restart() == []
    node.until(lambda: node.allocatable(SMALL) > 0)
    assert all(pod.container().pid is not None for pod in pods)
    assert {record.key for record in node.records()} == keys
    assert node.admit_running("c").phase == "Admitted"


def test_the_plugin_registers_again_when_the_kubelet_drops_its_stream(node: PluginNode) -> None:
    """The replacement race: the end of an old plugin's stream disconnects the new one, and nobody tells it."""
    node.kubelet.start()
    node.mpsd.start()
    node.mpsd.until_ready()
    with rival_plugin(node, SMALL):
        node.until(lambda: node.allocatable(SMALL) == 1)
        node.start_plugin()
        node.until(lambda: node.allocatable(SMALL) == 18)
        before = node.kubelet.registrations
    node.until(lambda: node.kubelet.registrations > before)
    node.until(lambda: node.allocatable(SMALL) == 18)


class Rival(rpc.DevicePluginServicer):
    """A plugin of one device that keeps its list stream open."""

    def GetDevicePluginOptions(  # noqa: N802
        self, request: pb.Empty, context: grpc.ServicerContext
    ) -> pb.DevicePluginOptions:
        return pb.DevicePluginOptions()

    def ListAndWatch(  # noqa: N802
        self, request: pb.Empty, context: grpc.ServicerContext
    ) -> Iterator[pb.ListAndWatchResponse]:
        ended = threading.Event()
        context.add_callback(ended.set)
        yield pb.ListAndWatchResponse(devices=[pb.Device(ID="x", health="Healthy")])
        ended.wait()


@contextlib.contextmanager
def rival_plugin(node: PluginNode, resource: str) -> Iterator[None]:
    """Registers one of our resources on another socket, then goes away."""
    directory = node.kubelet.device_plugins
    server = grpc.server(ThreadPoolExecutor(4))
    rpc.add_DevicePluginServicer_to_server(Rival(), server)
    server.add_insecure_port(f"unix:{directory}/rival.sock")
    server.start()
    try:
        with grpc.insecure_channel(f"unix:{directory}/kubelet.sock") as channel:
            request = pb.RegisterRequest(version="v1beta1", endpoint="rival.sock", resource_name=resource)
            rpc.RegistrationStub(channel).Register(request, timeout=WAIT_S)
        yield
    finally:
        server.stop(0).wait()


class DeafKubelet(rpc.RegistrationServicer):
    """Registers a plugin, but its list stream never comes about."""

    def __init__(self, directory: str) -> None:
        self.directory, self.registrations = directory, 0

    def Register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.Empty:  # noqa: N802
        with grpc.insecure_channel(f"unix:{self.directory}/{request.endpoint}") as channel:
            rpc.DevicePluginStub(channel).GetDevicePluginOptions(pb.Empty(), timeout=WAIT_S)
        self.registrations += request.resource_name == SMALL
        return pb.Empty()


def test_the_plugin_registers_again_when_no_list_stream_is_opened(node: PluginNode) -> None:
    directory = node.kubelet.device_plugins
    os.makedirs(directory)
    kubelet = DeafKubelet(directory)
    server = grpc.server(ThreadPoolExecutor(8))
    rpc.add_RegistrationServicer_to_server(kubelet, server)
    server.add_insecure_port(f"unix:{directory}/kubelet.sock")
    server.start()
    try:
        node.start_plugin()
        node.until(lambda: kubelet.registrations >= 2)
    finally:
        server.stop(0).wait()


def test_several_list_streams_all_see_every_change(node: PluginNode) -> None:
    node.start()
    path = f"unix:{node.kubelet.device_plugins}/{socket_name(BIG)}"
    with grpc.insecure_channel(path) as channel:
        stub = rpc.DevicePluginStub(channel)
        streams = [stub.ListAndWatch(pb.Empty(), timeout=WAIT_S) for _ in range(3)]
        first = [next(stream) for stream in streams]
        assert all(sum(d.health == "Healthy" for d in message.devices) == 4 for message in first)
        for name in "abcdefghi":
            node.admit(name, SMALL)
        for stream in streams:
            assert any(sum(d.health == "Healthy" for d in message.devices) < 4 for message in stream)
            stream.cancel()


def test_a_config_reload_adds_and_drops_resources_and_a_bad_file_changes_nothing(node: PluginNode) -> None:
    node.start()
    pod = node.admit_running("a", SMALL)
    idle = node.admit_running("b", BIG)
    node.kubelet.delete(idle)
    new = "  - {name: gpufrac.dev/new, memory: {request: 2Gi}, compute: {mode: sm-sharing}}\n"
    more = RESOURCES.replace("request: 8Gi}, compute: {mode: sm", "request: 16Gi}, compute: {mode: sm") + new
    node.write_config(more)
    node.until(lambda: node.allocatable("gpufrac.dev/new") > 0)
    assert key(pod) in {record.key for record in node.records()}
    node.write_config("\n  - {name: x}\n")
    status = node.until_status(lambda s: s.config_error)
    assert "resources[0]" in status.config_error
    assert {r.name for r in status.resources} >= {SMALL, "gpufrac.dev/new"}
    node.write_config(f"\n  - {{name: {UNITS}, unit: 2Gi, compute: {{mode: sm-sharing}}}}\n")
    status = node.until_status(lambda s: not s.config_error and len(s.resources) == 2)
    assert {r.name for r in status.resources} == {UNITS, SMALL}, "what a pod holds stays listed"
    assert next(r for r in status.resources if r.name == SMALL).reason == "it is no longer in the config"
    node.until(lambda: node.allocatable("gpufrac.dev/new") == 0)
    assert pod.container().pid is not None
    node.kubelet.delete(pod)
    node.until_status(lambda s: [r.name for r in s.resources] == [UNITS])


def test_a_second_plugin_waits_and_says_for_whom(node: PluginNode) -> None:
    plugin = node.start()
    second = node.start_plugin()
    node.until(lambda: "another instance runs on this node" in node.log())
    assert str(plugin.pid) in node.log()
    plugin.send_signal(signal.SIGTERM)
    assert plugin.wait(WAIT_S) == 0
    node.until_status(lambda s: s.pid == second.pid)


def test_sigterm_is_clean_and_leaves_pods_and_files_alone(node: PluginNode) -> None:
    plugin = node.start()
    pod = node.admit_running("a")
    plugin.send_signal(signal.SIGTERM)
    assert plugin.wait(WAIT_S) == 0
    assert "Traceback" not in node.log()
    assert not (Path(node.kubelet.device_plugins) / socket_name(SMALL)).exists()
    assert node.cdi_keys() == {key(pod)}
    assert pod.container().pid is not None


def test_a_lost_gpu_fails_nobody_else(node: PluginNode) -> None:
    node.start()
    pod = node.admit_running("a")
    (record,) = node.records()
    node.mpsd.driver.set_fault("lost", uuid=record.gpus[0])
    node.until(lambda: node.allocatable(SMALL) == 9)
    other = node.admit_running("b")
    assert other.phase == "Admitted"
    assert pod.container().pid is not None
    node.mpsd.driver.clear_fault("lost", uuid=record.gpus[0])
    node.until(lambda: node.allocatable(SMALL) == 18)


def test_allocations_without_records_are_adopted_under_their_keys(node: PluginNode) -> None:
    plugin = node.start()
    pods = [node.admit_running(name) for name in "ab"]
    kill(plugin)
    for path in (node.root / "state" / "plugin" / "allocations").iterdir():
        path.unlink()
    node.start_plugin()
    node.until(lambda: {record.key for record in node.records()} == {key(pod) for pod in pods})
    assert all(record.adopted for record in node.records())
    node.until(lambda: node.cdi_keys() == {key(pod) for pod in pods})
    node.kubelet.restart_container(pods[0])
    assert node.kubelet.wait_settled(pods, WAIT_S)


PAIR = "gpufrac.dev/pair-20gi"
GROUPED = f"""{RESOURCES}
  - {{name: {PAIR}, memory: {{request: 20Gi}}, compute: {{mode: sm-sharing}}, gpus: {{groups: [pair0]}}}}
"""


@pytest.mark.parametrize("driver", ["", "615.71.09"], ids=["protocol-2", "protocol-3"])
def test_a_pod_gets_a_share_of_a_group_and_an_operator_drains_a_member(short_tmp: Path, driver: str) -> None:
    with plugin_node(short_tmp, 4, GROUPED, "gpus: {groups: {pair0: [2, 3]}}", driver) as node:
        plugin = node.start(SMALL, PAIR)
        pod = node.admit_running("a", PAIR)
        (record,) = node.records()
        uuids = tuple(gpu.uuid for gpu in node.status().gpus)
        assert (record.group, record.gpus) == ("pair0", uuids[2:])
        edits = pod.container().edits
        assert edits is not None
        (mounted,) = (host for inside, host, _ in edits.mounts if inside == "/tmp/nvidia-mps")
        root = f"{node.root}/run/mps/pair0"
        assert mounted == root if not driver else mounted.startswith(f"{root}.ns/")
        assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in edits.env
        daemons = {gpu.daemon.pid for gpu in node.mpsd.client.snapshot().gpus[2:] if gpu.daemon is not None}
        assert len(daemons) == 1, "one daemon for both"
        status = node.status()
        assert [(gpu.group, gpu.granted_bytes >> 30) for gpu in status.gpus] == [("", 0)] * 2 + [("pair0", 20)] * 2

        drain = node.call("drain", gpu=uuids[3], reason="fan")
        assert drain["reason"] == "fan"
        node.until(lambda: node.allocatable(PAIR) == 1)  # its own
        kill(plugin)
        node.start_plugin()
        node.until_status(lambda s: s.gpus[3].drained.endswith(": fan"))
        assert [target["gpus"] for target in node.call("targets", pod="a")] == [list(uuids[2:])]
        assert [gpu["uuid"] for gpu in node.call("clients")] == list(uuids)
        node.kubelet.restart_container(pod)
        assert node.kubelet.wait_settled([pod], WAIT_S)
        node.call("undrain", gpu=uuids[3])
        node.until(lambda: node.allocatable(PAIR) == 3)
        for method, params in (
            ("drain", {"gpu": "x"}),
            ("drain", {}),
            ("targets", {"pod": "b"}),
            ("undrain", {"g": 1}),
        ):
            with pytest.raises(GpufracError, match=r"^cannot "):
                node.call(method, **params)


# --- hard limits

R615 = "615.71.09"
BURST, CALM = "gpufrac.dev/burst", "gpufrac.dev/calm"
BORROWING = f"""
  - {{name: {BURST}, memory: {{request: 8Gi, limit: 16Gi}}, compute: {{mode: MODE}}, gpus: {{include: [0]}}}}
  - {{name: {CALM}, memory: {{request: 8Gi}}, compute: {{mode: sm-sharing}}, gpus: {{include: [1]}}}}
"""


@contextlib.contextmanager
def hard_node(root: Path, mode: str) -> Iterator[PluginNode]:
    """A node that can hold containers to hard limits, ready to be started."""
    with plugin_node(root, 2, BORROWING.replace("MODE", mode), "", R615) as node:
        for hook in (False, True):
            write_nvidia_spec(str(root / "cdi"), [gpu_uuid(0), gpu_uuid(1)], memory_hook=hook)
        yield node


def cgroup_of(node: PluginNode, pod: AdmittedPod) -> str:
    pid = pod.container().pid
    assert pid is not None
    return node.mpsd.driver.cgroups.cgroup_of(pid)


@pytest.mark.parametrize("mode", ["sm-sharing", "time-slicing"])
def test_limits_of_containers_are_hard_and_watched(short_tmp: Path, mode: str) -> None:
    with hard_node(short_tmp, mode) as node:
        node.start(BURST, CALM)
        node.until_status(lambda s: s.hard_limits.startswith("yes"))
        borrower, calm = node.admit_running("b", BURST), node.admit_running("c", CALM)
        records = {record.resource: record for record in node.records()}
        assert (records[BURST].soft_bytes, records[CALM].soft_bytes) == (8 * GIB, 0)
        edits = borrower.container().edits
        assert edits is not None
        (mounted,) = (host for inside, host, _ in edits.mounts if inside == "/tmp/nvidia-mps")
        assert os.listdir(mounted) == ["control"]
        backend, cgroup = SimulatedBackend(node.mpsd.simulation), cgroup_of(node, borrower)
        backend.open()
        asked = (gpu_uuid(0), cgroup)
        assert backend.memory_limits(*asked)[:2] == (8 * GIB, 16 * GIB)
        assert backend.memory_limits(gpu_uuid(1), cgroup_of(node, calm))[:2] == (0, 8 * GIB)
        assert all(a.enforcement == "hard" and not a.reason for a in node.status().allocations)
        backend.set_memory_limits(*asked, 0, None)
        node.until_status(lambda s: s.limit_drifts == 1)
        node.until(lambda: backend.memory_limits(*asked)[:2] == (8 * GIB, 16 * GIB))
        healed = node.until_status(lambda s: not any(a.reason for a in s.allocations))
        assert "may borrow 8Gi" in next(a.burst for a in healed.allocations if a.resource == BURST)
        backend.close()


def is_attached_at(level: str, status: PluginStatus) -> bool:
    return (status.allocations[0].enforcement, status.allocations[0].state) == (level, "attached")


def offers(node: PluginNode, count: int) -> bool:
    return node.allocatable(BURST) == count


def test_a_driver_goes_down_and_up_again_between_restarts(short_tmp: Path) -> None:
    with hard_node(short_tmp, "sm-sharing") as node:
        plugin = node.start(BURST, CALM)
        node.until_status(lambda s: s.hard_limits.startswith("yes"))
        pod = node.admit_running("c", CALM)
        for version, level, offered in (("580.95.05", "cooperative", 0), (R615, "hard", 9)):
            kill(plugin)
            node.mpsd.driver.set_fault("driver-version", version)
            plugin = node.start_plugin()
            status = node.until_status(partial(is_attached_at, level))
            assert status.allocations[0].granted_enforcement == "hard"
            assert ("no:" in status.hard_limits) is (level != "hard")
            node.until(partial(offers, node, offered))
            node.kubelet.restart_container(pod)
            assert node.kubelet.wait_settled([pod], WAIT_S)
            edits = pod.container().edits
            assert edits is not None
            assert edits.env["GPUFRAC_ENFORCEMENT"] == level


@pytest.mark.parametrize("seed", [1, 2])
def test_kills_at_any_moment_lose_and_double_nothing(node: PluginNode, seed: int) -> None:
    """Pods come and go while plugin, mpsd and kubelet are killed and restarted; then everything is counted."""
    rng = random.Random(seed)
    plugin = node.start()
    mpsd = node.mpsd
    pods: dict[str, AdmittedPod] = {}
    for step in range(60):
        action = rng.random()
        if action < 0.5:
            resource = rng.choice([SMALL, BIG, UNITS, SLICED])
            pod = node.admit(f"pod{step}", resource, rng.randint(1, 20) if resource == UNITS else 1)
            if pod.phase == "Admitted":
                pods[pod.spec.name] = pod
            else:
                node.kubelet.delete(pod)
        elif action < 0.72 and pods:
            node.kubelet.delete(pods.pop(rng.choice(sorted(pods))))
        elif action < 0.84:
            kill(plugin)
            plugin = node.start_plugin()
            if rng.random() < 0.7:
                node.until(lambda: node.allocatable(SMALL) or node.allocatable(SLICED), WAIT_S)
        elif action < 0.92:
            os.kill(mpsd_pid(node), signal.SIGKILL)
            mpsd.start()
            mpsd.until_ready()
        else:
            for lost in node.kubelet.restart():
                pods.pop(lost.spec.name, None)
                node.kubelet.delete(lost)
        check(node, pods)
    node.until_status(lambda s: len(s.allocations) >= len(pods))
    node.until(lambda: node.kubelet.wait_settled(pods.values(), 1.0))
    keys = {key(pod) for pod in pods.values()}
    node.until(lambda: node.cdi_keys() >= keys)
    node.until(lambda: {record.key for record in node.records()} == keys)
    for pod in pods.values():
        node.kubelet.delete(pod)
    node.until(lambda: node.records() == [] and node.cdi_keys() == set())
    node.until(lambda: node.allocatable(SMALL) == 18)


def check(node: PluginNode, pods: dict[str, AdmittedPod]) -> None:
    """What holds at every moment, judged by what is on disk."""
    records = node.records()
    shares: dict[str, dict[tuple[str, str], int]] = {}
    modes: dict[str, set[str]] = {}
    for record in records:
        held = shares.setdefault(record.gpus[0], {})
        modes.setdefault(record.gpus[0], set()).add(record.mode)
        for share in record.device_ids:
            held[record.resource, share] = record.share_bytes
    for gpu, held in shares.items():
        assert sum(held.values()) <= 79 * GIB, gpu
        assert len(modes[gpu]) == 1, gpu
    recorded = {(record.resource, record.device_ids) for record in records}
    for pod in pods.values():
        for container in pod.containers:
            for resource, device_ids in container.devices.items():
                assert (resource, tuple(sorted(device_ids))) in recorded, pod.spec.name
    used: dict[tuple[str, str], str] = {}
    for pod in pods.values():
        for resource, device_ids in pod.container().devices.items():
            for share in device_ids:
                assert used.setdefault((resource, share), pod.spec.name) == pod.spec.name, "a share was granted twice"


def test_a_bad_config_stops_the_start_with_every_problem(short_tmp: Path) -> None:
    path = short_tmp / "bad.yaml"
    head = "apiVersion: gpufrac.dev/v1\nkind: NodeConfig\n"
    path.write_text(f"{head}resources:\n  - {{name: x, unit: 1k, compute: {{}}}}\nmem: 1\n")
    got = subprocess.run(
        [sys.executable, "-m", "deviceplugin.cli.main", "plugin", "--config", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert got.returncode == 2
    for part in ("resources[0].name", "resources[0].unit", "resources[0].compute.mode", "mem"):
        assert part in got.stderr, got.stderr
    assert "Traceback" not in got.stderr


def test_a_copy_of_a_cdi_file_neither_stops_a_container_nor_starts_one(short_tmp: Path) -> None:
    """A copy is noticed when it comes: the looks from time to time are turned off."""
    never = {"deviceplugin.reconcile.files.GUARD_S": NEVER_S, "deviceplugin.reconcile.attacher.VERIFY_S": NEVER_S}
    node = PluginNode(short_tmp, constants={**never, "deviceplugin.reconcile.specguard.FRESH_S": 0.0})
    try:
        node.kubelet.start()
        mpsd = node.mpsd.start()
        node.mpsd.until_ready()
        node.start_plugin()
        node.until(lambda: node.allocatable(SMALL) > 0)
        pod = node.admit_running("web-0")
        (file,) = (short_tmp / "cdi").glob("gpufrac.dev-allocation_*.json")
        (short_tmp / "cdi" / "backup.json").write_bytes(file.read_bytes())
        node.until(lambda: not (short_tmp / "cdi" / "backup.json").exists())
        assert (short_tmp / "cdi" / "backup.json.set-aside").exists()
        node.until(lambda: "backup.json" in node.log())  # told once it is done
        end(mpsd)
        node.until(lambda: not node.cdi_keys())
        (short_tmp / "cdi" / "backup.json.set-aside").rename(short_tmp / "cdi" / "backup.yaml")
        node.until(lambda: not (short_tmp / "cdi" / "backup.yaml").exists())
        assert key(pod) == node.status().allocations[0].key
    finally:
        node.close()


def test_hard_time_slicing_needs_no_mps_binary(short_tmp: Path) -> None:
    sliced = f"""
  - {{name: {BURST}, memory: {{request: 8Gi}}, compute: {{mode: time-slicing}}, enforcement: hard}}
  - {{name: {CALM}, memory: {{request: 8Gi}}, compute: {{mode: sm-sharing}}}}
"""
    with plugin_node(short_tmp, 1, sliced, "", R615) as node:
        write_nvidia_spec(str(short_tmp / "cdi"), [gpu_uuid(0)], memory_hook=True)
        text = node.config.read_text().replace("mps: {", "mps: {binary: /nonexistent/nvidia-cuda-mps-control, ")
        node.config.write_text(text)
        node.kubelet.start()
        node.mpsd.start()
        node.start_plugin()
        node.until(lambda: node.allocatable(BURST) == 9)
        node.until_status(lambda s: s.hard_limits.startswith("yes"))
        node.admit_running("p", BURST)
        node.until(lambda: node.allocatable(CALM) == 0)
        daemon = node.mpsd.client.snapshot().gpus[0].daemon
        assert daemon is not None
        assert "No such file or directory: is the driver's MPS package installed" in daemon.reason


def test_a_kubelet_with_another_root_dir_is_served_and_its_pods_are_let_go(short_tmp: Path) -> None:
    node = PluginNode(short_tmp, gpus=1, root_dir="data")
    try:
        node.start()
        assert not (node.kubelet_root / "device-plugins").exists()
        for number in range(4):
            pods = [node.admit_running(f"p{number}-{n}") for n in range(2)]
            node.until_status(lambda s: not s.kubelet_error and all(a.pod for a in s.allocations))
            for pod in pods:
                node.kubelet.delete(pod)
        node.until(lambda: not node.records())
    finally:
        node.close()


def test_a_root_dir_that_is_not_the_kubelet_s_is_named(short_tmp: Path) -> None:
    node = PluginNode(short_tmp, gpus=1, root_dir="data")
    try:
        node.kubelet_root = short_tmp / "elsewhere"
        node.write_config()
        node.start()
        seen = node.until_status(lambda s: s.kubelet_error)
        assert f"set kubelet.root (now {short_tmp}/elsewhere)" in seen.kubelet_error
        assert "E0000" not in node.log()
    finally:
        node.close()


def test_a_directory_for_device_plugins_below_the_root_dir_is_told_for_what_it_is(short_tmp: Path) -> None:
    """The natural mistake of who has another --root-dir: this directory alone does not follow it."""
    node = PluginNode(short_tmp, gpus=1, root_dir="data")
    try:
        node.device_plugins = node.kubelet_root / "device-plugins"
        node.write_config()
        node.kubelet.start()
        node.start_plugin()
        seen = node.until_status(lambda s: all(resource.registration_error for resource in s.resources))
        for resource in seen.resources:
            assert "kubelet.devicePlugins is not its directory for device plugins" in resource.registration_error
    finally:
        node.close()


def test_the_plugin_raises_its_limit_of_open_files(node: PluginNode) -> None:
    before = getrlimit(RLIMIT_NOFILE)
    setrlimit(RLIMIT_NOFILE, (512, before[1]))  # children inherit it
    try:
        plugin = node.start()
    finally:
        setrlimit(RLIMIT_NOFILE, before)
    soft, hard = prlimit(plugin.pid, RLIMIT_NOFILE)
    assert soft == nofile_soft(512, hard) > 512
