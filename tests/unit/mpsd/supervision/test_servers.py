"""Log events of one daemon -> whether its servers can be relied on."""

from mpsd.common.reason import message_of
from mpsd.daemon.logs.parse import (
    ClientConnected,
    FaultBegun,
    FaultClients,
    FaultEnded,
    LogEvent,
    ServerExited,
    ServerReady,
)
from mpsd.localapi.snapshot import GpuClient
from mpsd.supervision.servers import FAULT_SILENCE_S, RECHECK_S, ServerWatch

CLIENTS = {7: GpuClient(pid=7, allocation_key="k1", command="train")}
FAILURES = tuple(ServerExited(pid=pid, status=1) for pid in range(5))


def watch(*events: LogEvent, now_s: float = 100.0) -> ServerWatch:
    servers = ServerWatch()
    for event in events:
        servers.note(event, now_s)
    return servers


def test_nothing_said_is_no_trouble() -> None:
    servers = watch(ServerReady(9), ClientConnected(7, 0), ServerExited(9, 0))
    assert (servers.trouble(100.0, {}), servers.deadline_s(100.0), servers.nameless_clients) == (None, None, False)


def test_a_fault_names_its_clients_as_soon_as_they_are_logged() -> None:
    servers = watch(FaultBegun(9))
    assert (
        message_of(servers.trouble(100.0, CLIENTS)) == "MPS server 9 is in FAULT until the clients it served have left"
    )
    assert servers.deadline_s(100.0) == 100.0 + RECHECK_S
    servers.note(FaultClients(9, (7, 8)), 100.0)
    assert message_of(servers.trouble(100.0, CLIENTS)).endswith(": client pid 7 (train, allocation k1), pid 8 faulted")


def test_a_fault_ends_with_the_server_or_by_its_word_or_unheard() -> None:
    for end in (FaultEnded(9), ServerExited(9, 0)):
        assert watch(FaultBegun(9), end).trouble(100.0, {}) is None
    servers = watch(FaultBegun(9))
    assert servers.trouble(100.0 + FAULT_SILENCE_S, {}) is None
    assert servers.deadline_s(100.0 + FAULT_SILENCE_S) is None


def test_a_restart_loop_is_trouble_until_time_has_passed() -> None:
    servers = watch(*FAILURES)
    assert "MPS servers end as soon as they are started" in message_of(servers.trouble(100.0, {}))
    assert servers.deadline_s(100.0) is not None
    assert servers.trouble(1000.0, {}) is None


def test_clients_without_a_pid_are_noted() -> None:
    assert watch(ClientConnected(0, 1000)).nameless_clients
