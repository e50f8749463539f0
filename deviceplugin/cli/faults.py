"""How people are told which GPUs one MPS daemon owns, and who is hit together by a fault (pure)."""

from collections.abc import Iterable, Mapping, Sequence

from deviceplugin.cli.output import counted, some
from deviceplugin.status.model import AllocationStatus, GpuAccount, PluginStatus

ALONE = "alone"
DAEMON_OF_SEVERAL = (
    "The end of a daemon of several GPUs ends the sm-sharing containers on all of them; a fault hits those that "
    "`gpufrac allocations` names."
)


def numbers(gpus: Iterable[str], index: Mapping[str, int], joint: str = ", ") -> str:
    """GPUs by index; one that is gone by its UUID."""
    known = sorted(gpus, key=lambda uuid: (index.get(uuid, len(index)), uuid))
    return joint.join(str(index.get(uuid, uuid)) for uuid in known)


def domain_lines(plugin: PluginStatus) -> list[tuple[str, str]]:
    """The lines of `gpufrac status`: domains, where an MPS daemon owns several GPUs, and who is hit together, where
    something is allocated."""
    index = {gpu.uuid: gpu.index for gpu in plugin.gpus}
    domains = {gpu.domain: None for gpu in plugin.gpus if len(gpu.domain) > 1}
    each = [_domain(domain, plugin.one_domain, index) for domain in domains]
    if each and sum(map(len, domains)) < len(plugin.gpus):
        each.append("each other GPU has its own")
    faults = _faults(plugin.allocations, index)
    return [*([("domains", "; ".join(each))] if each else []), *([("faults", faults)] if faults else [])]


def _domain(domain: Sequence[str], joined: Sequence[str], index: Mapping[str, int]) -> str:
    if joined and set(joined) <= set(domain):
        return f"one fault domain: GPU {numbers(domain, index)} (`annotations.domains: node`)"
    return f"GPU {numbers(domain, index)} have one MPS daemon"


def _faults(allocations: Iterable[AllocationStatus], index: Mapping[str, int]) -> str:
    known = [allocation.fault_domain for allocation in allocations if allocation.fault_domain is not None]
    together = {domain.gpus: domain.containers for domain in known if domain.containers > 1}
    most_first = sorted(together.items(), key=lambda entry: -entry[1])
    hit = some(f"{counted(count, 'container')} on GPU {numbers(gpus, index)}" for gpus, count in most_first)
    alone = sum(1 for domain in known if domain.containers == 1)
    parts = ((f"hit together: {hit}", hit), (f"hit alone: {counted(alone, 'container')}", alone))
    return "; ".join(text for text, is_there in parts if is_there)


def hit_text(allocation: AllocationStatus, index: Mapping[str, int]) -> str | None:
    """Who is hit together with one allocation, in a table; None where an older plugin does not tell."""
    domain = allocation.fault_domain
    if domain is None:
        return None
    return ALONE if domain.containers == 1 else f"{domain.containers} on GPU {numbers(domain.gpus, index, ',')}"


def gpu_faults(gpu: GpuAccount) -> str:
    """Whom a fault on one GPU hits, empty where nothing is allocated there."""
    if gpu.hit_together > 1:
        return f"hit {gpu.hit_together} containers together"
    return "hit only the container whose they are" if gpu.hit_together else ""
