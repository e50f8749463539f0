"""`gpufrac status --check`: is a process live, ready, does the node need somebody. For probes, node agents and scripts.

It asks each process for its health (mpsd/localapi/health.py), and waits for an answer no longer than ASK_S.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from deviceplugin.cli.output import EXIT_FAILURE, EXIT_UNREACHABLE, print_json, say, shortened
from deviceplugin.status.reasons import ProcessCode
from mpsd.common.errors import GpufracError, NotReachableError
from mpsd.common.reason import Reason
from mpsd.common.socketpath import mpsd_socket, plugin_socket
from mpsd.common.text import one_line
from mpsd.localapi.call import call
from mpsd.localapi.health import Health

SOCKETS: Final = {"mpsd": mpsd_socket, "plugin": plugin_socket}
ASK_S: Final = 3.0
CHECK_S: Final = 4.0
"""All of it. `timeoutSeconds` of a probe must be longer."""
_LEAST_S: Final = 0.1


class Found(NamedTuple):
    """`state` says in a word or two how it is; `reasons` why, most serious first, empty where all is well."""

    exit_code: int
    state: str
    reasons: Sequence[Reason] = ()

    @property
    def line(self) -> str:
        """For people, and the events of a failed probe."""
        if not self.reasons:
            return self.state
        first, more = self.reasons[0], len(self.reasons) - 1
        rest = f" (and {more} more, see gpufrac status)" if more else ""
        return f"{self.state}: {first.code}: {shortened(one_line(first.message))}{rest}"


def run(check: str, processes: Sequence[str], root: str, output: str) -> int:
    """Looks, prints one line, and gives the exit code."""
    found = look(check, processes, root)
    if output == "json":
        reasons = [{"code": reason.code, "message": reason.message} for reason in found.reasons]
        print_json({"check": check, "exitCode": found.exit_code, "state": found.state, "reasons": reasons})
    else:
        say(found.line)
    return found.exit_code


def look(check: str, processes: Sequence[str], root: str) -> Found:
    """Asks the processes. The first that is down or hangs ends it. Raises GpufracError where we may not ask."""
    give_up_s = time.monotonic() + CHECK_S

    def left_s() -> float:
        return min(ASK_S, max(_LEAST_S, give_up_s - time.monotonic()))

    waiting: list[tuple[str, Reason]] = []
    for name in processes:
        path = SOCKETS[name](root)
        try:
            health = call(path, "health", {}, Health, left_s())
        except NotReachableError as error:
            return Found(EXIT_UNREACHABLE, f"{name} does not answer", [Reason(ProcessCode.NOT_REACHABLE, str(error))])
        except GpufracError as error:
            if isinstance(error.__cause__, PermissionError):
                raise
            text = f"{error}; is it of this command's version?"
            return Found(EXIT_FAILURE, f"{name} is not understood", [Reason(ProcessCode.NOT_UNDERSTOOD, text)])
        if health.not_live:
            return Found(EXIT_UNREACHABLE, f"{name} hangs", health.not_live)
        waiting += [(name, reason) for reason in health.not_ready]
    who = " and ".join(processes)
    if check == "live":
        return Found(0, f"ok: {who} live")
    if check == "ready" and waiting:
        return Found(EXIT_FAILURE, f"{waiting[0][0]} is not ready", [reason for _, reason in waiting])
    if check == "ready":
        return Found(0, f"ok: {who} can serve")
    return _attention(processes, root, [reason for _, reason in waiting], left_s)


def _attention(processes: Sequence[str], root: str, waiting: Iterable[Reason], left_s: Callable[[], float]) -> Found:
    from deviceplugin.cli.node import look as look_at_node
    from deviceplugin.cli.overview import needs_attention

    node = look_at_node(root, processes, left_s)
    for name, error in (("mpsd", node.mpsd_error), ("plugin", node.plugin_error)):
        if error is not None and error.code == ProcessCode.NOT_REACHABLE:
            return Found(EXIT_UNREACHABLE, f"{name} does not answer", [error])
    reasons = {reason.message: reason for reason in (*needs_attention(node), *waiting)}
    if not reasons:
        return Found(0, "ok: nothing needs attention")
    return Found(EXIT_FAILURE, "needs attention", list(reasons.values()))
