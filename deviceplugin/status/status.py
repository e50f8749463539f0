"""How what the plugin shows (model.py) is made from the broker's picture and what reconciling found (pure)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from deviceplugin.annotated.absence import STARTED_ALONE
from deviceplugin.annotated.reasons import ServingCode
from deviceplugin.annotated.status import AnnotatedStatus
from deviceplugin.grants.clients import claims, pids_text
from deviceplugin.grants.holders.model import Holder, Shares
from deviceplugin.grants.inspection import Inspection
from deviceplugin.kubernetes.model import KubernetesState
from deviceplugin.plan.allocation import Allocation
from deviceplugin.plan.annotated import shortfall
from deviceplugin.plan.enforcement import mps_level, not_hard
from deviceplugin.plan.faults import FaultDomain, fault_domains
from deviceplugin.plan.model import AnnotatedView, GpuView, GroupView, NodeView
from deviceplugin.plan.reasons import OfferCode, StartCode
from deviceplugin.plan.start import loosened
from deviceplugin.plan.view import FOR_ANNOTATED
from deviceplugin.reconcile.hardlimits import LimitState
from deviceplugin.reconcile.report import Report
from deviceplugin.status.model import AllocationStatus, GpuAccount, PluginStatus, ResourceStatus
from deviceplugin.status.overuse import over_limit, use_of
from mpsd.common.quantity import format_bytes
from mpsd.common.reason import Reason, code_of, joined, message_of
from mpsd.config.model import Enforcement
from mpsd.localapi.snapshot import GpuClient
from mpsd.shares.groups import Group, group_of

POD_GONE = Reason(StartCode.RELEASED, "its pod is gone; it is released after a short grace")
JUST_GRANTED = Reason(StartCode.FILE_NOT_WRITTEN, "just granted")
CANNOT_START = "its container can't (re)start now, one that runs goes on"
OVER_COMMITTED = Reason(OfferCode.OVER_COMMITTED, "over-committed: it takes nothing new until it fits")


class Registration(Protocol):
    """What status needs of a session."""

    @property
    def state(self) -> str: ...
    @property
    def trouble(self) -> Reason | None: ...


def allocation_statuses(inspection: Inspection, report: Report) -> tuple[AllocationStatus, ...]:
    """All live allocations, oldest first."""
    claimed_by = claims_of(inspection)
    faults = fault_domains(inspection.allocations)
    return tuple(
        allocation_status(a, inspection, report, faults[a.key], claimed_by.get(a.key, ""))
        for a in inspection.allocations
    )


def allocation_status(
    allocation: Allocation, inspection: Inspection, report: Report, faults: FaultDomain, claimed_by: str = ""
) -> AllocationStatus:
    """One allocation as the operator sees it."""
    pods = inspection.pods.get(allocation.key, {})
    holder = inspection.holders.get(allocation.key)
    if holder is None and allocation.key in inspection.vacated:
        holder = next(reversed(tuple(pods.values())), None)
    holder = holder or Holder()
    gpus = {status.info.uuid: status for status in inspection.node.gpus}
    use = use_of(allocation, gpus, inspection.pods) if not inspection.node.absence else None
    limits = report.limits.get(allocation.key, LimitState())
    unenforced, doubt = report.unenforced.get(allocation.key), report.doubts.get(allocation.key)
    enforcement, lowered = _level_now(allocation, limits, inspection)
    if allocation.key in inspection.vacated or allocation.key in report.release_blocked:
        state = "leaving"
        reason: Reason | None = report.release_blocked.get(allocation.key, POD_GONE)
    elif allocation.key in report.published:
        unenforced = unenforced or loosened(allocation, gpus) or (STARTED_ALONE if allocation.runs_unenforced else None)
        reason = unenforced or lowered or limits.unknown or limits.trouble or doubt
        state = "attached"
    else:
        state = "waiting"
        why = report.held_back.get(allocation.key) or inspection.node.waits_for(allocation) or report.spec_error
        reason = JUST_GRANTED if why is None else why.reworded(f"{CANNOT_START}: {why}")
        found = joined((limits.trouble or limits.unknown, unenforced, None if unenforced else doubt))
        reason = reason if found is None else reason.reworded(f"{found}; {reason}")
    level = Enforcement.NONE if unenforced else enforcement
    over, reduced = over_limit(use, allocation.limit_bytes, level), shortfall(allocation)
    return AllocationStatus(
        key=allocation.key,
        resource=allocation.resource,
        device_ids=allocation.device_ids,
        group=allocation.group,
        gpus=allocation.gpus,
        request_bytes=allocation.request_bytes,
        limit_bytes=allocation.limit_bytes,
        mode=allocation.mode,
        enforcement=level,
        thread_percent=allocation.thread_percent,
        namespace=holder.namespace,
        pod=holder.pod,
        container=holder.container,
        pod_uids=tuple(pods),
        claimed_by=claimed_by,
        state=state,
        reason=message_of(reason),
        reason_code=code_of(reason),
        created_unix_s=allocation.created_unix_s,
        adopted=allocation.adopted,
        granted_enforcement=allocation.enforcement,
        used_bytes=use.used_bytes if limits.used_bytes is None and use and use.complete else limits.used_bytes,
        reduced=reduced,
        reduced_code=ServingCode.LESS_THAN_ASKED if reduced else "",
        over_limit=message_of(over),
        over_limit_code=code_of(over),
        burst=burst(allocation, limits.used_bytes, in_force=enforcement is Enforcement.HARD),
        fault_domain=faults,
    )


def _level_now(allocation: Allocation, limits: LimitState, inspection: Inspection) -> tuple[Enforcement, Reason | None]:
    """The level that holds now, and why it is below the one granted."""
    if allocation.enforcement is not Enforcement.HARD:
        return allocation.enforcement, None
    lesser = mps_level(allocation.mode)
    if inspection.node.hard.known and (missing := inspection.node.hard.limits.missing):
        text = f"it was granted hard, and is {lesser} on this node by now: {'; '.join(missing)}"
        return lesser, Reason(StartCode.HARD_LOST, text)
    return (lesser, limits.trouble) if limits.trouble else (Enforcement.HARD, None)


def burst(allocation: Allocation, used_bytes: int | None, *, in_force: bool = True) -> str:
    """What an allocation borrows or may borrow beyond its request, empty where it may not (pure). Who is above its
    request is who can be evicted (MPS memory partitioning); in which order is not documented.

    Args:
        in_force: its limits are: without them nobody is evicted.
    """
    if not allocation.may_borrow:
        return ""
    beyond_bytes = (used_bytes or 0) - allocation.request_bytes
    if not in_force:
        if beyond_bytes <= 0:
            return ""
        return (
            f"has {format_bytes(beyond_bytes)} beyond its request and no limits in force: it can't be evicted, and "
            "others may not get what was guaranteed to them"
        )
    if beyond_bytes > 0:
        return (
            f"borrows {format_bytes(beyond_bytes)}: its processes are evicted when others need what was guaranteed "
            "to them"
        )
    return f"may borrow {format_bytes(allocation.limit_bytes - allocation.request_bytes)} while it is free"


def resource_statuses(
    inspection: Inspection, sessions: Mapping[str, Registration], stale: Iterable[Shares] = ()
) -> tuple[ResourceStatus, ...]:
    """All resources in their configured order. `stale`: shares that the kubelet holds for pods that are gone."""
    held: dict[str, set[str]] = {}
    for allocation in inspection.allocations:
        held.setdefault(allocation.resource, set()).update(allocation.device_ids)
    waiting: dict[str, set[str]] = {}
    for name, device_ids in stale:
        waiting.setdefault(name, set()).update(device_ids)
    rows = []
    why = not_hard(inspection.node.config.cdi.delivery, inspection.node.hard)
    for name, view in inspection.view.resources.items():
        published = inspection.lists.get(name)
        advertisement = published.advertisement if published else None
        session = sessions.get(name)
        trouble = session.trouble if session else None
        taken = held.get(name, set())
        devices = advertisement.devices if advertisement else ()
        reason = advertisement.reason if advertisement else view.closed
        reasons = advertisement.group_reasons if advertisement else ()
        not_hard_here = None if view.enforcement is Enforcement.HARD else why
        late = waiting.get(name, set()) - taken
        rows.append(
            ResourceStatus(
                name=name,
                mode=view.resource.mode,
                enforcement=Enforcement.NONE if view.unheld else view.enforcement,
                minimum=view.resource.enforcement,
                registration=session.state if session else "starting",
                registration_error=message_of(trouble),
                registration_error_code=code_of(trouble),
                listed=len(advertisement.devices) if advertisement else 0,
                healthy=advertisement.healthy if advertisement else 0,
                held=len(taken),
                free=sum(d.healthy and d.id not in taken and d.id not in late for d in devices),
                waiting=sum(d.id in late for d in devices),
                reason=message_of(reason),
                reason_code=code_of(reason),
                reasons={group: of_group.message for group, of_group in reasons},
                reason_codes={group: of_group.code for group, of_group in reasons},
                not_hard=message_of(not_hard_here),
                not_hard_code=code_of(not_hard_here),
            )
        )
    return tuple(rows)


def gpu_accounts(inspection: Inspection) -> tuple[GpuAccount, ...]:
    """All GPUs by index."""
    groups = inspection.view.groups
    waiting, listed = (group_of(v.group for v in groups.values() if bool(v.unlisted) is late) for late in (True, False))
    owners = waiting | listed
    statuses = {status.info.uuid: status for status in inspection.node.gpus}
    domains: dict[str, list[str]] = {}
    for status in inspection.node.gpus:
        domains.setdefault(status.group or status.info.uuid, []).append(status.info.uuid)
    hit: dict[str, int] = {}
    faults = fault_domains(inspection.allocations)
    for allocation in inspection.allocations:
        for uuid in allocation.gpus:
            hit[uuid] = max(hit.get(uuid, 0), faults[allocation.key].containers)
    rows = []
    for gpu in inspection.view.gpus.values():
        held = inspection.held[gpu.uuid]
        granted = held.granted_bytes
        over = OVER_COMMITTED if granted > gpu.usable_bytes else None
        owner = owners.get(gpu.uuid)
        wholes = _wholes(gpu, owner, groups)
        closed = [_takes_nothing(whole) for whole in wholes]
        drain = inspection.drained.get(gpu.uuid)
        reason = _takes_nothing(gpu) or over or (closed[0] if all(closed) else None)
        kept = _kept(gpu, wholes[0], inspection.view)
        rows.append(
            GpuAccount(
                uuid=gpu.uuid,
                index=gpu.index,
                group=owner.name if owner is not None and owner.declared else "",
                drained=drain.text if drain is not None else "",
                usable_bytes=gpu.usable_bytes,
                granted_bytes=granted,
                free_bytes=gpu.usable_bytes - granted,
                allocations=held.allocations,
                mode=held.mode,
                reason=message_of(reason),
                reason_code=code_of(reason),
                limit_bytes=held.limit_bytes,
                serves=_serves(gpu, inspection.view.annotated),
                kept=message_of(kept),
                kept_code=code_of(kept),
                shared=not statuses[gpu.uuid].not_shared,
                excluded=statuses[gpu.uuid].excluded,
                domain=tuple(domains[statuses[gpu.uuid].group or gpu.uuid]),
                hit_together=hit.get(gpu.uuid, 0),
            )
        )
    return tuple(rows)


def _wholes(gpu: GpuView, owner: Group | None, groups: Mapping[str, GroupView]) -> Sequence[GpuView | GroupView]:
    """What new shares of a GPU may lie on: itself, its group, or either where that shares its GPUs."""
    if owner is None:
        return (gpu,)
    if not owner.shared:
        return (groups[owner.name],)
    return (groups.get(gpu.uuid, gpu), groups[owner.name])


def _serves(gpu: GpuView, annotated: AnnotatedView | None) -> str:
    if annotated is None or not gpu.for_annotated:
        return "resources"
    return "both" if annotated.share else "annotated pods"


def _kept(gpu: GpuView, whole: GpuView | GroupView, node: NodeView) -> Reason | None:
    """Why resources, where there are some, take nothing on a GPU that annotated pods may have parts of."""
    if not node.resources or node.annotated is None:
        return None
    set_aside = gpu.for_annotated and not node.annotated.share
    return gpu.reserved or whole.reserved or (FOR_ANNOTATED if set_aside else None)


def claims_of(inspection: Inspection) -> dict[str, str]:
    """Allocations that processes of other pods name as theirs: key -> whose processes."""
    pods = {key: tuple(held_by) for key, held_by in inspection.pods.items()}
    names = {
        uid: f"{holder.namespace}/{holder.pod}"
        for held_by in inspection.pods.values()
        for uid, holder in held_by.items()
        if holder.pod
    }
    found: dict[str, dict[str, list[GpuClient]]] = {}
    for gpu in inspection.node.gpus:
        for client in gpu.clients:
            if claims(client, pods):
                found.setdefault(client.allocation_key or "", {}).setdefault(client.pod_uid, []).append(client)
    return {
        key: ", ".join(f"pid {pids_text(found)} of pod {names.get(uid, uid)}" for uid, found in by_pod.items())
        for key, by_pod in found.items()
    }


def _takes_nothing(view: GpuView | GroupView) -> Reason | None:
    return view.lost or view.blocked or view.waiting or view.daemon_waiting


def plugin_status(
    inspection: Inspection,
    report: Report,
    sessions: Mapping[str, Registration],
    *,
    pid: int,
    started_unix_s: float,
    config_error: Reason | None,
    config_restart_needed: str,
    gpu_devices_reason: Reason | None,
    problems: Sequence[Reason],
    state_root: str = "",
    runtime: str = "",
    annotated: AnnotatedStatus | None = None,
    kubernetes: KubernetesState | None = None,
    metrics: Reason | None = None,
    refusals: Mapping[str, dict[str, int]] | None = None,
) -> PluginStatus:
    """Everything `gpufrac status` asks of the plugin, from one consistent picture."""
    why = not_hard(inspection.node.config.cdi.delivery, inspection.node.hard)
    gpus = inspection.view.gpus
    return PluginStatus(
        pid=pid,
        started_unix_s=started_unix_s,
        mpsd_error=message_of(inspection.node.absence),
        mpsd_error_code=code_of(inspection.node.absence),
        mpsd_instance=inspection.node.instance,
        mpsd_generation=inspection.node.generation,
        lists_are_new=inspection.lists_are_new,
        kubelet_error=message_of(report.kubelet_error),
        kubelet_error_code=code_of(report.kubelet_error),
        checkpoint_error=message_of(report.checkpoint_error),
        checkpoint_error_code=code_of(report.checkpoint_error),
        cdi_error=message_of(report.spec_error),
        cdi_error_code=code_of(report.spec_error),
        cdi_objections=tuple(objection.message for objection in report.spec_objections),
        cdi_objection_codes=tuple(objection.code for objection in report.spec_objections),
        config_error=message_of(config_error),
        config_error_code=code_of(config_error),
        config_restart_needed=config_restart_needed,
        gpu_devices=f"cdi ({inspection.node.hard.kind})" if inspection.node.hard.kind else "envvar",
        gpu_devices_reason=message_of(gpu_devices_reason),
        gpu_devices_reason_code=code_of(gpu_devices_reason),
        problems=tuple(problem.message for problem in problems),
        problem_codes=tuple(problem.code for problem in problems),
        gpus=gpu_accounts(inspection),
        gone_drained={uuid: drain.text for uuid, drain in inspection.drained.items() if uuid not in gpus},
        resources=resource_statuses(inspection, sessions, report.stale),
        allocations=allocation_statuses(inspection, report),
        hard_limits=f"no: {why}"
        if why
        else f"yes ({inspection.node.hard.limits.backend}, set by {inspection.node.hard.kind or 'the nvidia runtime'})",
        hard_limits_code=code_of(why),
        limit_drifts=report.limit_drifts,
        state_root=state_root,
        runtime=runtime,
        annotated=annotated,
        kubernetes=kubernetes,
        one_domain=inspection.view.together,
        metrics=metrics,
        refusals=dict(refusals or {}),
    )
