"""What an operator should look at, from what both processes say (pure). One cause is one line, however many it hits."""

from collections.abc import Iterable, Sequence

from deviceplugin.annotated.status import AnnotatedStatus
from deviceplugin.grants.clients import is_foreign, pids_text
from deviceplugin.grants.holders.model import Pods
from deviceplugin.kubelet.reasons import KubeletCode
from deviceplugin.plan.allocation import ANNOTATED
from deviceplugin.plan.reasons import OfferCode
from deviceplugin.plan.view import daemon_text, domain_text
from deviceplugin.status.model import AllocationStatus, PluginStatus, ResourceStatus
from deviceplugin.status.reasons import AttentionCode
from mpsd.common.reason import OlderCode, Reason, reason_of, reasons_of
from mpsd.localapi.reasons import ConfigCode
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, Snapshot

ABANDONED = Reason(
    AttentionCode.ANNOTATIONS_DROPPED,
    "described by annotations, and the config has no `annotations` any more: it gets nothing when it is made again: "
    "put the section back, or delete the pod",
)
REFUSED = "refused the new config file and would not start with it; the one before it stays in force"
SHOWN = 3
"""How many of those that one cause hits are named."""


def attention(
    snapshot: Snapshot | None, plugin: PluginStatus | None, errors: Iterable[Reason | None] = ()
) -> list[Reason]:
    """All lines, most serious first, each with the code of its cause or an `AttentionCode`.

    Args:
        errors: why a process does not answer.
    """
    found = [error for error in errors if error is not None] + _of_config(snapshot, plugin)
    if snapshot is not None:
        found += _of_mpsd(snapshot, {a.key: a.pod_uids for a in plugin.allocations} if plugin is not None else {})
    if plugin is not None:
        found += _of_plugin(plugin, snapshot)
    once: dict[str, Reason] = {}
    for reason in found:
        once.setdefault(reason.message, reason)
    return list(once.values())


def _of_config(snapshot: Snapshot | None, plugin: PluginStatus | None) -> list[Reason]:
    """What of the config file is not in force: both processes read it by themselves."""
    both = [(name, process) for name, process in (("mpsd", snapshot), ("the plugin", plugin)) if process is not None]
    refused = _together(
        (
            (name, Reason(ConfigCode.REFUSED, "; ".join(process.config_error.splitlines())))
            for name, process in both
            if process.config_error
        ),
        f" {REFUSED}: ",
    )
    usable = [(name, process) for name, process in both if not process.config_error]
    restart = ((name, p.config_restart_needed) for name, p in usable if p.config_restart_needed)
    return refused + [
        Reason(AttentionCode.CONFIG_NEEDS_RESTART, f"config: restart {name} to put in force: {rest}")
        for name, rest in restart
    ]


def _of_mpsd(snapshot: Snapshot, pods: Pods) -> list[Reason]:
    found = [snapshot.why] if snapshot.why is not None else []
    sick, daemons, foreign = [], [], []
    for gpu in snapshot.gpus:
        name = f"GPU {gpu.info.index}"
        if gpu.health != "ok":
            code = gpu.why.code if gpu.why is not None else OfferCode.GPU_NOT_WELL
            sick.append((f"{name} ({gpu.info.uuid})", Reason(code, f"is {gpu.health}: {gpu.reason}")))
        daemon = gpu.daemon
        if daemon is not None and _in_trouble(daemon):
            owner = domain_text(gpu.group, snapshot.gpus)
            code = daemon.why.code if daemon.why is not None else OfferCode.DAEMON_NOT_READY
            daemons.append((owner, Reason(code, daemon_text(daemon))))
        if alien := [client for client in gpu.clients if client.allocation_key is None and is_foreign(client, pods)]:
            text = f"processes without an allocation use it: pid {pids_text(alien)}"
            foreign.append((name, Reason(OfferCode.FOREIGN_PROCESSES, text)))
    found += _together(sick, " ") + _together(daemons) + _together(foreign)
    return found + list(snapshot.shortfalls)


def _in_trouble(daemon: DaemonStatus) -> bool:
    """One that was ended for good, as by `gpufrac mpsd cleanup`, is in none."""
    ended = daemon.state is DaemonState.ABSENT and not daemon.reason
    return daemon.wedged or (daemon.state is not DaemonState.READY and not ended)


def _of_plugin(plugin: PluginStatus, snapshot: Snapshot | None) -> list[Reason]:
    found = _of_its_place(plugin, mpsd_told=snapshot is None)
    found += _of_resources(plugin.resources)
    told = {g.info.uuid for g in snapshot.gpus if g.daemon and _in_trouble(g.daemon)} if snapshot else set()
    of_node = {plugin.mpsd_error, *plugin.problems}
    found += _together(
        (f"GPU {gpu.index}", gpu.why)
        for gpu in plugin.gpus
        if gpu.why is not None
        and gpu.reason not in of_node
        and not gpu.excluded
        and not (gpu.uuid in told and gpu.reason_code == OfferCode.DAEMON_NOT_READY)
    )
    found += [
        Reason(
            AttentionCode.DRAINED_GPU_GONE,
            f"GPU {uuid}, which is no longer on the node: {text}; if it is not to come back: gpufrac undrain {uuid}",
        )
        for uuid, text in plugin.gone_drained.items()
    ]
    return found + _of_allocations(plugin)


def _of_its_place(plugin: PluginStatus, *, mpsd_told: bool) -> list[Reason]:
    """What is wrong around the plugin. `mpsd_told`: that mpsd is away is among the errors already."""
    alone = [
        None if mpsd_told else reason_of(plugin.mpsd_error, plugin.mpsd_error_code),
        reason_of(plugin.kubelet_error, plugin.kubelet_error_code),
        reason_of(plugin.checkpoint_error, plugin.checkpoint_error_code),
        reason_of(plugin.cdi_error, plugin.cdi_error_code),
        *reasons_of(plugin.cdi_objections, plugin.cdi_objection_codes),
    ]
    if plugin.kubernetes is not None and plugin.kubernetes.error:
        code = plugin.kubernetes.error_code or OlderCode.UNKNOWN
        alone.append(Reason(code, f"Kubernetes API: {plugin.kubernetes.error}"))
    alone.append(plugin.metrics)
    found = [reason for reason in alone if reason is not None]
    if plugin.annotated is not None:
        found += _of_annotated(plugin.annotated)
    else:
        left = (_owner(a) for a in plugin.allocations if a.resource == ANNOTATED and a.state != "leaving")
        found += _together((who, ABANDONED) for who in left)
    return found + list(reasons_of(plugin.problems, plugin.problem_codes))


def unregistered(resources: Iterable[ResourceStatus]) -> list[Reason]:
    """What the kubelet does not know."""
    found = []
    for resource in resources:
        if resource.registration != "registered":
            why = reason_of(resource.registration_error, resource.registration_error_code)
            why = why or Reason(KubeletCode.NOT_REGISTERED, resource.registration)
            found.append((resource.name, why.reworded(f"is not registered: {why}")))
    return _together(found, " ")


def _of_resources(resources: Sequence[ResourceStatus]) -> list[Reason]:
    closed = [
        (resource.name, resource.why.reworded(f"offers nothing: {resource.reason}"))
        for resource in resources
        if resource.listed == 0 and resource.why is not None  # closed as a whole; that GPUs are full is no trouble
    ]
    return unregistered(resources) + _together(closed, " ")


def _of_allocations(plugin: PluginStatus) -> list[Reason]:
    # Told with what becomes of them.
    alone = {(u.namespace, u.pod, u.container) for u in plugin.annotated.unenforced} if plugin.annotated else set()
    hit = [
        (_owner(allocation), why.reworded(f"{allocation.state}: {why}"))
        for allocation in plugin.allocations
        if (why := reason_of(allocation.reason, allocation.reason_code)) is not None
        and allocation.state != "leaving"
        and _container(allocation) not in alone
    ]
    over = ((a, reason_of(a.over_limit, a.over_limit_code)) for a in plugin.allocations)
    hit += [(_owner(allocation), why) for allocation, why in over if why is not None]
    claimed = [a for a in plugin.allocations if a.claimed_by]
    return _together(hit) + [
        Reason(AttentionCode.CLAIMED_BY_OTHERS, f"{a.claimed_by} claims the allocation of {_owner(a, 'pod ')}")
        for a in claimed
    ]


def _of_annotated(annotated: AnnotatedStatus) -> list[Reason]:
    """Of annotated pods. One that was refused is tried again, so it may be over by itself."""
    found = []
    if not annotated.runtime:
        text = f"annotated pods are not served: no container runtime: {annotated.error}"
        found.append(Reason(annotated.error_code or OlderCode.UNKNOWN, text))
    if annotated.uncompared:
        text = (
            "annotated containers of which the container runtime told nothing can't be found: "
            f"{annotated.uncompared}: look at `annotations.criSocket`"
        )
        found.append(Reason(annotated.uncompared_code or OlderCode.UNKNOWN, text))
    unenforced = [
        (f"{u.namespace}/{u.pod}/{u.container}", why.reworded(": ".join(filter(None, (u.reason, u.plan)))))
        for u in annotated.unenforced
        if (why := reason_of(u.reason, u.reason_code)) is not None
    ]
    refused = [
        (f"{r.namespace}/{r.pod}/{r.container}", why.reworded(f"is refused: {why}"))
        for r in annotated.refusing
        if (why := reason_of(r.reason, r.reason_code)) is not None
    ]
    ignored = [
        (f"pod {i.pod}", why) for i in annotated.ignored if (why := reason_of(i.reason, i.reason_code)) is not None
    ]
    return found + _together(unenforced) + _together(refused, " ") + _together(ignored)


def _container(allocation: AllocationStatus) -> tuple[str, str, str]:
    return allocation.namespace, allocation.pod, allocation.container


def _owner(allocation: AllocationStatus, kind: str = "") -> str:
    return f"{kind}{'/'.join(_container(allocation))}" if allocation.pod else allocation.key


def _together(hit: Iterable[tuple[str, Reason]], joint: str = ": ") -> list[Reason]:
    """(who, what) pairs as lines: those with the same what share one."""
    by_what: dict[Reason, dict[str, None]] = {}
    for who, what in hit:
        by_what.setdefault(what, {})[who] = None
    lines = []
    for what, everyone in by_what.items():
        named = list(everyone)
        more = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
        lines.append(what.reworded(f"{', '.join(named[:SHOWN])}{more}{joint}{what}"))
    return lines
