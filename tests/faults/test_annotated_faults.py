"""One table: a fault around annotated pods -> what the runtime is answered, and what is measured. Real processes.

In every row a container runs on GPU 0 before the fault. It keeps what it holds whatever happens; and when the fault is
over, another is made.
"""

import contextlib
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec import structs

from deviceplugin.nri.model import Adjustment, ContainerState
from mpsd.common.marker import MARKER
from mpsd.common.processes import SIMULATED_CONTAINER, SIMULATED_POD_UID
from mpsd.sim.model import gpu_uuid
from tests.faults.annotatednode import AnnotatedNode
from tests.waiting import WAIT_S


@contextlib.contextmanager
def lost_gpu(node: AnnotatedNode) -> Iterator[None]:
    node.driver.set_fault("lost", uuid=gpu_uuid(0))
    node.until(lambda s: any("lost" in gpu.reason for gpu in s.gpus))
    try:
        yield
    finally:
        node.driver.clear_fault("lost", gpu_uuid(0))
        node.until(lambda s: not any("lost" in gpu.reason for gpu in s.gpus))


@contextlib.contextmanager
def drained(node: AnnotatedNode) -> Iterator[None]:
    node.plugin.call("drain", gpu=gpu_uuid(0), reason="fan noise")
    try:
        yield
    finally:
        node.plugin.call("undrain", gpu=gpu_uuid(0))


@contextlib.contextmanager
def dead_mpsd(node: AnnotatedNode) -> Iterator[None]:
    node.kill_mpsd()
    try:
        yield
    finally:
        node.start_mpsd()


@contextlib.contextmanager
def dead_daemon(node: AnnotatedNode) -> Iterator[None]:
    """And it can't be started again."""
    node.plugin.mpsd.fault("refuse-start", "no licence")
    pid = next(g.daemon.pid for g in node.plugin.mpsd.client.snapshot().gpus if g.info.index == 0 and g.daemon)
    assert pid is not None
    os.kill(pid, 9)
    node.until(lambda s: any("MPS daemon" in a.reason for a in s.allocations))
    try:
        yield
    finally:
        node.plugin.mpsd.clear("refuse-start")


@contextlib.contextmanager
def forgotten_limits(node: AnnotatedNode) -> Iterator[None]:
    node.driver.set_fault("limit-forgotten")
    try:
        yield
    finally:
        node.driver.clear_fault("limit-forgotten")


@contextlib.contextmanager
def dead_kubelet(node: AnnotatedNode) -> Iterator[None]:
    node.plugin.kubelet.stop()
    node.until(lambda s: s.kubelet_error)
    try:
        yield
    finally:
        node.plugin.kubelet.start()
        node.until(lambda s: not s.kubelet_error)


class Fault(NamedTuple):
    """`said`: part of the refusal of a container on GPU 0 meanwhile, empty where it is made all the same. `metric`: a
    line of the exposition then."""

    name: str
    strike: Callable[[AnnotatedNode], "contextlib.AbstractContextManager[None]"]
    said: str
    metric: str = "gpufrac_annotated_refusing 1"


TABLE = [
    Fault("the GPU is lost", lost_gpu, "takes nothing new"),
    Fault("the GPU is drained", drained, "fan noise", f'gpufrac_gpu_drained{{gpu_uuid="{gpu_uuid(0)}"}} 1'),
    Fault("mpsd is killed", dead_mpsd, "mpsd does not answer", "gpufrac_mpsd_up 0"),
    Fault("its daemon is killed and stays away", dead_daemon, "waiting for the MPS daemon of GPU 0"),
    Fault("limits are taken and not kept", forgotten_limits, "can't be put in force"),
    Fault("the kubelet is gone", dead_kubelet, "", "gpufrac_kubelet_up 0"),
]


@pytest.fixture
def node(short_tmp: Path) -> Iterator[AnnotatedNode]:
    with opened(short_tmp) as made:
        yield made


@contextlib.contextmanager
def opened(root: Path, constants: Mapping[str, float] | None = None) -> Iterator[AnnotatedNode]:
    made = AnnotatedNode(root, constants=constants)
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("fault", TABLE, ids=lambda fault: fault.name.replace(" ", "-"))
def test_faults(node: AnnotatedNode, fault: Fault) -> None:
    running = node.make(*node.ask())
    before = node.holders()
    pod, container = node.ask()
    with fault.strike(node):
        if fault.said:
            node.until_refused(pod, container, fault.said)
        else:
            node.make(pod, container)
        assert fault.metric in node.metrics().splitlines()
        assert node.holders()[running] == before[running]
    if fault.said:
        node.make(pod, container)
    holders = node.holders()
    assert holders[running] == before[running]
    assert set(holders) == {running, pod.name}
    node.until(lambda s: s.annotated is not None and not s.annotated.refusing)


# -- what is no row of the table: it is not about one answer


def test_a_kill_of_the_plugin_loses_nothing_and_books_nothing_twice(node: AnnotatedNode) -> None:
    first, second = node.make(*node.ask()), node.make(*node.ask(1, "time-slicing"))
    before = node.holders()
    node.kill_plugin()
    pod, container = node.ask()
    assert node.runtime.create_container(pod, container) == Adjustment(), "the runtime goes on without us"
    node.pods[pod.name] = (pod, structs.replace(container, state=ContainerState.RUNNING))
    node.start_plugin()
    status = node.until(lambda s: len(s.allocations) == 3 and s.annotated and s.annotated.unenforced)
    assert status.annotated is not None
    assert [one.pod for one in status.annotated.unenforced] == [pod.name]
    assert "gpufrac_annotated_unenforced 1" in node.metrics().splitlines()
    assert {name: key for name, key in node.holders().items() if name in (first, second)} == before


def test_a_restart_of_the_runtime_is_survived_and_what_ended_meanwhile_is_released(node: AnnotatedNode) -> None:
    stays, goes = node.make(*node.ask()), node.make(*node.ask())
    before = node.holders()
    node.runtime.close()
    status = node.until(lambda s: s.annotated is not None and not s.annotated.runtime)
    assert status.annotated is not None
    assert (status.annotated.readiness, status.annotated.error != "") == ("False", True)
    assert "gpufrac_nri_connected 0" in node.metrics().splitlines()
    del node.pods[goes]
    node.start_runtime()
    node.until_ready()
    node.until(lambda s: [a.pod for a in s.allocations] == [stays])
    assert node.holders()[stays] == before[stays]


def test_what_a_runtime_garbles_ends_the_link_and_nothing_else(node: AnnotatedNode) -> None:
    running = node.make(*node.ask())
    node.runtime.close()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(node.socket)
    listener.listen()
    listener.settimeout(WAIT_S)
    try:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                connection.sendall(struct.pack(">II", 1, 1 << 31))  # a chunk of 2 GiB
                connection.settimeout(WAIT_S)
                with contextlib.suppress(ConnectionError):
                    while connection.recv(4096):
                        pass
    finally:
        listener.close()
        os.unlink(node.socket)
    node.start_runtime()
    node.until_ready()
    assert running in node.holders()


def test_more_than_there_is_is_refused_whoever_asks_in_whatever_order(node: AnnotatedNode) -> None:
    share = node.plugin.admit_running("share", "gpufrac.dev/gpu-8gi")
    gpu = int(share.containers[0].devices["gpufrac.dev/gpu-8gi"][0].partition("::")[0][-1])
    big = node.make(*node.ask(gpu, limit="70Gi"))
    node.until_refused(*node.ask(gpu, limit="1Gi"), "usable is free")
    pod, container = node.ask(gpu, limit="1Gi")
    node.until_refused(*node.ask(gpu, "time-slicing", "1Gi"), "one compute mode")
    node.plugin.kubelet.delete(share)
    node.make(pod, container)
    assert node.holders()[big]


def test_a_pod_that_waits_for_memory_gets_it_when_the_one_before_is_gone(short_tmp: Path) -> None:
    with opened(short_tmp, {"deviceplugin.grants.holders.pods.GONE_S": 3600.0}) as node:
        big = node.make(*node.ask(limit="78Gi"))
        pod, container = node.ask(limit="78Gi")
        node.until_refused(pod, container, "usable is free")
        node.stop(node.pods.pop(big)[0])
        assert node.make(pod, container) == pod.name, "without a grace: somebody waits"


def test_a_turn_is_taken_over_kills_of_everything_and_only_once_nobody_is_left(node: AnnotatedNode) -> None:
    pod, init = node.ask(limit="60Gi", containers=("init", "main"))
    main = node.another(init, "main")
    node.make(pod, init)
    key = node.holders()[pod.name]
    environment = {SIMULATED_POD_UID: pod.uid, SIMULATED_CONTAINER: "init", MARKER: key}
    with subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, env=environment) as left:
        try:
            node.until_refused(pod, main, "60Gi of it are of init in the same pod")
            node.end(pod)
            node.kill_plugin()
            node.start_plugin()
            node.until_refused(pod, main, f"pid {left.pid} of a container of its pod whose turn it takes")
            node.kill_mpsd()
            node.kill_plugin()
            node.mpsd = node.plugin.mpsd.start()
            node.start_plugin()
            node.until_refused(pod, main, f"pid {left.pid} of a container of its pod whose turn it takes")
        finally:
            left.kill()
    node.make(pod, main)
    node.until_refused(*node.ask(limit="30Gi"), "usable is free")
    node.make(*node.ask(limit="18Gi"))
    node.kill_plugin()
    node.start_plugin()
    node.until_refused(*node.ask(limit="30Gi"), "usable is free")
    node.until_refused(pod, node.another(init, "init"), "60Gi of it are of main in the same pod")
    node.stop(pod)
    del node.pods[pod.name]
    node.make(*node.ask(limit="60Gi"))
