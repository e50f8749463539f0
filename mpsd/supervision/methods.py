"""The table of mpsd's local API: what each method takes, and who answers it."""

import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from mpsd.common import threads
from mpsd.common.errors import ProtocolError
from mpsd.common.pulse import Pulse
from mpsd.limits.api import LimitsApi
from mpsd.localapi.methods import Method, operating, reading, shaped
from mpsd.localapi.snapshot import CleanedUp, Desired, GpuClients, LimitQuery, LimitReading, Snapshot
from mpsd.localapi.wire import MAX_BLOCK_S
from mpsd.supervision.health import health
from mpsd.supervision.supervisor import Supervisor
from mpsd.supervision.terminate import Terminator

T = TypeVar("T")

CLIENTS_S = LIMITS_S = 4.5
"""For a caller that names no time: below the usual timeout of a call, so that it gets the reasons."""
TERMINATE_S = MAX_BLOCK_S - 8.0
MAX_UUIDS = 256
MAX_KEYS = 256
MAX_REASON = 200


class _Watch(msgspec.Struct, frozen=True):
    instance: str = ""
    generation: int = 0
    timeout_s: float = 0.0


class _Apply(msgspec.Struct, frozen=True):
    desired: Desired


class _Clients(msgspec.Struct, frozen=True):
    uuids: tuple[str, ...]
    timeout_s: float = CLIENTS_S


class _Limits(msgspec.Struct, frozen=True):
    queries: tuple[LimitQuery, ...]
    timeout_s: float = LIMITS_S


class _SetLimits(msgspec.Struct, frozen=True, kw_only=True):
    gpu: str
    cgroup: str
    soft_bytes: int
    hard_bytes: int | None
    timeout_s: float = LIMITS_S


Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""One line for people."""


class _Replace(msgspec.Struct, frozen=True):
    daemon: str
    now: bool = False
    reason: Reason = "an operator asked for it"


class _Terminate(msgspec.Struct, frozen=True):
    keys: tuple[str, ...] = ()
    pod_uids: tuple[str, ...] = ()
    kill: bool = False
    force: bool = False


def methods(
    supervisor: Supervisor,
    terminator: Terminator,
    limits_api: LimitsApi,
    clean_up: Callable[[], CleanedUp],
    pulses: Sequence[Pulse] = (),
) -> dict[str, Method]:
    """The methods of mpsd's local API. Params of the wrong shape raise ProtocolError.

    Args:
        pulses: of the loops beside the supervisor's.
    """

    def watch(params: dict[str, Any]) -> Snapshot:
        asked = shaped(params, _Watch)
        return supervisor.watch(asked.instance, asked.generation, _block_s(asked.timeout_s))

    def apply(params: dict[str, Any]) -> None:
        supervisor.apply(shaped(params, _Apply).desired)

    def clients(params: dict[str, Any]) -> dict[str, GpuClients]:
        asked = shaped(params, _Clients)
        if len(asked.uuids) > MAX_UUIDS:
            raise ProtocolError(f"cannot list the clients of more than {MAX_UUIDS} GPUs at a time")
        return supervisor.clients(asked.uuids, _block_s(asked.timeout_s))

    def limits(params: dict[str, Any]) -> list[LimitReading]:
        asked = shaped(params, _Limits)
        return limits_api.read(asked.queries, _block_s(asked.timeout_s))

    def set_limits(params: dict[str, Any]) -> LimitReading:
        asked = shaped(params, _SetLimits)
        query = LimitQuery(asked.gpu, asked.cgroup)
        return limits_api.set(query, asked.soft_bytes, asked.hard_bytes, _block_s(asked.timeout_s))

    def replace(params: dict[str, Any]) -> None:
        asked = shaped(params, _Replace)
        supervisor.replace(asked.daemon, asked.reason, now=asked.now)

    def terminate(params: dict[str, Any]) -> dict[str, Any]:
        asked = shaped(params, _Terminate)
        count = len(asked.keys) + len(asked.pod_uids)
        if not 1 <= count <= MAX_KEYS:
            raise ProtocolError(f"cannot end the clients of {count} allocations and pods: 1 to {MAX_KEYS} at a time")
        done, errors = terminator.terminate(
            asked.keys, asked.pod_uids, kill=asked.kill, force=asked.force, timeout_s=TERMINATE_S
        )
        return {
            "clients": done,
            "errors": [error.message for error in errors],
            "error_codes": [error.code for error in errors],
        }

    return reading(
        {
            "snapshot": lambda _: supervisor.snapshot,
            "watch": watch,
            "desired": lambda _: supervisor.desired(),
            "clients": clients,
            "limits": limits,
            "status": lambda _: _status(supervisor),
            "health": lambda _: health(supervisor, pulses),
            "state_root": lambda _: supervisor.config.state_root,
        }
    ) | operating(
        {
            "apply": apply,
            "set_limits": set_limits,
            "replace": replace,
            "confirm_indices": lambda _: supervisor.confirm_indices(),
            "terminate": terminate,
            "cleanup": lambda _: clean_up(),
        }
    )


def _block_s(asked_s: float) -> float:
    """The time that a caller may have a method block for."""
    return max(0.0, min(asked_s, MAX_BLOCK_S))


def _status(supervisor: Supervisor) -> dict[str, Any]:
    """Facts about the process, for people."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    snapshot = supervisor.snapshot
    return {
        "pid": os.getpid(),
        "instance": snapshot.instance,
        "up_s": round(time.time() - snapshot.started_unix_s, 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
        "max_rss_kib": usage.ru_maxrss,
        "threads": threading.active_count(),
        "thread_failures": threads.failures(),
    }
