"""What NRI tests put at both ends: a front end that notes its calls, and a runtime that sends the bytes it is told."""

import queue
import select
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from google.protobuf.message import Message

from deviceplugin.api import nri_v1alpha1_pb2 as pb
from deviceplugin.nri import codec, mux
from deviceplugin.nri.dialogue import PLUGIN_SERVICE
from deviceplugin.nri.endpoint import Endpoint
from deviceplugin.nri.model import Adjustment, Container, Inventory, Pod, Runtime
from deviceplugin.nri.ttrpc import Answer, Request
from tests.waiting import NEVER_S, WAIT_S


def pod(number: int = 1) -> Pod:
    return Pod(
        id=f"pod{number}",
        name=f"name{number}",
        uid=f"uid{number}",
        namespace="team",
        labels={"app": "x"},
        annotations={"gpu-memory": "4Gi"},
        cgroup_parent="/kubepods/pod1",
        pid=100 + number,
    )


def container(number: int = 1, of: Pod | None = None) -> Container:
    return Container(
        id=f"container{number}", pod_id=(of or pod(number)).id, name="main", env=("A=1", "B=2"), cgroups_path="a:b:c"
    )


def created(number: int = 1) -> bytes:
    """Payload of a CreateContainer, and of all that ask about a container."""
    return message(
        pb.CreateContainerRequest(
            pod=codec.pod_message(pod(number)), container=codec.container_message(container(number))
        )
    )


def state_change(event: pb.Event, number: int = 1) -> bytes:
    change = pb.StateChangeEvent(event=event, pod=codec.pod_message(pod(number)))
    if event in (pb.START_CONTAINER, pb.STOP_CONTAINER, pb.REMOVE_CONTAINER):
        change.container.CopyFrom(codec.container_message(container(number)))
    return message(change)


def configure(request_timeout_ms: int = 2000) -> bytes:
    return message(pb.ConfigureRequest(runtime_name="test", runtime_version="1", request_timeout=request_timeout_ms))


def synchronize(numbers: Sequence[int] = (), *, more: bool = False) -> bytes:
    return message(
        pb.SynchronizeRequest(
            pods=[codec.pod_message(pod(number)) for number in numbers],
            containers=[codec.container_message(container(number)) for number in numbers],
            more=more,
        )
    )


def message(value: Message) -> bytes:
    return value.SerializeToString()


Call = tuple[str, tuple[Any, ...]]


class Recorder:
    """A front end. `on` may hold what a method does; it is called by the method's name."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self.on: dict[str, Callable[..., Any]] = {}
        self.threads: set[int] = set()

    def next(self) -> Call:
        return self.calls.get(timeout=WAIT_S)

    def expect(self, *names: str) -> list[Call]:
        """The next calls, which must be these."""
        calls = [self.next() for _ in names]
        assert [name for name, _ in calls] == list(names)
        return calls

    def _note(self, name: str, *arguments: Any) -> Any:
        self.threads.add(threading.get_ident())
        self.calls.put((name, arguments))
        return self.on[name](*arguments) if name in self.on else None

    def concerns(self, pod: Pod, container: Container) -> bool:
        """Not noted: a matter of the session's."""
        return bool(self.on["concerns"](pod, container)) if "concerns" in self.on else True

    def brief(self, pods: Sequence[Pod], containers: Sequence[Container]) -> Inventory:
        return pods, containers

    def connected(self, runtime: Runtime) -> None:
        self._note("connected", runtime)

    def synchronize(self, pods: Sequence[Pod], containers: Sequence[Container]) -> None:
        self._note("synchronize", pods, containers)

    def run_pod(self, pod: Pod) -> None:
        self._note("run_pod", pod)

    def stop_pod(self, pod: Pod) -> None:
        self._note("stop_pod", pod)

    def remove_pod(self, pod: Pod) -> None:
        self._note("remove_pod", pod)

    def create_container(self, pod: Pod, container: Container) -> Adjustment:
        adjustment = self._note("create_container", pod, container)
        return adjustment if isinstance(adjustment, Adjustment) else Adjustment(env=(("MADE", container.id),))

    def start_container(self, pod: Pod, container: Container) -> None:
        self._note("start_container", pod, container)

    def stop_container(self, pod: Pod, container: Container) -> None:
        self._note("stop_container", pod, container)

    def remove_container(self, pod: Pod, container: Container) -> None:
        self._note("remove_container", pod, container)

    def disconnected(self, reason: str) -> None:
        self._note("disconnected", reason)


class RawLink:
    """The runtime's end of one link: bytes as they are, with calls on top of them where a test wants those."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(WAIT_S)
        self.connection = connection
        self._endpoint = Endpoint(serves=mux.RUNTIME_SERVICE, calls=mux.PLUGIN_SERVICE)
        self.requests: list[Request] = []
        self.answers: dict[int, Answer] = {}
        self.stray: list[Answer] = []
        """Answers on streams that nothing was asked on."""
        self._asked: set[int] = set()

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def receive(self) -> bool:
        """Takes in what comes next; False at the end."""
        try:
            data = self.connection.recv(1 << 16)
        except ConnectionError:
            return False
        received = self._endpoint.feed(data)
        self.requests += received.requests
        for answer in received.answers:
            if answer.stream in self._asked:
                self.answers[answer.stream] = answer
            else:
                self.stray.append(answer)
        return bool(data)

    def request(self) -> Request:
        """What the plugin asks next."""
        while not self.requests:
            assert self.receive(), "the plugin left"
        return self.requests.pop(0)

    def reply(self, request: Request, answer: Answer | None = None) -> None:
        self.send(self._endpoint.answer(answer or Answer(request.stream)))

    def encoded(self, method: str, payload: bytes = b"", service: str = PLUGIN_SERVICE) -> tuple[int, bytes]:
        stream, data = self._endpoint.request(service, method, payload, 0.0)
        self._asked.add(stream)
        return stream, data

    def ask(self, method: str, payload: bytes = b"", service: str = PLUGIN_SERVICE) -> int:
        stream, data = self.encoded(method, payload, service)
        self.send(data)
        return stream

    def answer(self, stream: int) -> Answer:
        while stream not in self.answers:
            assert self.receive(), "the plugin left"
        return self.answers.pop(stream)

    def call(self, method: str, payload: bytes = b"", service: str = PLUGIN_SERVICE) -> Answer:
        return self.answer(self.ask(method, payload, service))

    def handshake(self, numbers: Sequence[int] = (), request_timeout_ms: int = int(NEVER_S * 1000)) -> None:
        """Registration to Synchronize."""
        self.reply(self.request())
        assert not self.call("Configure", configure(request_timeout_ms)).code
        assert not self.call("Synchronize", synchronize(numbers)).code

    def ended(self) -> bool:
        """Waits until the plugin closes the link."""
        while self.receive():
            pass
        return True

    def close(self) -> None:
        self.connection.close()


class RawRuntime:
    """Listens; each link is the test's."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(4)
        self._listener.settimeout(WAIT_S)
        self._links: list[RawLink] = []

    def accept(self) -> RawLink:
        connection, _ = self._listener.accept()
        self._links.append(RawLink(connection))
        return self._links[-1]

    def is_asked(self) -> bool:
        """Whether somebody waits to be accepted."""
        return bool(select.select([self._listener], [], [], 0.0)[0])

    def close(self) -> None:
        for link in self._links:
            with suppress(OSError):
                link.close()
        self._listener.close()


def whole_frame(stream: int, kind: int, payload: bytes = b"", *, length: int | None = None) -> bytes:
    """A frame as the reference spells it, with nothing of ours; also a wrong one."""
    size = len(payload) if length is None else length
    return size.to_bytes(4, "big") + stream.to_bytes(4, "big") + bytes((kind, 0)) + payload


def chunk(connection: int, payload: bytes, *, length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return connection.to_bytes(4, "big") + size.to_bytes(4, "big") + payload
