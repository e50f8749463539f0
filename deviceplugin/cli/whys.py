"""Why an allocation is as it is and a GPU takes what it takes, from the plugin's status (pure)."""

from collections.abc import Mapping, Sequence

from deviceplugin.cli.faults import gpu_faults, hit_text, numbers
from deviceplugin.cli.output import age, counted, size
from deviceplugin.status.model import AllocationStatus, GpuAccount, PluginStatus


def named_pod(text: str, allocations: Sequence[AllocationStatus]) -> list[AllocationStatus]:
    """The allocations that `[NAMESPACE/]POD[/CONTAINER]` means, read each way it can be."""
    parts = text.split("/")
    return [
        allocation
        for allocation in allocations
        if parts
        in (
            [allocation.pod],
            [allocation.namespace, allocation.pod],
            [allocation.pod, allocation.container],
            [allocation.namespace, allocation.pod, allocation.container],
        )
    ]


def name_of(allocation: AllocationStatus) -> str:
    """The container's name; the resource where the pod is not known yet."""
    if not allocation.pod:
        return f"a share of {allocation.resource} whose pod is not known"
    return f"{allocation.namespace}/{allocation.pod}/{allocation.container}"


def pod_lines(allocation: AllocationStatus, plugin: PluginStatus) -> list[str]:
    """Where it is, what it may use, who is there too, and what it waits for."""
    index = {gpu.uuid: gpu.index for gpu in plugin.gpus}
    others = [
        name_of(other)
        for other in plugin.allocations
        if other.key != allocation.key and set(other.gpus) & set(allocation.gpus)
    ]
    used = f", uses {size(allocation.used_bytes)}" if allocation.used_bytes is not None else ""
    memory = f"request {size(allocation.request_bytes)}, limit {size(allocation.limit_bytes)}{used}"
    found = [
        ("on", f"GPU {numbers(allocation.gpus, index)}, granted {age(allocation.created_unix_s)} ago"),
        ("may use", f"{memory} on each GPU, {allocation.mode}, enforcement {allocation.enforcement}"),
        ("shares with", ", ".join(others) or "nobody"),
        ("hit by a fault", hit_text(allocation, index) or "not told"),
        ("state", allocation.state),
        ("why", _with_code(allocation.reason, allocation.reason_code)),
        ("has less", _with_code(allocation.reduced, allocation.reduced_code)),
        ("over its limit", _with_code(allocation.over_limit, allocation.over_limit_code)),
    ]
    return [name_of(allocation), *_listed(found)]


def gpu_lines(gpu: GpuAccount, plugin: PluginStatus) -> list[str]:
    """What is on it, its mode and domain, what it takes, and why not more."""
    index: Mapping[str, int] = {each.uuid: each.index for each in plugin.gpus}
    on = [name_of(allocation) for allocation in plugin.allocations if gpu.uuid in allocation.gpus]
    memory = f"{size(gpu.free_bytes)} free of {size(gpu.usable_bytes)}, {size(gpu.granted_bytes)} granted"
    found = [
        ("mode", gpu.mode or "idle"),
        ("memory", memory),
        ("on it", f"{counted(len(on), 'container')}: {', '.join(on)}" if on else "nothing"),
        ("domain", f"GPU {numbers(gpu.domain, index)}" if gpu.domain else ""),
        ("faults there", gpu_faults(gpu)),
        ("serves", gpu.serves),
        ("drained", gpu.drained),
        ("takes nothing new", _with_code(gpu.reason, gpu.reason_code)),
        ("kept", _with_code(gpu.kept, gpu.kept_code)),
        *((f"no {r.name}", why) for r in plugin.resources if (why := _offer(r.reasons, r.reason_codes, gpu))),
    ]
    return [f"GPU {gpu.index} ({gpu.uuid})", *_listed(found)]


def _offer(reasons: Mapping[str, str], codes: Mapping[str, str], gpu: GpuAccount) -> str:
    of = gpu.uuid if gpu.uuid in reasons else gpu.group
    return _with_code(reasons.get(of, ""), codes.get(of, ""))


def _with_code(message: str, code: str) -> str:
    return f"{message} ({code})" if message and code else message


def _listed(found: Sequence[tuple[str, str]]) -> list[str]:
    return [f"  {name + ':':20} {text}" for name, text in found if text]
