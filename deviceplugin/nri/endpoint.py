"""One side of an NRI socket: bytes <-> calls in both directions (pure). The same for a runtime and for a plugin."""

import msgspec

from deviceplugin.nri import mux, ttrpc
from deviceplugin.nri.ttrpc import Answer, Code, Frame, FrameKind, Request
from mpsd.common.errors import ProtocolError


class Received(msgspec.Struct):
    """What some bytes brought. `replies` are bytes to send back: to frames that are no calls."""

    requests: list[Request] = msgspec.field(default_factory=list)
    answers: list[Answer] = msgspec.field(default_factory=list)
    replies: bytearray = msgspec.field(default_factory=bytearray)


class Endpoint:
    """Serves one connection of the socket and calls over the other.

    It treats broken rules as containerd's own ttrpc does: a frame that is no call is answered with an error of its own
    and the connection goes on, what is on no connection of ours counts for nothing. Only what leaves no way to tell
    where the next frame begins ends it: see `feed`.
    """

    def __init__(self, *, serves: int, calls: int) -> None:
        self._serves, self._calls = serves, calls
        self._chunks = mux.Demultiplexer()
        self._frames = {serves: ttrpc.FrameDecoder(), calls: ttrpc.FrameDecoder()}
        self._newest_served = 0
        self._next_stream = 1
        self.objection = ""
        """Why we refused what the peer asked last, empty where we did not: a peer that leaves then leaves for that."""

    def feed(self, data: bytes) -> Received:
        """Takes in what the socket brought. Raises ProtocolError when the peer can't be understood any more."""
        received = Received()
        for connection, piece in self._chunks.feed(data):
            decoder = self._frames.get(connection)
            if decoder is None:
                continue
            for frame in decoder.feed(piece):
                if connection == self._calls:
                    self._take_answer(frame, received)
                else:
                    self._take_request(frame, received)
        return received

    def request(self, service: str, method: str, payload: bytes, timeout_s: float = 0.0) -> tuple[int, bytes]:
        """A call of ours: the stream that its answer will have, and what to send. Raises ProtocolError where it is too
        long."""
        stream = self._next_stream
        data = ttrpc.encode_request(Request(stream, service, method, payload, timeout_s))
        self._next_stream += 2
        return stream, mux.encode(self._calls, data)

    def answer(self, answer: Answer) -> bytes:
        """What to send in answer to a request. One that is too long becomes an error that says so."""
        try:
            data = ttrpc.encode_answer(answer)
        except ProtocolError as error:
            self.objection = str(error)
            data = ttrpc.encode_answer(Answer(answer.stream, code=Code.RESOURCE_EXHAUSTED, text=str(error)))
        return mux.encode(self._serves, data)

    def _take_request(self, frame: Frame, received: Received) -> None:
        # The order of these checks is that of containerd/ttrpc server.go.
        if frame.oversized_bytes:
            objection = f"cannot take a message of {frame.oversized_bytes} bytes: at most {ttrpc.MAX_PAYLOAD_BYTES}"
            self._object(frame, Code.RESOURCE_EXHAUSTED, objection, received)
        elif frame.stream % 2 == 0:
            self._object(frame, Code.INVALID_ARGUMENT, "cannot take an even stream number from a caller", received)
        elif frame.kind == FrameKind.DATA:
            self._object(frame, Code.INVALID_ARGUMENT, "cannot take data: no such stream is open", received)
        elif frame.kind == FrameKind.REQUEST:
            if frame.stream <= self._newest_served:
                self._object(frame, Code.INVALID_ARGUMENT, "cannot take a stream number again", received)
                return
            self._newest_served = frame.stream
            try:
                received.requests.append(ttrpc.decode_request(frame))
                self.objection = ""
            except ProtocolError as error:
                self._object(frame, Code.INVALID_ARGUMENT, str(error), received)

    def _object(self, frame: Frame, code: Code, text: str, received: Received) -> None:
        self.objection = text
        received.replies += self.answer(Answer(frame.stream, code=code, text=text))

    def _take_answer(self, frame: Frame, received: Received) -> None:
        if frame.oversized_bytes:
            text = f"cannot take an answer of {frame.oversized_bytes} bytes: at most {ttrpc.MAX_PAYLOAD_BYTES}"
            received.answers.append(Answer(frame.stream, code=Code.RESOURCE_EXHAUSTED, text=text))
        elif frame.kind == FrameKind.RESPONSE:
            try:
                received.answers.append(ttrpc.decode_answer(frame))
            except ProtocolError as error:
                received.answers.append(Answer(frame.stream, code=Code.INTERNAL, text=str(error)))
        elif frame.kind == FrameKind.DATA:
            text = "cannot take a stream of data where one answer is due"
            received.answers.append(Answer(frame.stream, code=Code.INTERNAL, text=text))
