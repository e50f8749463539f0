"""Containers of one annotated pod take turns: the larger of the init containers and the sum of the others counts."""

from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec import structs

from deviceplugin.nri.model import Container, ContainerState, Pod
from deviceplugin.plan.allocation import Allocation
from mpsd.common.processes import PodProcess
from mpsd.localapi.snapshot import GpuClient
from tests.builders import config, uuid
from tests.unit.deviceplugin.annotated.frontendnode import GIB, NEW, Node, annotated, container, env_of, keys, pod


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, config(annotations=annotated()))


class Turns:
    """A pod of containers that ask for GiB on GPU 0, one after the other: `usable` is 79Gi."""

    def __init__(self, node: Node, /, mode: str = "sm-sharing", **gib: int) -> None:
        self.node, self.mode = node, mode
        self.annotations: dict[str, str] = {}
        for name, size in gib.items():
            self.annotations |= keys(name, limit=f"{size}Gi", mode=mode)
        self.pod = pod(self.annotations)
        self.made: dict[str, Container] = {}
        self.count = 0
        (node.root / "pods" / self.pod.uid).mkdir(exist_ok=True)
        node.frontend.run_pod(self.pod)

    def create(self, name: str) -> Allocation:
        """Made as another container each time; what it holds now."""
        self.count += 1
        one = container(name, id=f"{name}-{self.count}", pod_id=self.pod.id)
        made = self.node.create(self.pod, one)
        env = tuple(f"{key}={value}" for key, value in env_of(made).items())
        self.made[name] = structs.replace(one, env=env, state=ContainerState.RUNNING)
        return self.held()[name]

    def refusal(self, name: str) -> str:
        return self.node.refusal(lambda: self.create(name))

    def end(self, name: str) -> None:
        """Its process ends."""
        self.node.frontend.stop_container(self.pod, self.made.pop(name))

    def held(self) -> dict[str, Allocation]:
        allocations = self.node.broker.allocations()
        return {a.container.container: a for a in allocations if a.container and a.container.pod_uid == self.pod.uid}

    def show(self, *names: str) -> None:
        """What the kubelet shows: all but plain init containers."""
        for name in names:
            self.node.kubelet.containers["ns", self.pod.name, name] = {}

    def restart_plugin(self) -> None:
        """It is told of what runs; what has ended no runtime shows."""
        self.node.restart()
        self.node.begin_frontend()
        self.node.frontend.synchronize([self.pod], list(self.made.values()))

    @property
    def gib(self) -> float:
        return self.node.broker.inspect().held[uuid(0)].granted_bytes / GIB


class Case(NamedTuple):
    """`steps`: `+a` is made, `-a` ends, `!a` is refused, `restart` of the plugin. `gib`: what the pod counts then."""

    name: str
    asks: dict[str, int]
    steps: str
    gib: int
    shows: str = ""


TABLE = [
    Case("init is larger", {"init": 60, "main": 40}, "+init -init +main", 60, "main"),
    Case("init is smaller", {"init": 20, "main": 60}, "+init -init +main", 60, "main"),
    Case("two take the turn of one", {"init": 60, "a": 30, "b": 30}, "+init -init +a +b", 60, "a b"),
    Case("several init containers", {"i": 60, "j": 50, "a": 40}, "+i -i +j -j +a", 60, "a"),
    Case("as much as there is, the kubelet unheard", {"init": 60, "main": 60}, "+init -init +main", 60),
    Case("room is there, the kubelet unheard", {"init": 20, "main": 40}, "+init -init +main", 60),
    Case("a sidecar counts", {"side": 20, "init": 50, "main": 50}, "+side +init -init +main", 70, "side main"),
    Case("a sidecar leaves too little", {"side": 40, "i": 39, "main": 40}, "+side +i -i !main", 79, "side main"),
    Case("what runs keeps its turn", {"init": 60, "main": 60}, "+init !main", 60, "main"),
    Case("a crash keeps its place", {"main": 60}, "+main -main +main", 60, "main"),
    Case("a crash while others come", {"a": 30, "b": 30}, "+a -a +b +a", 60, "a b"),
    Case("a crash and somebody in its turn", {"a": 60, "b": 60}, "+a -a +b !a", 60, "a b"),
    Case("and once that has ended, too", {"a": 60, "b": 60}, "+a -a +b !a -b +a", 60, "a b"),
    Case("init again in a pod that begins anew", {"i": 60, "main": 50}, "+i -i +main -main +i -i +main", 60, "main"),
    Case("the plugin restarts while init runs", {"i": 60, "main": 60}, "+i restart !main -i +main", 60, "main"),
    Case("the plugin restarts before main", {"init": 60, "main": 60}, "+init -init restart +main", 60, "main"),
    Case("the plugin restarts after main", {"init": 60, "main": 50}, "+init -init +main restart", 60, "main"),
    Case("and main crashes", {"init": 60, "main": 50}, "+init -init +main restart -main +main restart", 60, "main"),
    Case("and who lost its turn stays refused", {"a": 60, "b": 60}, "+a -a +b restart !a", 60, "a b"),
]  # fmt: skip


@pytest.mark.parametrize("case", TABLE, ids=[case.name for case in TABLE])
@pytest.mark.parametrize("mode", ["sm-sharing", "time-slicing"])
def test_who_takes_whose_turn(node: Node, case: Case, mode: str) -> None:
    turns = Turns(node, mode=mode, **case.asks)
    turns.show(*case.shows.split())
    for step in case.steps.split():
        match step[0], step[1:]:
            case "+", name:
                assert turns.create(name).limit_bytes == case.asks[name] * GIB
            case "-", name:
                turns.end(name)
            case "!", name:
                assert "usable is free" in turns.refusal(name)
            case _:
                turns.restart_plugin()
        assert turns.gib <= 79
    assert turns.gib == case.gib
    node.frontend.stop_pod(turns.pod)
    node.pass_time(20)
    assert node.holds_nothing()
    assert turns.gib == 0


def test_who_is_refused_hears_who_took_its_turn(node: Node) -> None:
    turns = Turns(node, a=60, b=60)
    turns.create("a")
    text = turns.refusal("b")
    assert "60Gi of it are of a in the same pod, which have not ended as far as the container runtime tells" in text
    turns.end("a")
    turns.create("b")
    assert turns.refusal("a").endswith("; what it held went to b of its own pod after it had ended")


def test_others_get_what_the_turns_of_a_pod_leave(node: Node) -> None:
    """Ten pods of which each counts 7Gi, and not 14Gi."""
    for number in range(10):
        asks = keys("init", limit="7Gi", mode="sm-sharing") | keys("main", limit="7Gi", mode="sm-sharing")
        one = pod(asks, f"p{number}")
        node.kubelet.containers["ns", one.name, "main"] = {}
        init = container("init", id=f"init-{number}", pod_id=one.id)
        node.create(one, init)
        node.frontend.stop_container(one, init)
        node.create(one, container("main", id=f"main-{number}", pod_id=one.id))
    assert node.broker.inspect().held[uuid(0)].granted_bytes == 70 * GIB


def client(allocation: Allocation) -> tuple[GpuClient, ...]:
    return (GpuClient(pid=9, allocation_key=allocation.key, pod_uid="uid-p"),)


@pytest.mark.parametrize("trouble", ["on the GPU", "not there yet", "unknown"])
def test_no_program_starts_while_one_lives_whose_turn_it_takes(node: Node, trouble: str) -> None:
    turns = Turns(node, init=60, main=60)
    init = turns.create("init")
    turns.end("init")
    if trouble == "on the GPU":
        node.mpsd.on_gpu[uuid(0)] = client(init)
    elif trouble == "unknown":
        node.mpsd.hung[uuid(0)] = "it hangs"
    else:
        node.processes["uid-p"] = [PodProcess(9, "c", init.key)]
    words = {"on the GPU": "still uses the GPU", "not there yet": "may use the GPU", "unknown": "it hangs"}[trouble]
    text = turns.refusal("main")
    assert "a container of its pod whose turn it takes" in text
    assert words in text
    waiting = turns.held()["main"]
    assert waiting.after == (init.key,)
    assert waiting.key not in node.specs.files
    turns.restart_plugin()
    assert words in turns.refusal("main"), "it is on record whom it waits for"
    assert turns.gib == 60
    node.mpsd.on_gpu.clear()
    node.mpsd.hung.clear()
    node.processes.clear()
    assert turns.create("main") == waiting


def test_the_same_pods_other_processes_are_waited_for_by_nobody(node: Node) -> None:
    turns = Turns(node, side=10, init=60, main=60)
    side = turns.create("side")
    turns.create("init")
    turns.end("init")
    node.mpsd.on_gpu[uuid(0)] = client(side)
    node.processes["uid-p"] = [PodProcess(9, "c", side.key)]
    turns.create("main")


def test_a_container_that_was_not_known_to_run_is_not_started_in_a_turn_that_went_to_another(node: Node) -> None:
    turns = Turns(node, a=60, b=60)
    turns.create("a")
    created = structs.replace(turns.made.pop("a"), state=ContainerState.CREATED)
    turns.restart_plugin()  # it was just being made, and was in no list
    turns.create("b")
    text = node.refusal(lambda: node.frontend.start_container(turns.pod, created))
    assert "its turn went to ns/p/b while it was not known to run" in text


def test_what_the_runtime_does_not_tell_of_has_not_ended(node: Node) -> None:
    turns = Turns(node, a=60, b=60)
    node.attaches = False
    turns.refusal("a")
    assert "60Gi of it are of a in the same pod" in turns.refusal("b"), "it was granted, and never made"
    node.attaches = True
    turns.create("a")
    node.frontend.stop_container(turns.pod, container("other"))
    turns.refusal("b")
    turns.end("a")
    node.frontend.disconnected("it went away")
    turns.refusal("b")
    node.frontend.connected(NEW)
    node.frontend.synchronize([turns.pod], [])
    turns.create("b")


def test_an_end_of_a_container_before_is_not_that_of_the_one_that_runs(node: Node) -> None:
    turns = Turns(node, a=60, b=60)
    turns.create("a")
    before = turns.made["a"]
    turns.create("a")
    node.frontend.remove_container(turns.pod, before)
    turns.refusal("b")


def test_what_ran_in_a_sandbox_ends_with_it(node: Node) -> None:
    turns = Turns(node, init=60, main=60)
    turns.create("init")
    second = pod(turns.annotations, sandbox="second")
    node.frontend.run_pod(second)
    node.frontend.stop_pod(turns.pod)
    node.create(second, container("main", pod_id=second.id))


# -- other annotations


def again(node: Node, **values: str) -> Pod:
    """The same pod in a new sandbox, with its annotations changed."""
    ask = pod(keys(**values), sandbox="second")
    node.frontend.run_pod(ask)
    node.frontend.stop_pod(pod({}))
    return ask


@pytest.mark.parametrize("mode", ["sm-sharing", "time-slicing"])
def test_a_changed_annotation_waits_for_the_processes_of_the_old_container(node: Node, mode: str) -> None:
    node.create(pod(keys(limit="20Gi", mode="sm-sharing")), container())
    (old,) = node.broker.allocations()
    node.mpsd.on_gpu[uuid(0)] = client(old)
    ask = again(node, limit="70Gi", mode=mode)
    if mode == "sm-sharing":
        text = node.refusal(lambda: node.create(ask, container()))
        assert "what it held is let go first, once no process of it is left" in text
        (shown,) = node.picture().allocations
        assert shown.reason == "its container is made anew but pid 9 still uses the GPU"
        assert set(node.specs.files) == {old.key}
        node.restart()
        node.begin_frontend()
        node.frontend.synchronize([ask], [])
    node.refusal(lambda: node.create(ask, container()))
    assert node.broker.allocations() == [old], "nothing is let go while it lives"
    node.mpsd.on_gpu.clear()
    node.processes["uid-p"] = [PodProcess(9, "c", old.key)]
    node.refusal(lambda: node.create(ask, container()))
    assert node.broker.allocations() == [old]
    node.processes.clear()
    node.create(ask, container())
    (new,) = node.broker.allocations()
    assert (new.limit_bytes, new.mode) == (70 * GIB, mode)
    assert set(node.specs.files) == {new.key}


def test_annotations_that_are_as_before_again_keep_what_was_held(node: Node) -> None:
    node.create(pod(keys(limit="20Gi")), container())
    (old,) = node.broker.allocations()
    node.mpsd.on_gpu[uuid(0)] = client(old)
    ask = again(node, limit="70Gi")
    node.refusal(lambda: node.create(ask, container()))
    node.create(pod(keys(limit="20Gi"), sandbox="second"), container())
    node.mpsd.on_gpu.clear()
    node.pass_time(30)
    assert node.broker.allocations() == [old]
