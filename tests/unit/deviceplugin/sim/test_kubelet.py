"""The stub kubelet against a real gRPC plugin: every behaviour of a real kubelet that ours relies on."""

import contextlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from cdi.encode import encode_spec
from cdi.model import ContainerEdits, Device, Mount, Spec
from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.kubelet import checkpoint as plugin_checkpoint
from deviceplugin.kubelet.podresources import PodResourcesClient, PodResourcesError
from deviceplugin.sim.kubelet.kubelet import StubKubelet
from deviceplugin.sim.kubelet.pod import AdmittedPod, Phase, PodError
from deviceplugin.sim.objects.pods import ContainerSpec, PodSpec, Role
from deviceplugin.sim.runtime.container import State
from mpsd.common.errors import GpufracError
from tests.unit.deviceplugin.sim.tinyplugin import RESOURCE, TinyPlugin, socket_inode
from tests.waiting import WAIT_S


def pod(name: str, *counts: int, roles: tuple[Role, ...] = (), env: dict[str, str] | None = None) -> PodSpec:
    """A pod with one container per count, named c0, c1, ..."""
    containers = tuple(
        ContainerSpec(
            f"c{i}",
            {RESOURCE: count} if count else {},
            roles[i] if i < len(roles) else Role.APP,
            tuple((env or {}).items()),
        )
        for i, count in enumerate(counts)
    )
    return PodSpec(name, containers)


@pytest.fixture
def kubelet(short_tmp: Path) -> Iterator[StubKubelet]:
    (short_tmp / "cdi").mkdir()
    stub = StubKubelet(short_tmp / "k", [str(short_tmp / "cdi")], rng=random.Random(1), call_timeout_s=WAIT_S)
    with stub:
        yield stub


@pytest.fixture
def plugin(kubelet: StubKubelet) -> Iterator[TinyPlugin]:
    with TinyPlugin(kubelet.device_plugins, ["a", "b", "c", "d"]) as tiny:
        assert kubelet.wait_for(RESOURCE, 4, WAIT_S)
        yield tiny


def admitted(kubelet: StubKubelet, spec: PodSpec) -> AdmittedPod:
    found = kubelet.admit(spec)
    assert found.phase is Phase.ADMITTED, found.message
    return found


def running(kubelet: StubKubelet, spec: PodSpec) -> AdmittedPod:
    found = admitted(kubelet, spec)
    assert kubelet.wait_settled([found], WAIT_S)
    return found


def listed(kubelet: StubKubelet) -> dict[tuple[str, str, str], dict[str, tuple[str, ...]]]:
    client = PodResourcesClient(kubelet.pod_resources_socket)
    try:
        return {where: held for where, held in client.list().items() if held}
    finally:
        client.close()


def allocatable(kubelet: StubKubelet) -> tuple[int, int]:
    shown = kubelet.resources[RESOURCE]
    return shown.capacity, shown.allocatable


def write_cdi(directory: Path, name: str, *env: str) -> None:
    spec = Spec(
        kind="example.com/gpu",
        devices=(
            Device(
                name=name,
                container_edits=ContainerEdits(
                    env=env, mounts=(Mount(host_path="/host", container_path="/inside", options=("bind", "ro")),)
                ),
            ),
        ),
    )
    (directory / "x.tmp").write_bytes(encode_spec(spec))
    os.replace(directory / "x.tmp", directory / "x.json")


# --- registration


def test_register_asks_for_options_and_reads_the_list(kubelet: StubKubelet, plugin: TinyPlugin) -> None:
    assert kubelet.registrations == 1
    plugin.update("a", ("b", "Unhealthy"), ("c", "healthy"))
    assert wait_until(kubelet, lambda: allocatable(kubelet) == (3, 1)), "only the exact word is healthy"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": "v1"}, 'requested API version "v1" is not supported'),
        ({"resource_name": "gpu"}, 'the ResourceName "gpu" is invalid'),
        ({"resource_name": "kubernetes.io/gpu"}, "is invalid"),
        ({"endpoint": "../tiny.sock"}, "failed to dial device plugin"),
    ],
)
def test_register_refuses(kubelet: StubKubelet, changes: dict[str, str], text: str) -> None:
    plugin = TinyPlugin(kubelet.device_plugins)
    with pytest.raises(grpc.RpcError) as caught:
        plugin.register(**changes)  # type: ignore[arg-type]
    assert text in str(caught.value.details())
    assert caught.value.code() is grpc.StatusCode.UNKNOWN
    assert not kubelet.resources


def test_register_of_an_endpoint_that_does_not_serve_takes_until_the_caller_s_deadline(kubelet: StubKubelet) -> None:
    plugin = TinyPlugin(kubelet.device_plugins)
    with pytest.raises(grpc.RpcError):
        plugin.register(timeout_s=0.3)
    assert not kubelet.resources


def test_end_of_an_old_stream_disconnects_the_new_plugin(kubelet: StubKubelet, plugin: TinyPlugin) -> None:
    with TinyPlugin(kubelet.device_plugins, ["x", "y"], socket="new.sock") as new:
        assert wait_until(kubelet, lambda: allocatable(kubelet) == (2, 2))
        plugin.stop()
        assert wait_until(kubelet, lambda: allocatable(kubelet) == (2, 0)), "all devices unhealthy, and it stays so"
        for _ in range(5):  # its own old stream may end late and disconnect it once more: plugins try again
            with contextlib.suppress(grpc.RpcError):
                new.register()
            if wait_until(kubelet, lambda: allocatable(kubelet) == (2, 2), 2.0):
                return
        pytest.fail("registered again and again, and its devices are not healthy")


def test_two_registrations_on_one_socket_open_two_streams(kubelet: StubKubelet, plugin: TinyPlugin) -> None:
    plugin.register()
    assert wait_until(kubelet, lambda: plugin.streams == 2)
    plugin.update("a", "b", "c", "d", "e")
    assert kubelet.wait_for(RESOURCE, 5, WAIT_S)


def test_capacity_stays_five_minutes_after_the_plugin_went(short_tmp: Path) -> None:
    clock = [0.0]
    with StubKubelet(short_tmp / "k", [], monotonic=lambda: clock[0]) as kubelet:
        with TinyPlugin(kubelet.device_plugins, ["a"]):
            assert kubelet.wait_for(RESOURCE, 1, WAIT_S)
        assert wait_until(kubelet, lambda: allocatable(kubelet) == (1, 0))
        clock[0] = 299.0
        assert allocatable(kubelet) == (1, 0)
        clock[0] = 301.0
        assert allocatable(kubelet) == (0, 0), "the name stays in node status"
        assert not kubelet.serves(RESOURCE)


# --- admission


def test_a_container_gets_devices_and_the_cached_answer(kubelet: StubKubelet, plugin: TinyPlugin) -> None:
    found = running(kubelet, pod("p", 2, env={"FOO": "1"}))
    ids = found.container("c0").devices[RESOURCE]
    assert len(ids) == 2
    assert sorted(plugin.allocated[0]) == list(ids)
    edits = found.container("c0").edits
    assert edits is not None
    assert edits.env == {"IDS": ",".join(ids), "FOO": "1"}
    assert listed(kubelet) == {("default", "p", "c0"): {RESOURCE: ids}}


def test_the_order_of_ids_is_random(kubelet: StubKubelet, plugin: TinyPlugin) -> None:
    orders = set()
    for number in range(12):
        found = admitted(kubelet, pod(f"p{number}", 4))
        orders.add(tuple(plugin.allocated[-1]))
        kubelet.delete(found)
    assert len(orders) > 1


@pytest.mark.parametrize(
    ("held", "asked", "text"),
    [
        (0, 5, "requested number of devices unavailable for example.com/share. Requested: 5, Available: 4"),
        (3, 2, "requested number of devices unavailable for example.com/share. Requested: 2, Available: 1"),
    ],
)
def test_too_few_devices(kubelet: StubKubelet, plugin: TinyPlugin, held: int, asked: int, text: str) -> None:
    if held:
        admitted(kubelet, pod("first", held))
    refused = kubelet.admit(pod("second", asked))
    assert (refused.phase, refused.reason) == (Phase.FAILED, "UnexpectedAdmissionError")
    assert refused.message == f"Allocate failed due to {text}, which is unexpected"
    assert not os.path.exists(f"{kubelet.root}/pods/{refused.uid}")


def test_a_plugin_s_refusal_is_shown_as_go_prints_it(kubelet: StubKubelet, plugin: TinyPlugin) -> None:
    plugin.refusal = "no room on any GPU"
    refused = kubelet.admit(pod("p", 1))
    assert refused.message == (
        "Allocate failed due to rpc error: code = ResourceExhausted desc = no room on any GPU, which is unexpected"
    )
    plugin.refusal = ""
    admitted(kubelet, pod("q", 4))


def test_an_empty_answer_refuses_the_pod(kubelet: StubKubelet, plugin: TinyPlugin) -> None:
    plugin.refusal = "empty"
    assert "no containers return in allocation response" in kubelet.admit(pod("p", 1)).message


def test_no_healthy_devices(kubelet: StubKubelet, plugin: TinyPlugin) -> None:
    plugin.update(("a", "Unhealthy"))
    assert wait_until(kubelet, lambda: allocatable(kubelet) == (1, 0))
    assert kubelet.admit(pod("p", 1)).message == (
        "Allocate failed due to no healthy devices present; cannot allocate unhealthy devices example.com/share, "
        "which is unexpected"
    )


def test_unknown_resources_and_zero_are_admitted_without_asking(kubelet: StubKubelet, plugin: TinyPlugin) -> None:
    spec = PodSpec("p", (ContainerSpec("c", {"other.com/thing": 3}),))
    assert running(kubelet, spec).container().devices == {}
    assert running(kubelet, pod("q", 0)).container().devices == {}
    assert plugin.allocated == []


def test_one_name_is_admitted_once(kubelet: StubKubelet, plugin: TinyPlugin) -> None:
    first = admitted(kubelet, pod("p", 1))
    with pytest.raises(PodError, match='pods "p" already exists'):
        kubelet.admit(pod("p", 1))
    kubelet.delete(first)
    assert admitted(kubelet, pod("p", 1)).uid != first.uid


def test_init_containers_pass_devices_on_and_sidecars_keep_them(kubelet: StubKubelet, plugin: TinyPlugin) -> None:
    found = running(kubelet, pod("p", 1, 1, 1, 1, 1, roles=(Role.INIT, Role.INIT, Role.SIDECAR)))
    first, second, sidecar, app, last = (found.container(f"c{i}").devices[RESOURCE] for i in range(5))
    assert first == second == sidecar, "a sidecar takes what an init container left, and keeps it"
    assert len({sidecar, app, last}) == 3
    assert [len(ids) for ids in plugin.allocated] == [1, 1, 1, 1, 1], "every container is asked for"
    states = [c.state for c in found.containers]
    assert states == [State.TERMINATED, State.TERMINATED, State.RUNNING, State.RUNNING, State.RUNNING]
    assert {name for _, _, name in listed(kubelet)} == {"c2", "c3", "c4"}, "PodResources omits plain init containers"


def test_app_containers_take_what_init_containers_had_and_more(kubelet: StubKubelet, plugin: TinyPlugin) -> None:
    found = admitted(kubelet, pod("p", 2, 3, roles=(Role.INIT,)))
    init, app = (set(found.container(f"c{i}").devices[RESOURCE]) for i in range(2))
    assert init < app


# --- preferred allocation


@pytest.fixture
def chooser(kubelet: StubKubelet) -> Iterator[TinyPlugin]:
    options = pb.DevicePluginOptions(get_preferred_allocation_available=True)
    with TinyPlugin(kubelet.device_plugins, ["a", "b", "c", "d"], options=options) as tiny:
        assert kubelet.wait_for(RESOURCE, 4, WAIT_S)
        yield tiny


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        (["c", "b"], {"b", "c"}),
        (["nonsense", "d", "c"], {"c", "d"}),
        ([], None),
        (["a"], None),
    ],
)
def test_preferred_devices_are_taken(
    kubelet: StubKubelet, chooser: TinyPlugin, wish: list[str], expected: set[str] | None
) -> None:
    chooser.preference = wish
    chosen = set(admitted(kubelet, pod("p", 2)).container().devices[RESOURCE])
    assert len(chosen) == 2
    assert set(wish) & {"a", "b", "c", "d"} <= chosen
    assert expected is None or chosen == expected
    available, must_include, size = chooser.preferred[0]
    assert (set(available), must_include, size) == ({"a", "b", "c", "d"}, [], 2)


def test_a_longer_preference_is_cut(kubelet: StubKubelet, chooser: TinyPlugin) -> None:
    chooser.preference = ["a", "b", "c", "d"]
    assert len(admitted(kubelet, pod("p", 2)).container().devices[RESOURCE]) == 2


def test_reused_devices_must_be_included(kubelet: StubKubelet, chooser: TinyPlugin) -> None:
    chooser.preference = ["d", "c"]
    found = admitted(kubelet, pod("p", 1, 2, roles=(Role.INIT,)))
    (init,) = found.container("c0").devices[RESOURCE]
    assert chooser.preferred[1][1] == [init]
    assert init in found.container("c1").devices[RESOURCE]


def test_an_error_of_preferred_allocation_refuses_the_pod(kubelet: StubKubelet, chooser: TinyPlugin) -> None:
    chooser.refusal = "preferred"
    assert kubelet.admit(pod("p", 1)).message == (
        "Allocate failed due to device plugin GetPreferredAllocation rpc failed with err: "
        "rpc error: code = Unknown desc = no idea, which is unexpected"
    )


# --- the end of pods


def test_devices_come_back_when_somebody_asks(kubelet: StubKubelet, plugin: TinyPlugin) -> None:
    found = running(kubelet, pod("p", 4))
    pid = found.container().pid
    assert pid is not None
    assert os.path.isdir(f"{kubelet.root}/pods/{found.uid}")
    kubelet.delete(found)
    assert not os.path.exists(f"/proc/{pid}")
    assert not os.path.exists(f"{kubelet.root}/pods/{found.uid}")
    assert [e.pod_uid for e in plugin_checkpoint.read(kubelet.device_plugins)] == [found.uid], "stale until a list"
    assert listed(kubelet) == {}
    assert plugin_checkpoint.read(kubelet.device_plugins), "PodResources does not rewrite it"
    plugin.update("a", "b", "c", "d")
    assert wait_until(kubelet, lambda: not plugin_checkpoint.read(kubelet.device_plugins))
    admitted(kubelet, pod("q", 4))


def test_a_refused_pod_s_first_containers_give_their_devices_back(kubelet: StubKubelet, plugin: TinyPlugin) -> None:
    assert kubelet.admit(pod("p", 3, 3)).phase is Phase.FAILED
    admitted(kubelet, pod("q", 4))


def test_force_deletion_frees_devices_while_the_process_runs(kubelet: StubKubelet, plugin: TinyPlugin) -> None:
    found = running(kubelet, pod("p", 4))
    kubelet.delete(found, force=True)
    pid = found.container().pid
    assert pid is not None
    assert listed(kubelet) == {}
    admitted(kubelet, pod("q", 4))
    assert os.path.exists(f"/proc/{pid}")
    kubelet.end_leftovers()
    assert found.container().pid is None


# --- containers


def cdi_answer(ids: list[str]) -> pb.ContainerAllocateResponse:
    return pb.ContainerAllocateResponse(
        envs={"A": "allocate", "B": "allocate"}, cdi_devices=[pb.CDIDevice(name="example.com/gpu=one")]
    )


def test_creation_is_retried_until_the_file_comes(kubelet: StubKubelet, plugin: TinyPlugin, short_tmp: Path) -> None:
    plugin.answer = cdi_answer
    found = admitted(kubelet, pod("p", 1, 1, roles=(Role.INIT,)))
    first, second = found.containers
    assert wait_until(kubelet, lambda: first.reason == "CreateContainerError")
    assert first.message == "CDI device injection failed: unresolvable CDI devices example.com/gpu=one"
    assert (second.state, second.reason) == (State.WAITING, "ContainerCreating"), "it waits for the init container"
    write_cdi(short_tmp / "cdi", "one", "B=cdi", "C=cdi")
    assert kubelet.wait_settled([found], WAIT_S)
    assert (first.state, second.state) == (State.TERMINATED, State.RUNNING)


def test_env_precedence_and_the_process_environment(kubelet: StubKubelet, plugin: TinyPlugin, short_tmp: Path) -> None:
    write_cdi(short_tmp / "cdi", "one", "B=cdi", "C=cdi")
    plugin.answer = cdi_answer
    found = running(kubelet, pod("p", 1, env={"A": "pod", "B": "pod", "C": "pod"}))
    container = found.container()
    assert container.edits is not None
    assert container.edits.env == {"A": "pod", "B": "cdi", "C": "cdi"}
    assert container.edits.mounts == (("/inside", "/host", ("bind", "ro")),)
    deadline_s = time.monotonic() + WAIT_S
    while not (environ := Path(f"/proc/{container.pid}/environ").read_text()):
        assert time.monotonic() < deadline_s, "the kernel shows it a moment after the exec"
    assert dict(entry.split("=", 1) for entry in environ.split("\0") if entry) == {
        "A": "pod",
        "B": "cdi",
        "C": "cdi",
        "GPUFRAC_SIM_POD_UID": found.uid,
        "GPUFRAC_SIM_CONTAINER": "c0",
        "GPUFRAC_SIM_DEVICES": "",
        "GPUFRAC_SIM_MOUNTS": '{"/inside": "/host"}',
    }
    assert container.pid is not None
    assert os.getsid(container.pid) == container.pid


def test_a_restarted_container_resolves_the_cached_answer_again(
    kubelet: StubKubelet, plugin: TinyPlugin, short_tmp: Path
) -> None:
    write_cdi(short_tmp / "cdi", "one", "C=1")
    plugin.answer = cdi_answer
    found = running(kubelet, pod("p", 1))
    before = found.container().pid
    (short_tmp / "cdi" / "x.json").unlink()
    kubelet.restart_container(found)
    assert wait_until(kubelet, lambda: found.container().reason == "CreateContainerError")
    write_cdi(short_tmp / "cdi", "one", "C=2")
    assert kubelet.wait_settled([found], WAIT_S)
    container = found.container()
    assert container.edits is not None
    assert (container.edits.env["C"], container.restarts) == ("2", 1)
    assert container.pid not in (None, before)
    assert len(plugin.allocated) == 1, "the plugin is not asked again"


def test_pre_start_is_called_before_every_start(kubelet: StubKubelet) -> None:
    options = pb.DevicePluginOptions(pre_start_required=True)
    with TinyPlugin(kubelet.device_plugins, ["a"], options=options) as tiny:
        assert kubelet.wait_for(RESOURCE, 1, WAIT_S)
        found = running(kubelet, pod("p", 1))
        tiny.refusal = "pre-start"
        kubelet.restart_container(found)
        assert wait_until(kubelet, lambda: "PreStartContainer" in found.container().message)
        tiny.refusal = ""
        assert kubelet.wait_settled([found], WAIT_S)
        assert tiny.started[0] == ["a"]
        assert len(tiny.started) >= 3


def test_delete_ends_a_container_that_waits(kubelet: StubKubelet, plugin: TinyPlugin) -> None:
    plugin.answer = cdi_answer
    found = admitted(kubelet, pod("p", 1))
    assert wait_until(kubelet, lambda: found.container().reason == "CreateContainerError")
    kubelet.delete(found)
    assert found.settled
    assert found.container().pid is None


# --- PodResources


def test_pod_resources_may_be_asked_from_inside_allocate(kubelet: StubKubelet, plugin: TinyPlugin) -> None:
    seen = []

    def answer(ids: list[str]) -> pb.ContainerAllocateResponse:
        seen.append(listed(kubelet))
        return pb.ContainerAllocateResponse()

    plugin.answer = answer
    found = admitted(kubelet, pod("p", 1, 1))
    first = found.container("c0").devices
    assert seen == [{}, {("default", "p", "c0"): first}], "a container is shown once its Allocate has returned"


def test_pod_resources_are_rate_limited(kubelet: StubKubelet) -> None:
    client = PodResourcesClient(kubelet.pod_resources_socket)

    def hammer() -> None:
        for _ in range(2000):
            client.list()

    with pytest.raises(PodResourcesError, match="rejected by rate limit"):
        hammer()
    client.close()


# --- restarts of the kubelet


def test_restart_wipes_sockets_and_keeps_files(kubelet: StubKubelet, plugin: TinyPlugin) -> None:
    note = Path(kubelet.device_plugins) / "note.txt"
    note.write_text("stays")
    before = socket_inode(kubelet.socket)
    assert kubelet.restart(readmit_after_s=0) == []
    assert not (Path(kubelet.device_plugins) / plugin.socket).exists(), (
        "the plugin's server runs on, its socket is gone"
    )
    assert note.read_text() == "stays"
    assert socket_inode(kubelet.socket) != before
    assert allocatable(kubelet) == (0, 0)


def test_running_pods_survive_a_restart_and_keep_their_devices(kubelet: StubKubelet, plugin: TinyPlugin) -> None:
    found = running(kubelet, pod("p", 3))
    pid = found.container().pid
    assert kubelet.restart(readmit_after_s=0) == []
    assert (found.phase, found.container().pid) == (Phase.ADMITTED, pid)
    assert kubelet.admit(pod("early", 1)).message.startswith("Allocate failed due to no healthy devices present")
    plugin.stop()
    with TinyPlugin(kubelet.device_plugins, ["a", "b", "c", "d"]) as again:
        assert kubelet.wait_for(RESOURCE, 4, WAIT_S)
        assert "Requested: 2, Available: 1" in kubelet.admit(pod("q", 2)).message
        assert listed(kubelet)["default", "p", "c0"] == found.container().devices
        assert again.allocated == [], "the cached answer is replayed"


def test_a_pod_with_a_finished_init_container_needs_its_devices(kubelet: StubKubelet, plugin: TinyPlugin) -> None:
    found = running(kubelet, pod("p", 1, 1, roles=(Role.INIT,)))
    pid = found.container("c1").pid
    assert kubelet.restart(readmit_after_s=0) == [found], "the plugin did not register in time"
    assert found.message.startswith("Allocate failed due to no healthy devices present; cannot allocate unhealthy")
    assert not os.path.exists(f"/proc/{pid}")


def test_an_unhealthy_device_in_use_kills_such_a_pod_at_the_next_restart(
    kubelet: StubKubelet, plugin: TinyPlugin
) -> None:
    found = running(kubelet, pod("p", 1, 1, roles=(Role.INIT,)))
    (held,) = found.container("c1").devices[RESOURCE]
    plugin.stop()
    devices = [(i, "Unhealthy" if i == held else "Healthy") for i in ("a", "b", "c", "d")]
    again = TinyPlugin(kubelet.device_plugins, devices)
    kubelet.stop()
    kubelet.start()
    with again:
        assert kubelet.wait_for(RESOURCE, 3, WAIT_S)
        failed = kubelet._readmit(kubelet._running.devices, found)
        assert not failed
    assert "previously allocated devices are no longer healthy; cannot allocate unhealthy devices" in found.message


def test_a_damaged_checkpoint_is_forgotten(kubelet: StubKubelet, plugin: TinyPlugin) -> None:
    running(kubelet, pod("p", 4))
    path = Path(kubelet.device_plugins) / "kubelet_internal_checkpoint"
    path.write_bytes(path.read_bytes().replace(b'"c0"', b'"c9"'))
    kubelet.stop()
    plugin.stop()
    kubelet.start()
    with TinyPlugin(kubelet.device_plugins, ["a", "b", "c", "d"]):
        assert kubelet.wait_for(RESOURCE, 4, WAIT_S)
        assert listed(kubelet) == {}
        admitted(kubelet, pod("q", 4))


def test_a_stopped_kubelet_says_so(kubelet: StubKubelet) -> None:
    kubelet.stop()
    with pytest.raises(GpufracError, match="it is stopped"):
        kubelet.admit(pod("p", 1))
    kubelet.start()


def wait_until(kubelet: StubKubelet, condition: object, timeout_s: float = WAIT_S) -> bool:
    """Waits for a condition that a change at the kubelet makes true."""
    assert callable(condition)
    with kubelet._changed:
        return bool(kubelet._changed.wait_for(condition, timeout_s))
