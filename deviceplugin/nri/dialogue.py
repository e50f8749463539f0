"""What a plugin answers a runtime over one link, and what its front end is told of it (pure).

A runtime spells state changes in one of two ways: as StateChange with a number (containerd up to 2.1, and what serves
v1alpha1 plugins in NRI's v1beta1), or by calls of their own, with StateChange for plugins that answer those as
unimplemented (containerd/nri pkg/adaptation/plugin_type.go, v1alpha1-bridge.go). Both mean the same here.

Only creations and starts are ever refused. An error to another event would do harm: containerd and CRI-O fail a pod's
sandbox when RunPodSandbox is answered with one, and a plugin whose Synchronize fails is called no more, by some
versions without closing the connection.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from deviceplugin.api import nri_v1alpha1_pb2 as pb
from deviceplugin.nri import codec
from deviceplugin.nri.model import (
    REQUEST_TIMEOUT_S,
    Container,
    Handler,
    Inventory,
    Pod,
    Refused,
    Runtime,
)
from deviceplugin.nri.requests import REFUSABLE, Entry, Kind, RequestQueue
from deviceplugin.nri.ttrpc import Answer, Code, Request
from mpsd.common.errors import ProtocolError
from mpsd.common.log import get_logger

PLUGIN_SERVICE: Final = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME_SERVICE: Final = "nri.pkg.api.v1alpha1.Runtime"
NRI_VERSION: Final = "v0.8.0"
"""What we implement, for the runtime's log. CDI devices in adjustments came with v0.7.0."""
SHARE_OF_TIMEOUT: Final = 0.6
"""How much of a short timeout we use: the rest is for the way there and back on a busy node."""
MAX_STATE_PARTS: Final = 4096
"""Of up to 4 MiB each: more than any node has to tell."""

_EVENTS: Final = {
    pb.RUN_POD_SANDBOX: Kind.RUN_POD,
    pb.STOP_POD_SANDBOX: Kind.STOP_POD,
    pb.REMOVE_POD_SANDBOX: Kind.REMOVE_POD,
    pb.START_CONTAINER: Kind.START_CONTAINER,
    pb.STOP_CONTAINER: Kind.STOP_CONTAINER,
    pb.REMOVE_CONTAINER: Kind.REMOVE_CONTAINER,
}
"""What a StateChange may be about."""
EVENT_MASK: Final = sum(1 << (number - 1) for number in (*_EVENTS, pb.CREATE_CONTAINER))
_METHODS: Final = {
    "RunPodSandbox": Kind.RUN_POD,
    "StopPodSandbox": Kind.STOP_POD,
    "RemovePodSandbox": Kind.REMOVE_POD,
    "CreateContainer": Kind.CREATE_CONTAINER,
    "StartContainer": Kind.START_CONTAINER,
    "StopContainer": Kind.STOP_CONTAINER,
    "RemoveContainer": Kind.REMOVE_CONTAINER,
}
_NOT_OURS: Final = frozenset(
    (
        "Shutdown",
        "UpdatePodSandbox",
        "PostUpdatePodSandbox",
        "PostCreateContainer",
        "PostStartContainer",
        "UpdateContainer",
        "PostUpdateContainer",
        "ValidateContainerAdjustment",
    )
)
"""Known, not asked for: answered with nothing, as a plugin without a handler for them does."""

log = get_logger("nri")


class Filter(Protocol):
    """What of a Handler may be asked at any time; see there."""

    def concerns(self, pod: Pod, container: Container) -> bool: ...
    def brief(self, pods: Sequence[Pod], containers: Sequence[Container]) -> Inventory: ...


class Dialogue:
    """Keeps the rules of one link. What the front end must be told goes to the queue.

    Args:
        link: its number.
        handler: the front end, as far as it may be asked at any time.
        answer_s: when a request is overdue, unless the runtime's own timeout is short.
    """

    def __init__(self, link: int, queue: RequestQueue, handler: Filter, answer_s: float) -> None:
        self._link, self._queue, self._handler = link, queue, handler
        self.budget_s = answer_s
        self.runtime: Runtime | None = None
        self.synchronized = False
        """The runtime has told all there is; events follow."""
        self._parts = 0
        self._pods: list[Pod] = []
        self._containers: list[Container] = []

    def receive(self, request: Request, now_s: float) -> Answer | None:
        """Takes in a request; what to answer now, None when the answer comes later.

        Raises ProtocolError where going on would mean to act on wrong knowledge: the link must end.
        """
        if request.service != PLUGIN_SERVICE:
            return _unimplemented(request, f"service {request.service[:100]!r}")
        if request.method == "Configure":
            return self._configure(request, now_s)
        if request.method in _NOT_OURS:
            return Answer(request.stream)
        if request.method == "Synchronize":
            return self._synchronize(request, now_s)
        if request.method != "StateChange" and request.method not in _METHODS:
            return _unimplemented(request, f"method {request.method[:100]!r}")
        try:
            kind, message = _event(request)
        except ProtocolError as error:
            return Answer(request.stream, code=Code.INVALID_ARGUMENT, text=str(error))
        if kind is None:
            return Answer(request.stream)
        if self.runtime is None:
            return Answer(request.stream, code=Code.FAILED_PRECONDITION, text="cannot take events before Configure")
        pod, container = codec.pod_of(message.pod), codec.container_of(message.container)
        if kind in REFUSABLE and not self._concerned(pod, container):
            return Answer(request.stream)
        entry = Entry(
            kind=kind,
            link=self._link,
            stream=request.stream,
            pod=pod,
            container=container,
            size_bytes=len(request.payload),
        )
        return self._tell(request, entry, now_s)

    def overdue(self, now_s: float) -> list[Answer]:
        """Answers that are due now without the front end's."""
        return [self._late_answer(entry) for entry in self._queue.overdue(now_s) if entry.link == self._link]

    def _configure(self, request: Request, now_s: float) -> Answer:
        asked = codec.parse(pb.ConfigureRequest, request.payload)
        timeout_s = asked.request_timeout / 1000 if asked.request_timeout > 0 else REQUEST_TIMEOUT_S
        if timeout_s < REQUEST_TIMEOUT_S:
            self.budget_s = min(self.budget_s, timeout_s * SHARE_OF_TIMEOUT)
        first = self.runtime is None
        self.runtime = Runtime(
            name=asked.runtime_name,
            version=asked.runtime_version,
            request_timeout_s=timeout_s,
        )
        if first:
            # The answer does not wait for the front end: nothing in it depends on what that does.
            entry = Entry(kind=Kind.CONNECTED, link=self._link, runtime=self.runtime, budget_s=self.budget_s)
            self._queue.add(entry, now_s)
        return Answer(request.stream, pb.ConfigureResponse(events=EVENT_MASK).SerializeToString())

    def _synchronize(self, request: Request, now_s: float) -> Answer | None:
        if self.runtime is None:
            return Answer(request.stream, code=Code.FAILED_PRECONDITION, text="cannot take a state before Configure")
        part = codec.parse(pb.SynchronizeRequest, request.payload)
        self._parts += 1
        if self._parts > MAX_STATE_PARTS:
            raise ProtocolError(f"cannot take a state of more than {MAX_STATE_PARTS} parts")
        pods, containers = self._handler.brief(
            [codec.pod_of(pod) for pod in part.pods], [codec.container_of(one) for one in part.containers]
        )
        self._pods += pods
        self._containers += containers
        if part.more:
            return Answer(request.stream, pb.SynchronizeResponse(more=True).SerializeToString())
        inventory = self._pods, self._containers
        self._parts, self._pods, self._containers = 0, [], []
        self.synchronized = True
        entry = Entry(kind=Kind.SYNCHRONIZE, link=self._link, stream=request.stream, inventory=inventory)
        return self._tell(request, entry, now_s)

    def _concerned(self, pod: Pod, container: Container) -> bool:
        try:
            return self._handler.concerns(pod, container)
        except Exception:
            log.exception("the NRI front end failed", call="concerns", of=f"{container.name} of pod {pod.full_name}")
            return True

    def _tell(self, request: Request, entry: Entry, now_s: float) -> Answer | None:
        entry.budget_s = self.budget_s
        if request.timeout_s:  # what is left of the runtime's patience: parts of a state share it
            entry.budget_s = min(self.budget_s, request.timeout_s * SHARE_OF_TIMEOUT)
        return None if self._queue.add(entry, now_s) else self._late_answer(entry)

    def _late_answer(self, entry: Entry) -> Answer:
        if entry.kind not in REFUSABLE:
            return Answer(entry.stream)
        what = f"whether to {entry.kind} {_named(entry)}"
        text = f"gpufrac could not decide in time ({entry.budget_s:.1f} s) {what}; try again"
        return Answer(entry.stream, code=Code.FAILED_PRECONDITION, text=text)


def perform(entry: Entry, handler: Handler) -> Answer:
    """Tells the front end; what to answer for it, which is for nobody where the entry has no stream."""
    try:
        return Answer(entry.stream, _tell(entry, handler))
    except Refused as refusal:
        code, text = Code.FAILED_PRECONDITION, str(refusal)
    except Exception as error:
        log.exception("the NRI front end failed", call=entry.kind, of=_named(entry))
        code = Code.INTERNAL
        text = f"gpufrac failed to {entry.kind} {_named(entry)}: {type(error).__name__}; its log tells more"
    return Answer(entry.stream, code=code, text=text) if entry.kind in REFUSABLE else Answer(entry.stream)


def _tell(entry: Entry, handler: Handler) -> bytes:
    """The payload of the answer."""
    match entry:
        case Entry(kind=Kind.CONNECTED, runtime=Runtime() as runtime):
            handler.connected(runtime)
        case Entry(kind=Kind.DISCONNECTED):
            handler.disconnected(entry.reason)
        case Entry(kind=Kind.SYNCHRONIZE):
            handler.synchronize(*entry.inventory)
        case Entry(kind=Kind.RUN_POD, pod=Pod() as pod):
            handler.run_pod(pod)
        case Entry(kind=Kind.STOP_POD, pod=Pod() as pod):
            handler.stop_pod(pod)
        case Entry(kind=Kind.REMOVE_POD, pod=Pod() as pod):
            handler.remove_pod(pod)
        case Entry(kind=Kind.CREATE_CONTAINER, pod=Pod() as pod, container=Container() as container):
            adjustment = handler.create_container(pod, container)
            return pb.CreateContainerResponse(adjust=codec.adjustment_message(adjustment)).SerializeToString()
        case Entry(kind=Kind.START_CONTAINER, pod=Pod() as pod, container=Container() as container):
            handler.start_container(pod, container)
        case Entry(kind=Kind.STOP_CONTAINER, pod=Pod() as pod, container=Container() as container):
            handler.stop_container(pod, container)
        case Entry(kind=Kind.REMOVE_CONTAINER, pod=Pod() as pod, container=Container() as container):
            handler.remove_container(pod, container)
    return b""


def _event(request: Request) -> tuple[Kind | None, pb.StateChangeEvent | pb.CreateContainerRequest]:
    """What an event is about, None where it isn't ours. Raises ProtocolError."""
    if request.method == "StateChange":
        change = codec.parse(pb.StateChangeEvent, request.payload)
        return _EVENTS.get(change.event), change
    return _METHODS[request.method], codec.parse(pb.CreateContainerRequest, request.payload)


def _named(entry: Entry) -> str:
    if entry.pod is None:
        return "the runtime"
    pod = f"pod {entry.pod.full_name}"
    return f"{entry.container.name} of {pod}" if entry.container is not None and entry.container.id else pod


def _unimplemented(request: Request, what: str) -> Answer:
    return Answer(request.stream, code=Code.UNIMPLEMENTED, text=f"gpufrac does not implement {what}")
