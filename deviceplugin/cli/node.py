"""`gpufrac status|gpus|resources|allocations|daemons`: what is on the node, read from both processes' sockets."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

import click

from deviceplugin.cli.output import EXIT_UNREACHABLE, Failure, failures, output_option, print_json, print_table, size
from deviceplugin.status import PluginStatus
from mpsd.errors import GpufracError, NotReachableError
from mpsd.snapshot import Snapshot

P = ParamSpec("P")

DEFAULT_RUN_ROOT = "/run/gpufrac"


def node_options(command: Callable[P, None]) -> Callable[P, None]:
    """Where the node's sockets are, and the output format."""
    command = output_option(command)
    command = click.option(
        "--run-root",
        envvar="GPUFRAC_RUN_ROOT",
        metavar="DIR",
        help=f"Directory of the sockets (mps.runRoot). Default: {DEFAULT_RUN_ROOT}.",
    )(command)
    return click.option(
        "--config", "config_path", envvar="GPUFRAC_CONFIG", metavar="FILE", help="Take mps.runRoot from this config."
    )(command)


@dataclass(frozen=True, slots=True)
class Node:
    """What both processes say; the error text where one doesn't answer."""

    mpsd: Snapshot | None
    mpsd_error: str
    plugin: PluginStatus | None
    plugin_error: str

    def need_any(self) -> None:
        """Raises Failure (exit 3) when neither answers."""
        if self.mpsd is None and self.plugin is None:
            raise Failure(f"{self.mpsd_error}\ngpufrac: {self.plugin_error}", EXIT_UNREACHABLE)

    def need_plugin(self) -> PluginStatus:
        if self.plugin is None:
            raise Failure(self.plugin_error, EXIT_UNREACHABLE)
        return self.plugin

    def need_mpsd(self) -> Snapshot:
        if self.mpsd is None:
            raise Failure(self.mpsd_error, EXIT_UNREACHABLE)
        return self.mpsd

    def note_down(self) -> None:
        """Says on stderr which process is down."""
        for error in (self.mpsd_error, self.plugin_error):
            if error:
                click.echo(f"gpufrac: {error}", err=True)


def look(config_path: str | None, run_root: str | None) -> Node:
    """Asks both processes once."""
    from mpsd.localapi.client import MpsdClient, call

    if run_root is None and config_path is not None:
        from mpsd.config.load import load_config

        run_root = load_config(config_path).mps.run_root
    root = run_root or DEFAULT_RUN_ROOT
    snapshot = plugin = None
    mpsd_error = plugin_error = ""
    try:
        snapshot = MpsdClient(f"{root}/mpsd.sock").snapshot()
    except GpufracError as error:
        mpsd_error = _unread("mpsd", root, error)
    try:
        plugin = call(f"{root}/plugin.sock", "status", {}, PluginStatus)
    except GpufracError as error:
        plugin_error = _unread("plugin", root, error)
    return Node(snapshot, mpsd_error, plugin, plugin_error)


def _unread(name: str, root: str, error: GpufracError) -> str:
    """Why one process shows nothing; an answer that makes no sense is mostly another version's."""
    if isinstance(error, NotReachableError):
        return str(error)
    return f"cannot use the answer of gpufrac {name} on {root}/{name}.sock: {error}; is it of this command's version?"


@click.command(epilog="Example: gpufrac status")
@node_options
@failures
def status(config_path: str | None, run_root: str | None, output: str) -> None:
    """The node in one minute: processes, GPUs, resources, and everything that needs attention.

    While one process answers, what it knows is shown and the other is said to be down; exit code 3 when neither does.
    """
    node = look(config_path, run_root)
    node.need_any()
    attention = attention_lines(node)
    if output == "json":
        print_json(
            {
                "mpsd": {"up": node.mpsd is not None, "error": node.mpsd_error, "snapshot": node.mpsd},
                "plugin": {"up": node.plugin is not None, "error": node.plugin_error, "status": node.plugin},
                "attention": attention,
            }
        )
        return
    for name, value in overview(node):
        click.echo(f"{name + ':':13} {value}")
    click.echo()
    if attention:
        click.echo(f"Needs attention ({len(attention)}):")
        for line in attention:
            click.echo(f"  ! {line}")
    else:
        click.echo("Nothing needs attention.")


def overview(node: Node) -> list[tuple[str, str]]:
    """The first lines of status (pure)."""
    snapshot, plugin = node.mpsd, node.plugin
    lines = [("mpsd", _up(snapshot.started_unix_s) if snapshot else "DOWN"), ("plugin", "DOWN")]
    if snapshot:
        ready = sum(1 for gpu in snapshot.gpus if gpu.daemon is not None and gpu.daemon.state == "ready")
        well = sum(1 for gpu in snapshot.gpus if gpu.health == "ok")
        lines += [
            ("driver", f"{snapshot.driver_version or 'unknown'} ({snapshot.backend})"),
            ("GPUs", f"{len(snapshot.gpus)}, {well} ok"),
            ("MPS daemons", f"{ready} ready of {sum(1 for gpu in snapshot.gpus if gpu.daemon is not None)}"),
        ]
    if plugin:
        lines[1] = ("plugin", f"{_up(plugin.started_unix_s)}, pid {plugin.pid}")
        registered = sum(1 for resource in plugin.resources if resource.registration == "registered")
        usable = sum(max(0, gpu.usable_bytes) for gpu in plugin.gpus)
        granted = sum(gpu.granted_bytes for gpu in plugin.gpus)
        lines += [
            ("resources", f"{len(plugin.resources)}, {registered} registered at the kubelet"),
            ("allocations", f"{len(plugin.allocations)}, {size(granted)} of {size(usable)} usable granted"),
            ("GPU devices", plugin.gpu_devices),
        ]
    return lines


def attention_lines(node: Node) -> list[str]:
    """Everything an operator should look at, most serious first (pure)."""
    lines = [error for error in (node.mpsd_error, node.plugin_error) if error]
    if node.mpsd is not None:
        lines += _mpsd_attention(node.mpsd)
    if node.plugin is not None:
        lines += _plugin_attention(node.plugin, mpsd_known_down=bool(node.mpsd_error))
    return list(dict.fromkeys(lines))


def _mpsd_attention(snapshot: Snapshot) -> list[str]:
    lines = [f"config: {snapshot.config_error}"] if snapshot.config_error else []
    if snapshot.reason:
        lines.append(snapshot.reason)
    for gpu in snapshot.gpus:
        name = f"GPU {gpu.info.index} ({gpu.info.uuid})"
        if gpu.health != "ok":
            lines.append(f"{name} is {gpu.health}: {gpu.reason}")
        if gpu.daemon is not None and gpu.daemon.state != "ready":
            lines.append(f"{name}: its MPS daemon is {gpu.daemon.state}: {gpu.daemon.reason or 'no reason given'}")
        if gpu.foreign_processes:
            pids = ", ".join(str(pid) for pid in gpu.foreign_processes)
            lines.append(f"{name}: processes without an allocation use it: pid {pids}")
    return lines


def _plugin_attention(plugin: PluginStatus, *, mpsd_known_down: bool) -> list[str]:
    lines = [f"config: {plugin.config_error}"] if plugin.config_error else []
    if plugin.config_restart_needed:
        lines.append(f"config: restart the plugin to put in force: {plugin.config_restart_needed}")
    if plugin.mpsd_error and not mpsd_known_down:
        lines.append(plugin.mpsd_error)
    lines += [error for error in (plugin.kubelet_error, plugin.checkpoint_error, plugin.cdi_error) if error]
    lines += plugin.problems
    for resource in plugin.resources:
        if resource.registration != "registered":
            lines.append(f"{resource.name} is not registered: {resource.registration_error or resource.registration}")
        if resource.listed == 0 and resource.reason:  # closed as a whole; that GPUs are full is no trouble
            lines.append(f"{resource.name} offers nothing: {resource.reason}")
    lines += [f"GPU {gpu.index}: {gpu.reason}" for gpu in plugin.gpus if gpu.reason]
    for allocation in plugin.allocations:
        if allocation.reason and allocation.state != "leaving":
            owner = (
                f"{allocation.namespace}/{allocation.pod}/{allocation.container}" if allocation.pod else allocation.key
            )
            lines.append(f"{owner}: {allocation.state}: {allocation.reason}")
    return lines


@click.command(epilog="Example: gpufrac gpus -o json")
@node_options
@failures
def gpus(config_path: str | None, run_root: str | None, output: str) -> None:
    """GPUs: health, compute mode, memory usable, granted and free, and why one takes nothing new."""
    node = look(config_path, run_root)
    node.need_any()
    accounts = {gpu.uuid: gpu for gpu in node.plugin.gpus} if node.plugin else {}
    states = {gpu.info.uuid: gpu for gpu in node.mpsd.gpus} if node.mpsd else {}
    if output == "json":
        print_json(
            [
                {"uuid": u, "account": accounts.get(u), "state": states.get(u)}
                for u in dict.fromkeys((*states, *accounts))
            ]
        )
        node.note_down()
        return
    rows = []
    for uuid in dict.fromkeys((*states, *accounts)):
        account, state = accounts.get(uuid), states.get(uuid)
        index = state.info.index if state else account.index if account else None
        reason = (state.not_shared or state.reason) if state else ""
        rows.append(
            (
                index,
                uuid,
                state.info.name if state else None,
                state.health if state else None,
                (account.mode if account else state.mode if state else None) or "idle",
                size(account.usable_bytes) if account else None,
                size(account.granted_bytes) if account else None,
                size(account.free_bytes) if account else None,
                account.allocations if account else None,
                reason or (account.reason if account else ""),
            )
        )
    columns = ("GPU", "UUID", "NAME", "HEALTH", "MODE", "USABLE", "GRANTED", "FREE", "ALLOCATIONS", "REASON")
    print_table(columns, rows, "No GPU is known" + (f": {node.mpsd.reason}" if node.mpsd and node.mpsd.reason else "."))
    node.note_down()


@click.command(epilog="Example: gpufrac resources")
@node_options
@failures
def resources(config_path: str | None, run_root: str | None, output: str) -> None:
    """Resources: registered or not, shares listed, held and still to be had, and why there are no more."""
    node = look(config_path, run_root)
    plugin = node.need_plugin()
    if output == "json":
        print_json(plugin.resources)
    else:
        rows = [
            (
                r.name,
                r.mode,
                r.enforcement,
                r.registration,
                r.listed,
                r.held,
                r.healthy,
                r.registration_error or r.reason,
            )
            for r in plugin.resources
        ]
        columns = ("RESOURCE", "MODE", "ENFORCEMENT", "KUBELET", "LISTED", "HELD", "HEALTHY", "REASON")
        print_table(columns, rows, "The config names no resource.")
    node.note_down()


@click.command(epilog="Example: gpufrac allocations -o json")
@node_options
@failures
def allocations(config_path: str | None, run_root: str | None, output: str) -> None:
    """Allocations: which container holds what on which GPU, and what of it is enforced."""
    node = look(config_path, run_root)
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
                a.state,
                a.reason,
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
            "STATE",
            "REASON",
        )
        print_table(columns, rows, "No allocation is live.")
        if any(a.enforcement == "cooperative" for a in plugin.allocations):
            click.echo(
                "cooperative: each process is held to the limit through MPS; several processes may exceed it together."
            )
    node.note_down()


@click.command(epilog="Example: gpufrac daemons")
@node_options
@failures
def daemons(config_path: str | None, run_root: str | None, output: str) -> None:
    """MPS control daemons: state and reason, default limit as read back, restarts, clients."""
    node = look(config_path, run_root)
    snapshot = node.need_mpsd()
    if output == "json":
        print_json(
            [
                {"uuid": g.info.uuid, "index": g.info.index, "daemon": g.daemon, "clients": g.clients}
                for g in snapshot.gpus
            ]
        )
    else:
        rows = [
            (
                gpu.info.index,
                gpu.daemon.state,
                gpu.daemon.pid,
                f"v{gpu.daemon.protocol}",
                size(gpu.daemon.pinned_limit_bytes),
                len(gpu.clients),
                gpu.daemon.restarts,
                _age(gpu.daemon.since_unix_s),
                gpu.daemon.pipe_directory,
                gpu.daemon.reason,
            )
            for gpu in snapshot.gpus
            if gpu.daemon is not None
        ]
        columns = ("GPU", "STATE", "PID", "MPS", "LIMIT", "CLIENTS", "RESTARTS", "SINCE", "PIPE DIRECTORY", "REASON")
        print_table(columns, rows, f"No MPS daemon runs{': ' + snapshot.reason if snapshot.reason else '.'}")
    node.note_down()


def _up(started_unix_s: float) -> str:
    return f"up {_age(started_unix_s)}" if started_unix_s else "up"


def _age(since_unix_s: float) -> str:
    if not since_unix_s:
        return "-"
    seconds = max(0, int(time.time() - since_unix_s))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"
