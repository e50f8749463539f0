"""Whatever a container runtime sends, our NRI plugin neither crashes nor hangs nor grows, and answers nothing twice;
and the simulated runtime survives any plugin.

Conversations as a runtime has them are broken in every way that is known to break such code: bytes flipped, frames
split, merged, cut off, sent twice, out of order, with lengths, numbers and kinds that can't be. Most go through the
pure part, where time is the test's; some over real sockets, to a session that must find its next runtime.

`hack/fuzz-nri` runs the same for as long as it is told.
"""

import contextlib
import logging
import random
import resource
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
from google.protobuf.message import Message

from deviceplugin.api import nri_v1alpha1_pb2 as pb
from deviceplugin.nri import codec
from deviceplugin.nri.dialogue import PLUGIN_SERVICE, Dialogue, perform
from deviceplugin.nri.endpoint import Endpoint
from deviceplugin.nri.model import Adjustment, Container, Inventory, Mount, Pod, Refused, Runtime
from deviceplugin.nri.requests import MAX_ENTRIES, Entry, RequestQueue
from deviceplugin.nri.session import NriSession, NriState
from deviceplugin.nri.ttrpc import Answer, Request, encode_answer, encode_request
from deviceplugin.sim.runtime.nri import NriRuntime
from mpsd.common.errors import ProtocolError
from tests.waiting import WAIT_S, until

FRAMES = 20_000
SOCKETS = 60
ANSWER_S = 1.2
LIMIT_BYTES = 4 * 1024 * 1024 + 10

Piece = tuple[int, bytes]
"""A connection's number and bytes of its stream."""


class Breaker:
    """Makes conversations and breaks them. The same seed, the same conversation."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.frames = 0

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def runtime_side(self) -> list[bytes]:
        """What a runtime sends, broken, in the pieces that it arrives in."""
        rng = self.rng
        calls: list[tuple[str, Message]] = [
            ("Configure", pb.ConfigureRequest(runtime_name="r", request_timeout=rng.choice((0, 100, 2000))))
        ]
        parts = rng.randrange(4)
        calls.extend(("Synchronize", self._state(more=part < parts)) for part in range(parts + 1))
        calls.extend(self._event() for _ in range(rng.randrange(4, 24)))
        frames = [(2, encode_answer(Answer(1, code=rng.choice((0, 0, 0, 13)))))]
        for number, (method, payload) in enumerate(calls):
            service = PLUGIN_SERVICE if self.chance(0.97) else "nri.pkg.api.v1beta1.Plugin"
            timeout_s = rng.choice((0.0, 0.5, 2.0))
            frames.append(
                (1, encode_request(Request(2 * number + 1, service, method, payload.SerializeToString(), timeout_s)))
            )
        return self._arriving(frames)

    def plugin_side(self) -> list[bytes]:
        """What a plugin sends: its registration, and answers to what it will be asked, broken too."""
        registration = pb.RegisterPluginRequest(plugin_name="fuzz", plugin_idx="50").SerializeToString()
        service = "nri.pkg.api.v1alpha1.Runtime"
        frames = [
            (2, encode_request(Request(1, service, "RegisterPlugin", registration))),
            (
                1,
                encode_answer(
                    Answer(1, pb.ConfigureResponse(events=self.rng.choice((0, 7, 1 << 20))).SerializeToString())
                ),
            ),
            (1, encode_answer(Answer(3))),
            (2, encode_request(Request(3, service, "UpdateContainers", b"\x12\x04\x0a\x02c1"))),
        ]
        return self._arriving(frames)

    def _state(self, *, more: bool) -> pb.SynchronizeRequest:
        count = self.rng.randrange(4)
        return pb.SynchronizeRequest(
            pods=[self._pod() for _ in range(count)], containers=[self._container() for _ in range(count)], more=more
        )

    def _event(self) -> tuple[str, Message]:
        method = self.rng.choice(
            (
                "CreateContainer",
                "StartContainer",
                "StateChange",
                "RunPodSandbox",
                "RemoveContainer",
                "Shutdown",
                "Dance",
            )
        )
        if method == "StateChange":
            change = pb.StateChangeEvent(event=self.rng.choice(pb.Event.keys()), pod=self._pod())
            if self.chance(0.5):
                change.container.CopyFrom(self._container())
            return method, change
        return method, pb.CreateContainerRequest(pod=self._pod(), container=self._container())

    def _pod(self) -> pb.PodSandbox:
        return codec.pod_message(Pod(id="p", name="n", uid="u", namespace="ns", annotations={"a": "b" * self._size()}))

    def _container(self) -> pb.Container:
        return codec.container_message(
            Container(id="c", pod_id="p", name="m", env=("A=1",) * (self._size() % 7), mounts=(Mount("/a", "/b"),))
        )

    def _size(self) -> int:
        return self.rng.choice((0, 1, 40, 3000, 5000))

    def _arriving(self, frames: list[Piece]) -> list[bytes]:
        frames = self._reordered(frames)
        self.frames += len(frames)
        broken = [(self._connection(number), self._broken(frame)) for number, frame in frames]
        data = bytearray(b"".join(self._chunks(broken)))
        if data and self.chance(0.2):  # below the chunks too
            for _ in range(self.rng.randrange(1, 4)):
                data[self.rng.randrange(len(data))] = self.rng.randrange(256)
        if self.chance(0.1):
            del data[self.rng.randrange(len(data) + 1) :]
        return list(self._cut(bytes(data)))

    def _reordered(self, frames: list[Piece]) -> list[Piece]:
        frames = list(frames)
        for _ in range(self.rng.choice((0, 0, 1, 2))):
            at = self.rng.randrange(len(frames))
            match self.rng.randrange(3):
                case 0:
                    frames.insert(self.rng.randrange(len(frames) + 1), frames[at])
                case 1 if len(frames) > 1:
                    del frames[at]
                case _:
                    frames.insert(self.rng.randrange(len(frames)), frames.pop(at))
        return frames

    def _connection(self, number: int) -> int:
        return number if self.chance(0.98) else self.rng.choice((0, 1, 2, 3, 2**32 - 1))

    def _broken(self, frame: bytes) -> bytes:
        if self.chance(0.6):
            return frame
        data, rng = bytearray(frame), self.rng
        match rng.randrange(8):
            case 0:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 1:
                data[0:4] = rng.choice((0, 1, len(frame), LIMIT_BYTES, 2**31, 2**32 - 1)).to_bytes(4, "big")
            case 2:
                data[4:8] = rng.choice((0, 1, 2, 3, 99, 2**32 - 1)).to_bytes(4, "big")
            case 3:
                data[8] = rng.randrange(256)
            case 4:
                data[9] = rng.randrange(256)
            case 5:
                del data[rng.randrange(len(data)) :]
            case 6:
                data += rng.randbytes(rng.randrange(1, 30))
            case _:
                begin = rng.randrange(10, len(data)) if len(data) > 10 else 0
                data[begin : begin + 8] = rng.randbytes(rng.randrange(16))
        return bytes(data)

    def _chunks(self, pieces: list[Piece]) -> Iterator[bytes]:
        rng = self.rng
        while pieces:
            connection, data = pieces.pop(0)
            while pieces and pieces[0][0] == connection and self.chance(0.2):
                data += pieces.pop(0)[1]
            if self.chance(0.02):
                length = rng.choice((LIMIT_BYTES, LIMIT_BYTES + 1, 2**31, 2**32 - 1, max(0, len(data) - 1)))
                yield connection.to_bytes(4, "big") + length.to_bytes(4, "big") + data
                continue
            while data:
                size = len(data) if self.chance(0.7) else rng.randrange(1, len(data) + 1)
                yield connection.to_bytes(4, "big") + size.to_bytes(4, "big") + data[:size]
                data = data[size:]

    def _cut(self, data: bytes) -> Iterator[bytes]:
        while data:
            size = self.rng.choice((1, 3, 7, 8, 100, 4096, 1 << 18))
            yield data[:size]
            data = data[size:]


class FrontEnd:
    """Does what it likes."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.told: Counter[str] = Counter()

    def _some(self, name: str) -> None:
        self.told[name] += 1
        match self._rng.randrange(12):
            case 0:
                raise Refused("no")
            case 1:
                raise ValueError("\u2028 oops")

    def concerns(self, pod: Pod, container: Container) -> bool:
        return self._rng.random() < 0.8

    def brief(self, pods: Sequence[Pod], containers: Sequence[Container]) -> Inventory:
        return pods, containers

    def connected(self, runtime: Runtime) -> None:
        self._some("connected")

    def synchronize(self, pods: Sequence[Pod], containers: Sequence[Container]) -> None:
        self._some("synchronize")

    def run_pod(self, pod: Pod) -> None:
        self._some("run_pod")

    def stop_pod(self, pod: Pod) -> None:
        self._some("stop_pod")

    def remove_pod(self, pod: Pod) -> None:
        self._some("remove_pod")

    def create_container(self, pod: Pod, container: Container) -> Adjustment:
        self._some("create_container")
        return Adjustment(env=(("A", "b" * self._rng.choice((1, 5000))),))

    def start_container(self, pod: Pod, container: Container) -> None:
        self._some("start_container")

    def stop_container(self, pod: Pod, container: Container) -> None:
        self._some("stop_container")

    def remove_container(self, pod: Pod, container: Container) -> None:
        self._some("remove_container")

    def disconnected(self, reason: str) -> None:
        self._some("disconnected")


class Core:
    """The plugin's side without sockets, threads and a clock, over many links; it checks what it says."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._queue = RequestQueue()
        self._front_end = FrontEnd(self._rng)
        self._running: Entry | None = None
        self._now_s = 0.0
        self._links = 0
        self.ends: Counter[str] = Counter()
        self.requests = self.answers = 0

    def converse(self, pieces: list[bytes]) -> None:
        """One link, from its begin to its end."""
        self._links += 1
        self._endpoint = Endpoint(serves=1, calls=2)
        self._peer = Endpoint(serves=2, calls=1)
        self._dialogue = Dialogue(self._links, self._queue, self._front_end, ANSWER_S)
        self._due: Counter[int] = Counter()
        self._peer.feed(self._endpoint.request("r", "RegisterPlugin", b"")[1])
        reason = "the end"
        try:
            for piece in pieces:
                self._take(piece)
        except ProtocolError as error:
            reason = " ".join(str(error).split()[:4])
        else:
            for _ in range(3):  # whatever happens, after its time everything is answered
                self._now_s += 2 * ANSWER_S
                self._overdue()
            assert not +self._due, f"never answered: {self._due}"
        self.ends[reason] += 1
        self._queue.drop(self._links, reason, ANSWER_S)

    def _take(self, piece: bytes) -> None:
        received = self._endpoint.feed(piece)
        self._check(bytes(received.replies), solicited=False)
        for request in received.requests:
            self.requests += 1
            self._due[request.stream] += 1
            answer = self._dialogue.receive(request, self._now_s)
            if answer is not None:
                self._check(self._endpoint.answer(answer))
            self._work()
        self._now_s += self._rng.choice((0.0, 0.0, 0.01, 0.3, 2.0))
        self._overdue()
        for decoder in self._endpoint._frames.values():
            assert len(decoder._buffer) <= LIMIT_BYTES
        assert len(self._queue._waiting) <= MAX_ENTRIES

    def _overdue(self) -> None:
        for answer in self._dialogue.overdue(self._now_s):
            self._check(self._endpoint.answer(answer))

    def _work(self) -> None:
        """The worker begins something, or is over with it, or hangs."""
        if self._running is None:
            self._running = self._queue.begin(self._now_s)
        if self._running is not None and self._rng.random() < 0.8:
            entry, self._running = self._running, None
            answer = perform(entry, self._front_end)
            if self._queue.finish(self._now_s):
                self._check(self._endpoint.answer(answer))

    def _check(self, sent: bytes, *, solicited: bool = True) -> None:
        """A runtime must understand it, and have asked for it."""
        for answer in self._peer.feed(sent).answers:
            self.answers += 1
            if solicited:
                self._due[answer.stream] -= 1
                assert self._due[answer.stream] >= 0, f"answered twice: {answer}"


class Faults(logging.Handler):
    """Notes faults of the session's own, which it survives; keeps all else of the NRI log from being shown."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._logger = logging.getLogger("nri")
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and "front end" not in record.getMessage():
            self.seen.append(f"{record.getMessage()}: {record.exc_info[1]!r}")

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = True
        super().close()


class Sockets:
    """A session and a simulated runtime that strangers talk to."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.faults = Faults()
        self._rng = random.Random(seed)
        self._path, self._sim_path = str(directory / "nri.sock"), str(directory / "sim.sock")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self._path)
        self._listener.listen(4)
        self._listener.settimeout(WAIT_S)
        self._soon = patch.multiple("deviceplugin.nri.session", RETRY_FIRST_S=0.001, RETRY_LAST_S=0.001)
        self._soon.start()
        self._session = NriSession(self._path, "gpufrac", "90", FrontEnd(self._rng), answer_s=0.3)
        self._session.start()
        self._runtime = NriRuntime(self._sim_path, request_timeout_s=0.3, inventory=lambda: ([], []))
        self._runtime.start()
        self.links = 0

    def close(self) -> None:
        self._session.close()
        self._soon.stop()
        self._listener.close()
        self._runtime.close()
        self.faults.close()

    @property
    def state(self) -> NriState:
        return self._session.state

    def to_session(self, pieces: list[bytes]) -> None:
        connection, _ = self._listener.accept()
        with connection:
            self._talk(connection, pieces)
        self.links += 1

    def to_runtime(self, pieces: list[bytes]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(self._sim_path)
            self._talk(connection, pieces)
        self.links += 1

    def _talk(self, connection: socket.socket, pieces: list[bytes]) -> None:
        connection.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionError, BlockingIOError):
            for piece in pieces:
                connection.sendall(piece)
            if self._rng.random() < 0.3:
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass
            else:
                connection.settimeout(0.0)
                connection.recv(1 << 16)

    def check(self) -> None:
        """Both are as good as new: they get along with sound peers."""
        assert not self.faults.seen
        assert self._session._thread.is_alive()
        assert self._session._worker.is_alive()
        session = NriSession(self._sim_path, "good", "91", FrontEnd(random.Random(1)))
        session.start()
        try:
            until(lambda: "91-good" in self._runtime.plugins)
        finally:
            session.close()
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(WAIT_S)
            peer = Endpoint(serves=2, calls=1)
            _, data = peer.request(PLUGIN_SERVICE, "Configure", b"")
            connection.sendall(data)
            answers: list[Answer] = []
            while not answers:
                answers += peer.feed(connection.recv(1 << 16)).answers
            assert answers[0].payload


def test_the_conversations_are_sound_before_they_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("_broken", "_reordered"):
        monkeypatch.setattr(Breaker, method, lambda _, whole: whole)
    monkeypatch.setattr(Breaker, "_connection", lambda _, number: number)
    core = Core(1)
    for seed in range(50):
        breaker = Breaker(seed)
        monkeypatch.setattr(breaker, "chance", lambda share: share > 0.5)
        core.converse(breaker.runtime_side())
    assert core.ends == {"the end": 50}
    assert core.requests == core.answers
    assert set(core._front_end.told) >= {"connected", "synchronize", "create_container", "run_pod", "disconnected"}


def test_no_conversation_breaks_the_plugin(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    breaker, core = Breaker(random.randrange(2**32)), Core(2)
    while breaker.frames < FRAMES or len(core.ends) <= 3:  # which kinds come is chance
        core.converse(breaker.runtime_side())
    assert core.ends["the end"] > 100
    assert len(core.ends) > 3, "some must have been broken enough to end it"


def test_no_stranger_breaks_a_session_or_the_simulated_runtime(short_tmp: Path) -> None:
    breaker = Breaker(random.randrange(2**32))
    sockets = Sockets(short_tmp, 3)
    try:
        for _ in range(SOCKETS):
            sockets.to_session(breaker.runtime_side())
            sockets.to_runtime(breaker.plugin_side())
        sockets.check()
    finally:
        sockets.close()


def main(duration_s: float) -> int:
    """Fuzzes so long; what it saw, line by line."""
    logging.getLogger("nri-sim").setLevel(logging.CRITICAL)
    seed = random.randrange(2**32)
    breaker, core = Breaker(seed), Core(seed)
    begun_s = time.monotonic()
    conversations, before_mib, unexpected = 0, 0.0, 0
    with tempfile.TemporaryDirectory(prefix="gf-", dir="/tmp") as directory:
        sockets = Sockets(Path(directory), seed)
        while time.monotonic() - begun_s < duration_s:
            try:
                for _ in range(50):
                    core.converse(breaker.runtime_side())
                sockets.to_session(breaker.runtime_side())
                sockets.to_runtime(breaker.plugin_side())
            except Exception as error:  # noqa: BLE001 - it is what we are looking for
                unexpected += 1
                print(f"unexpected: {type(error).__name__}: {error} (seed {seed}, conversation {conversations})")
            conversations += 50
            if conversations == 1000:  # by then all is imported and warm
                before_mib = rss_mib()
        sockets.check()
        state = sockets.state
        sockets.close()
    print(f"seed {seed}, {time.monotonic() - begun_s:.0f} s")
    print(f"{conversations} conversations, {breaker.frames} frames, {sockets.links} links over sockets")
    print(f"{core.requests} requests understood, {core.answers} answers, {core._queue.late} without the front end")
    print(f"session: {state.registrations} registrations, {state.late} late answers")
    print("links ended by:", ", ".join(f"{reason} {count}" for reason, count in core.ends.most_common()))
    print(f"unexpected exceptions: {unexpected}")
    print(
        f"RSS {before_mib:.1f} MiB after 1000 conversations, {rss_mib():.1f} MiB at the end, {peak_mib():.1f} MiB peak"
    )
    return 1 if unexpected else 0


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0))
