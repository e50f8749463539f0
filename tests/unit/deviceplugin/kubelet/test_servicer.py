"""One resource's service without a server: how its list stream ends, and what a refusal says."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import grpc
import pytest

from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.kubelet import servicer
from deviceplugin.kubelet.refusals import CODE_METADATA, Refusals
from deviceplugin.kubelet.servicer import LIST_PAUSE_S, DevicePlugin
from deviceplugin.plan.reasons import OfferCode, RefusalCode
from mpsd.events.teller import SILENT
from tests.builders import uuid
from tests.waiting import NEVER_S
from tests.world import SHARE, World

RESOURCE = "gpufrac.dev/a"


class AbortedError(Exception):
    """What gRPC raises in a method that aborts."""


class Context:
    """A call as a method sees it. `end`: the kubelet cancels it, or its connection is gone."""

    def __init__(self, *, gone: bool = False) -> None:
        self._gone = gone
        self._callbacks: list[Callable[[], None]] = []
        self.aborted: tuple[grpc.StatusCode, str] | None = None
        self.metadata: dict[str, str] = {}

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self._callbacks.append(callback)
        return not self._gone

    def end(self) -> None:
        for callback in self._callbacks:
            callback()

    def set_trailing_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self.metadata = dict(metadata)

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        self.aborted = (code, details)
        raise AbortedError


class Served:
    """The service, and how often it said that a stream ended."""

    def __init__(self, root: Path) -> None:
        self.world = World(root)
        self.world.keeper.attach()
        self.ends = 0
        self.refusals = Refusals(SILENT)
        self.service = DevicePlugin(RESOURCE, self.world.broker, self.world.keeper.recheck, self.refusals, self._ended)

    def stream(self, context: Context) -> Iterator[pb.ListAndWatchResponse]:
        for message in self.service.ListAndWatch(pb.Empty(), context):  # type: ignore[arg-type]
            yield pb.ListAndWatchResponse.FromString(message)

    def refused(self, device_id: str) -> Context:
        """An Allocate that is refused."""
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=[device_id])])
        context = Context()
        with pytest.raises(AbortedError):
            self.service.Allocate(request, context)  # type: ignore[arg-type]
        return context

    def _ended(self) -> None:
        self.ends += 1


@pytest.fixture
def served(short_tmp: Path) -> Iterator[Served]:
    made = Served(short_tmp)
    yield made
    made.world.ledger.close()


def test_a_stream_that_the_kubelet_cancels_ends_and_is_told(served: Served) -> None:
    context = Context()
    stream = served.stream(context)
    assert {device.ID for device in next(stream).devices} >= {SHARE}
    assert (served.service.streams, served.ends) == (1, 0)
    context.end()
    assert list(stream) == []
    assert (served.service.streams, served.ends) == (0, 1)


def test_between_two_lists_there_is_a_pause_however_many_grants_come(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(served.world.broker, "pause_list", lambda seconds, stop: pauses.append(seconds))
    stream = served.stream(Context())
    next(stream)
    served.world.broker.resend()
    next(stream)
    assert pauses == [LIST_PAUSE_S]
    stream.close()  # type: ignore[attr-defined]


def test_a_pause_between_lists_ends_with_its_stream(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "LIST_PAUSE_S", NEVER_S)
    context = Context()
    stream = served.stream(context)
    next(stream)
    context.end()
    assert list(stream) == []


def test_a_stream_that_grpc_closes_between_two_lists_is_told_as_well(served: Served) -> None:
    stream = served.stream(Context())
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert (served.service.streams, served.ends) == (0, 1)


def test_a_call_that_is_gone_before_it_begins_is_no_stream(served: Served) -> None:
    assert list(served.stream(Context(gone=True))) == []
    assert (served.service.streams, served.ends) == (0, 0)


def test_a_service_that_stops_ends_its_streams_and_tells_nobody(served: Served) -> None:
    stream = served.stream(Context())
    next(stream)
    served.service.stop()
    assert list(stream) == []
    assert (served.service.streams, served.ends) == (0, 0)


def test_a_stream_gives_each_list_once(served: Served) -> None:
    context = Context()
    stream = served.stream(context)
    first = next(stream)
    served.world.broker.drain(uuid(0), "fan")
    served.world.keeper.attach()
    second = next(stream)
    health = {device.ID: device.health for device in second.devices}
    assert {device.ID: device.health for device in first.devices}[SHARE] == "Healthy"
    assert health[SHARE] == "Unhealthy"
    context.end()
    assert list(stream) == []


def test_a_refusal_has_its_code_in_the_metadata_and_in_the_count(served: Served) -> None:
    full = served.refused("nonsense")
    assert full.aborted is not None
    assert full.aborted[0] is grpc.StatusCode.INVALID_ARGUMENT
    served.world.broker.drain(uuid(0), "fan")
    drained = served.refused(SHARE)
    assert drained.aborted is not None
    assert drained.aborted[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert [c.metadata[CODE_METADATA] for c in (full, drained)] == [RefusalCode.NOT_A_SHARE, OfferCode.DRAINED]
    assert served.refusals.counts == {RESOURCE: {"NotAShare": 1, "Drained": 1}}
