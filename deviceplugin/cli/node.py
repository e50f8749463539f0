"""`gpufrac resources|allocations|daemons`: what is on the node, read from both processes' sockets."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import click

from deviceplugin.cli.faults import DAEMON_OF_SEVERAL, hit_text
from deviceplugin.cli.options import node_options, run_root_of
from deviceplugin.cli.output import (
    EXIT_UNREACHABLE,
    Failure,
    age,
    complain,
    counted,
    failures,
    print_json,
    print_table,
    say,
    size,
)
from deviceplugin.plan.view import daemon_reason, daemon_state
from deviceplugin.status.model import PluginStatus, ResourceStatus
from deviceplugin.status.reasons import ProcessCode
from mpsd.common.errors import GpufracError, NotReachableError
from mpsd.common.reason import Reason, message_of
from mpsd.common.socketpath import mpsd_socket, plugin_socket
from mpsd.localapi.call import TIMEOUT_S, call
from mpsd.localapi.client import MpsdClient
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, GpuStatus, Snapshot
from mpsd.shares.groups import is_set_name

LOG_LINES = 5
"""How many log lines of a daemon in trouble are shown."""
WAITING_SHARES = "the kubelet's checkpoint holds them for pods that are gone, until it takes the next list"
IN_TROUBLE = ("wedged", DaemonState.KILLING, DaemonState.BACKOFF, DaemonState.FAILED)


@dataclass(frozen=True, slots=True)
class Node:
    """What both processes say; the error where one doesn't answer."""

    mpsd: Snapshot | None
    mpsd_error: Reason | None
    plugin: PluginStatus | None
    plugin_error: Reason | None

    def need_any(self) -> None:
        """Raises Failure (exit 3) when neither answers."""
        if self.mpsd is None and self.plugin is None:
            raise Failure(f"{self.mpsd_error}\n{self.plugin_error}", EXIT_UNREACHABLE)

    def need_plugin(self) -> PluginStatus:
        """The plugin's status. Raises Failure (exit 3) where the plugin is not reachable."""
        if self.plugin is None:
            raise Failure(message_of(self.plugin_error), EXIT_UNREACHABLE)
        return self.plugin

    def need_mpsd(self) -> Snapshot:
        """mpsd's snapshot. Raises Failure (exit 3) where mpsd is not reachable."""
        if self.mpsd is None:
            raise Failure(message_of(self.mpsd_error), EXIT_UNREACHABLE)
        return self.mpsd

    def note_down(self) -> None:
        """Says on stderr which process is down."""
        for error in (self.mpsd_error, self.plugin_error):
            complain(message_of(error))


def look(
    root: str, processes: Collection[str] = ("mpsd", "plugin"), timeout_s: Callable[[], float] = lambda: TIMEOUT_S
) -> Node:
    """Asks the processes once each; of one that is not asked there is nothing, and no error.

    Args:
        root: the directory of the sockets.
        timeout_s: how long the next may take to answer.
    """
    snapshot = plugin = None
    mpsd_error = plugin_error = None
    if "mpsd" in processes:
        try:
            snapshot = MpsdClient(mpsd_socket(root), timeout_s()).snapshot()
        except GpufracError as error:
            mpsd_error = _unread("mpsd", root, error)
    if "plugin" in processes:
        try:
            plugin = call(plugin_socket(root), "status", {}, PluginStatus, timeout_s())
        except GpufracError as error:
            plugin_error = _unread("plugin", root, error)
    return Node(snapshot, mpsd_error, plugin, plugin_error)


def _unread(name: str, root: str, error: GpufracError) -> Reason:
    """Why one process shows nothing; an answer that makes no sense is mostly another version's."""
    if isinstance(error, NotReachableError):
        return Reason(ProcessCode.NOT_REACHABLE, str(error))
    text = f"cannot use the answer of gpufrac {name} on {root}/{name}.sock: {error}; is it of this command's version?"
    return Reason(ProcessCode.NOT_UNDERSTOOD, text)


def daemons_of(snapshot: Snapshot) -> list[tuple[DaemonStatus, tuple[GpuStatus, ...]]]:
    """Every MPS daemon with the GPUs it serves (pure)."""
    served: dict[str, tuple[GpuStatus, ...]] = {}
    for gpu in snapshot.gpus:
        if gpu.daemon is not None:
            name = gpu.daemon.name or gpu.info.uuid
            served[name] = (*served.get(name, ()), gpu)
    return [(gpus[0].daemon, gpus) for gpus in served.values() if gpus[0].daemon is not None]


def eviction_lines(snapshot: Snapshot | None) -> list[str]:
    """What MPS took from clients that were above their request."""
    return [
        f"GPU {gpu.info.index}: MPS evicted {gpu.evictions} client{'s' if gpu.evictions > 1 else ''} that used more "
        "than their request, for others within theirs."
        for gpu in (snapshot.gpus if snapshot is not None else ())
        if gpu.evictions
    ]


def log_lines(snapshot: Snapshot | None) -> list[str]:
    """What MPS daemons in trouble logged last (pure)."""
    lines = []
    for daemon, gpus in daemons_of(snapshot) if snapshot else ():
        if daemon.last_log and daemon_state(daemon) in IN_TROUBLE:
            numbers = ", ".join(str(gpu.info.index) for gpu in gpus)
            lines += ["", f"Last log lines of the MPS daemon of GPU {numbers} ({daemon_state(daemon)}):"]
            lines += [f"    {line}" for line in daemon.last_log[-LOG_LINES:]]
    return lines


@click.command(epilog="Example: gpufrac resources")
@node_options
@failures
def resources(config_path: str | None, run_root: str | None, output: str) -> None:
    """Resources: registered or not, shares listed, held and still to be had, and why there are no more.

    LISTED is what the kubelet knows, HELD what containers have, FREE what can still be had: of units, as many as one
    container can get now.
    """
    node = look(run_root_of(config_path, run_root))
    plugin = node.need_plugin()
    if output == "json":
        print_json(plugin.resources)
    else:
        index = {gpu.uuid: gpu.index for gpu in plugin.gpus}
        rows = [
            (
                r.name,
                r.mode,
                r.enforcement,
                r.registration,
                r.listed,
                r.held,
                r.free,
                r.registration_error or r.reason or missing_shares(r, index),
            )
            for r in plugin.resources
        ]
        columns = ("RESOURCE", "MODE", "ENFORCEMENT", "KUBELET", "LISTED", "HELD", "FREE", "REASON")
        print_table(columns, rows, "The config names no resource.")
        if why := next((r.not_hard for r in plugin.resources if r.not_hard), ""):
            say(f"hard: no: {why}.")
    node.note_down()


def missing_shares(resource: ResourceStatus, index: Mapping[str, int]) -> str:
    """Why shares are neither held nor to be had, by GPU and group; empty where there are none such (pure).

    Args:
        index: of each GPU by its UUID.
    """
    if resource.held + resource.free >= resource.listed:
        return ""
    late = f"{counted(resource.waiting, 'share')} waiting: {WAITING_SHARES}" if resource.waiting else ""
    if resource.held + resource.free + resource.waiting >= resource.listed:
        return late
    where: dict[str, list[str]] = {}
    for name, reason in resource.reasons.items():
        names = where.setdefault(reason, [])
        if not is_set_name(name):  # of which the reason names the GPUs
            names.append(f"GPU {index[name]}" if name in index else f"group {name}")
    texts = (f"{', '.join(names)}: {reason}" if names else reason for reason, names in where.items())
    return "; ".join([*filter(None, [late]), *texts])


@click.command(epilog="Example: gpufrac allocations -o json")
@node_options
@failures
def allocations(config_path: str | None, run_root: str | None, output: str) -> None:
    """Allocations: which container holds what on which GPU, and what of it is enforced.

    HIT TOGETHER is how many containers a fault of any of them ends, and on which GPUs; in time-slicing nobody else is
    hit.
    """
    node = look(run_root_of(config_path, run_root))
    plugin = node.need_plugin()
    if output == "json":
        print_json(plugin.allocations)
    else:
        index = {gpu.uuid: gpu.index for gpu in plugin.gpus}
        rows = [
            (
                a.key,
                f"{a.namespace}/{a.pod}" if a.pod else None,
                a.container,
                a.resource,
                ",".join(str(index.get(uuid, uuid)) for uuid in a.gpus),
                size(a.request_bytes),
                size(a.limit_bytes),
                a.mode,
                a.enforcement,
                hit_text(a, index),
                a.state,
                a.reason or (f"{a.claimed_by} claims it" if a.claimed_by else a.reduced),
            )
            for a in plugin.allocations
        ]
        columns = (
            "KEY",
            "POD",
            "CONTAINER",
            "RESOURCE",
            "GPU",
            "REQUEST",
            "LIMIT",
            "MODE",
            "ENFORCEMENT",
            "HIT TOGETHER",
            "STATE",
            "REASON",
        )
        print_table(columns, rows, "No allocation is live.")
        if any(a.enforcement == "cooperative" for a in plugin.allocations):
            say(
                "cooperative: MPS limits each process by itself: several together may exceed the limit, and so may one "
                "that clears its environment, on drivers before r615."
            )
        for a in plugin.allocations:
            for more in filter(None, (a.burst, a.over_limit)):
                say(f"{f'{a.namespace}/{a.pod}/{a.container}' if a.pod else a.key}: {more}.")
    node.note_down()


@click.command(epilog="Example: gpufrac daemons")
@node_options
@failures
def daemons(config_path: str | None, run_root: str | None, output: str) -> None:
    """MPS control daemons: the GPUs of each, state and reason, default limit as read back, restarts, clients."""
    node = look(run_root_of(config_path, run_root))
    snapshot = node.need_mpsd()
    if output == "json":
        print_json(
            [
                {
                    "uuid": gpu.info.uuid,
                    "index": gpu.info.index,
                    "domain": [other.info.uuid for other in snapshot.gpus if other.group == gpu.group],
                    "daemon": gpu.daemon,
                    "clients": gpu.clients,
                }
                for gpu in snapshot.gpus
            ]
        )
    else:
        rows = [
            (
                ",".join(str(gpu.info.index) for gpu in served),
                daemon_state(daemon),
                daemon.pid,
                f"v{daemon.protocol}",
                size(daemon.pinned_limit_bytes),
                len({client.pid for gpu in served for client in gpu.clients if client.mps}),
                daemon.restarts,
                age(daemon.since_unix_s),
                daemon.pipe_directory,
                daemon_reason(daemon) or served[0].not_shared,
            )
            for daemon, served in daemons_of(snapshot)
        ]
        columns = ("GPU", "STATE", "PID", "MPS", "LIMIT", "CLIENTS", "RESTARTS", "SINCE", "PIPE DIRECTORY", "REASON")
        print_table(columns, rows, f"No MPS daemon runs{': ' + snapshot.reason if snapshot.reason else '.'}")
        several = any(len(served) > 1 for _, served in daemons_of(snapshot))
        for line in (*((DAEMON_OF_SEVERAL,) if several else ()), *eviction_lines(snapshot), *log_lines(snapshot)):
            say(line)
    node.note_down()
