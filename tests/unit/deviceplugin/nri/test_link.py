"""Two links at both ends of a socket pair."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from deviceplugin.nri import link as link_module
from deviceplugin.nri.link import CallError, Link, LinkError
from deviceplugin.nri.ttrpc import Answer, Request
from tests.unit.deviceplugin.nri.peers import chunk, whole_frame
from tests.waiting import WAIT_S


class Peer:
    """A link whose thread answers what it is asked, unless told to be silent."""

    def __init__(self, link: Link) -> None:
        self.link, self.silent = link, False
        self.asked: list[Request] = []
        self._thread = threading.Thread(target=self._pump)
        self._thread.start()

    def _pump(self) -> None:
        with suppress(LinkError):
            while True:
                for request in self.link.pump(WAIT_S):
                    self.asked.append(request)
                    if not self.silent:
                        error = request.method == "fail"
                        self.link.answer(Answer(request.stream, request.payload, 9 * error, "no" * error))
        self.link.release()

    def close(self) -> None:
        self.link.end("test over")
        self._thread.join()


@pytest.fixture
def pair() -> Iterator[tuple[Peer, Peer]]:
    one, other = socket.socketpair()
    peers = Peer(Link(one, serves=1, calls=2)), Peer(Link(other, serves=2, calls=1))
    yield peers
    for peer in peers:
        peer.close()


def test_both_sides_call_at_once(pair: tuple[Peer, Peer]) -> None:
    failures: list[object] = []

    def talk(link: Link, mark: bytes) -> None:
        for number in range(200):
            payload = mark * number * 50
            if link.call("s", "echo", payload, WAIT_S) != payload:
                failures.append((mark, number))

    threads = [threading.Thread(target=talk, args=(peer.link, mark)) for peer in pair for mark in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_an_error_answer_keeps_its_code_and_words(pair: tuple[Peer, Peer]) -> None:
    with pytest.raises(CallError, match=r"^no$") as caught:
        pair[0].link.call("s", "fail", b"", WAIT_S)
    assert caught.value.code == 9
    assert str(CallError(13, "")) == "error 13 without words"


def test_a_call_that_nobody_answers_ends_in_time_and_is_forgotten(pair: tuple[Peer, Peer]) -> None:
    pair[1].silent = True
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        pair[0].link.call("s", "m", b"", 0.05)
    assert not pair[0].link._pending


def test_the_end_of_a_link_reaches_every_caller(pair: tuple[Peer, Peer]) -> None:
    pair[1].silent = True
    pending = [pair[0].link.begin("s", "m", b"", WAIT_S) for _ in range(3)]
    pair[1].link.end("I leave")
    for call in pending:
        with pytest.raises(LinkError, match="the other side closed the connection"):
            call.result(WAIT_S)
    with pytest.raises(LinkError, match="the other side closed the connection"):
        pair[0].link.call("s", "m", b"", WAIT_S)
    assert pair[1].link.ended == "I leave"


def test_a_peer_that_breaks_the_rules_ends_the_link() -> None:
    one, other = socket.socketpair()
    with other:
        link = Link(one, serves=1, calls=2)
        other.sendall(chunk(1, b"", length=2**32 - 1))
        with pytest.raises(LinkError, match="chunk of 4294967295 bytes"):
            link.pump(WAIT_S)
        assert other.recv(10) == b""
        link.release()


def test_a_half_closed_socket_ends_the_link() -> None:
    one, other = socket.socketpair()
    with other:
        link = Link(one, serves=1, calls=2)
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(LinkError, match="the other side closed the connection"):
            link.pump(WAIT_S)
        link.release()


def test_a_peer_that_takes_no_data_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_SEND_S", 0.1)
    one, other = socket.socketpair()
    with other:
        link = Link(one, serves=1, calls=2)
        with pytest.raises(LinkError, match="takes no more data"):
            answer_often(link)
        with pytest.raises(LinkError, match="takes no more data"):
            link.begin("s", "m", b"", 1.0)
        link.release()


def answer_often(link: Link) -> None:
    for _ in range(100):
        link.answer(Answer(1, bytes(100_000)))


def test_errors_to_what_is_no_call_are_sent_back() -> None:
    one, other = socket.socketpair()
    with other:
        link = Link(one, serves=1, calls=2)
        other.sendall(chunk(1, whole_frame(2, 1)))
        assert link.pump(WAIT_S) == []
        assert b"even stream" in other.recv(1000)
        link.release()


def test_pumping_waits_no_longer_than_told() -> None:
    one, other = socket.socketpair()
    with other:
        link = Link(one, serves=1, calls=2)
        assert link.pump(0.01) == []
        assert link.pump(-1.0) == []
        link.release()
        assert link.ended == "closed"


def test_who_leaves_after_we_refused_something_leaves_for_that() -> None:
    """A state of 6 MB is more than ttrpc carries: a runtime that is told so hangs up."""
    one, other = socket.socketpair()
    with other:
        link = Link(one, serves=1, calls=2)
        other.sendall(chunk(1, whole_frame(1, 1, length=6_000_000)))
        assert link.pump(WAIT_S) == []
        assert other.recv(1 << 16)
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(LinkError, match=r"closed the connection, after we refused .* message of 6000000 bytes"):
            link.pump(WAIT_S)
        link.release()


def test_what_was_refused_long_before_is_no_reason_to_leave() -> None:
    one, other = socket.socketpair()
    with other:
        link = Link(one, serves=1, calls=2)
        other.sendall(chunk(1, whole_frame(2, 1)) + chunk(1, whole_frame(3, 1)))
        assert link.pump(WAIT_S)
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(LinkError, match=r"the other side closed the connection$"):
            link.pump(WAIT_S)
        link.release()
