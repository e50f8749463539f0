"""What an operator should look at, from what both processes say (pure). One cause is one line, however many it hits."""

from collections.abc import Iterable

from deviceplugin.annotated.status import AnnotatedStatus
from deviceplugin.grants.clients import is_foreign, pids_text
from deviceplugin.grants.holders.model import Pods
from deviceplugin.plan.model import ANNOTATED
from deviceplugin.plan.reasons import OfferCode
from deviceplugin.plan.view import daemon_text
from deviceplugin.status.model import AllocationStatus, PluginStatus
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, Snapshot

ABANDONED = (
    "described by annotations, and the config has no `annotations` any more: it gets nothing when it is made again: "
    "put the section back, or delete the pod"
)
REFUSED = "refused the new config file and would not start with it; the one before it stays in force"
SHOWN = 3
"""How many of those that one cause hits are named."""


def attention(snapshot: Snapshot | None, plugin: PluginStatus | None, errors: Iterable[str] = ()) -> list[str]:
    """All lines, most serious first.

    Args:
        errors: why a process does not answer.
    """
    lines = [*filter(None, errors), *_of_config(snapshot, plugin)]
    if snapshot is not None:
        lines += _of_mpsd(snapshot, {a.key: a.pod_uids for a in plugin.allocations} if plugin is not None else {})
    if plugin is not None:
        lines += _of_plugin(plugin, snapshot)
    return list(dict.fromkeys(lines))


def _of_config(snapshot: Snapshot | None, plugin: PluginStatus | None) -> list[str]:
    """What of the config file is not in force: both processes read it by themselves."""
    both = [(name, process) for name, process in (("mpsd", snapshot), ("the plugin", plugin)) if process is not None]
    refused = _together(
        ((name, "; ".join(process.config_error.splitlines())) for name, process in both if process.config_error),
        f" {REFUSED}: ",
    )
    usable = [(name, process) for name, process in both if not process.config_error]
    restart = ((name, p.config_restart_needed) for name, p in usable if p.config_restart_needed)
    return refused + [f"config: restart {name} to put in force: {rest}" for name, rest in restart]


def _of_mpsd(snapshot: Snapshot, pods: Pods) -> list[str]:
    lines = [snapshot.reason] if snapshot.reason else []
    sick, daemons, foreign = [], [], []
    for gpu in snapshot.gpus:
        name = f"GPU {gpu.info.index}"
        if gpu.health != "ok":
            sick.append((f"{name} ({gpu.info.uuid})", f"is {gpu.health}: {gpu.reason}"))
        daemon = gpu.daemon
        if daemon is not None and _in_trouble(daemon):
            owner = f"group {daemon.name}" if daemon.name not in ("", gpu.info.uuid) else name
            daemons.append((owner, daemon_text(daemon)))
        if alien := [client for client in gpu.clients if client.allocation_key is None and is_foreign(client, pods)]:
            foreign.append((name, f"processes without an allocation use it: pid {pids_text(alien)}"))
    lines += _together(sick, " ") + _together(daemons) + _together(foreign)
    return lines + list(snapshot.warnings)


def _in_trouble(daemon: DaemonStatus) -> bool:
    """One that was ended for good, as by `gpufrac mpsd cleanup`, is in none."""
    ended = daemon.state is DaemonState.ABSENT and not daemon.reason
    return daemon.wedged or (daemon.state is not DaemonState.READY and not ended)


def _of_plugin(plugin: PluginStatus, snapshot: Snapshot | None) -> list[str]:
    lines = [plugin.mpsd_error] if plugin.mpsd_error and snapshot is not None else []
    lines += [error for error in (plugin.kubelet_error, plugin.checkpoint_error, plugin.cdi_error) if error]
    lines += plugin.cdi_objections
    if plugin.kubernetes is not None and plugin.kubernetes.error:
        lines.append(f"Kubernetes API: {plugin.kubernetes.error}")
    if plugin.metrics is not None:
        lines.append(plugin.metrics.message)
    if plugin.annotated is not None:
        lines += _of_annotated(plugin.annotated)
    else:
        left = (_owner(a) for a in plugin.allocations if a.resource == ANNOTATED and a.state != "leaving")
        lines += _together((who, ABANDONED) for who in left)
    lines += plugin.problems
    unregistered, closed = [], []
    for resource in plugin.resources:
        if resource.registration != "registered":
            why = resource.registration_error or resource.registration
            unregistered.append((resource.name, f"is not registered: {why}"))
        if resource.listed == 0 and resource.reason:  # closed as a whole; that GPUs are full is no trouble
            closed.append((resource.name, f"offers nothing: {resource.reason}"))
    lines += _together(unregistered, " ") + _together(closed, " ")
    told = {g.info.uuid for g in snapshot.gpus if g.daemon and _in_trouble(g.daemon)} if snapshot else set()
    of_node = {"", plugin.mpsd_error, *plugin.problems}
    lines += _together(
        (f"GPU {gpu.index}", gpu.reason)
        for gpu in plugin.gpus
        if gpu.reason not in of_node
        and not gpu.excluded
        and not (gpu.uuid in told and gpu.reason_code == OfferCode.DAEMON_NOT_READY)
    )
    lines += [
        f"GPU {uuid}, which is no longer on the node: {text}; if it is not to come back: gpufrac undrain {uuid}"
        for uuid, text in plugin.gone_drained.items()
    ]
    # Told with what becomes of them.
    alone = {(u.namespace, u.pod, u.container) for u in plugin.annotated.unenforced} if plugin.annotated else set()
    hit = [
        (_owner(allocation), f"{allocation.state}: {allocation.reason}")
        for allocation in plugin.allocations
        if allocation.reason and allocation.state != "leaving" and _container(allocation) not in alone
    ]
    claimed = [a for a in plugin.allocations if a.claimed_by]
    hit += [(_owner(a), a.over_limit) for a in plugin.allocations if a.over_limit]
    return lines + _together(hit) + [f"{a.claimed_by} claims the allocation of {_owner(a, 'pod ')}" for a in claimed]


def _of_annotated(annotated: AnnotatedStatus) -> list[str]:
    """Of annotated pods. One that was refused is tried again, so it may be over by itself."""
    lines = [] if annotated.runtime else [f"annotated pods are not served: no container runtime: {annotated.error}"]
    unenforced = [
        (f"{u.namespace}/{u.pod}/{u.container}", ": ".join(filter(None, (u.reason, u.plan))))
        for u in annotated.unenforced
    ]
    refused = [(f"{r.namespace}/{r.pod}/{r.container}", f"is refused: {r.reason}") for r in annotated.refusing]
    ignored = [(f"pod {i.pod}", i.reason) for i in annotated.ignored]
    if annotated.uncompared:
        lines.append(
            "annotated containers of which the container runtime told nothing can't be found: "
            f"{annotated.uncompared}: look at `annotations.criSocket`"
        )
    return lines + _together(unenforced) + _together(refused, " ") + _together(ignored)


def _container(allocation: AllocationStatus) -> tuple[str, str, str]:
    return allocation.namespace, allocation.pod, allocation.container


def _owner(allocation: AllocationStatus, kind: str = "") -> str:
    return f"{kind}{'/'.join(_container(allocation))}" if allocation.pod else allocation.key


def _together(hit: Iterable[tuple[str, str]], joint: str = ": ") -> list[str]:
    """(who, what) pairs as lines: those with the same what share one."""
    by_what: dict[str, dict[str, None]] = {}
    for who, what in hit:
        by_what.setdefault(what, {})[who] = None
    lines = []
    for what, everyone in by_what.items():
        named = list(everyone)
        more = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
        lines.append(f"{', '.join(named[:SHOWN])}{more}{joint}{what}")
    return lines
