"""Who uses the GPUs, and which allocations a pod holds: for `gpufrac clients` and `gpufrac terminate` (pure)."""

from collections.abc import Iterable

import msgspec

from deviceplugin.broker import Inspection
from deviceplugin.presence import Holder
from mpsd.errors import ConfigError, GpufracError

RENAME = "camel"


class ClientStatus(msgspec.Struct, frozen=True, kw_only=True, rename=RENAME):
    """A process on a GPU. `mps`: through the MPS daemon. Names are empty where they are not known; `allocation_key` is
    None for a process that holds no allocation of ours."""

    pid: int
    command: str
    used_bytes: int | None
    mps: bool
    allocation_key: str | None
    resource: str
    namespace: str
    pod: str
    container: str


class GpuClientsStatus(msgspec.Struct, frozen=True, kw_only=True, rename=RENAME):
    """The processes on one GPU as mpsd showed them last."""

    uuid: str
    index: int
    group: str
    clients: tuple[ClientStatus, ...]


class Target(msgspec.Struct, frozen=True, kw_only=True, rename=RENAME):
    """A live allocation of a pod's container."""

    key: str
    resource: str
    namespace: str
    pod: str
    container: str
    gpus: tuple[str, ...]


def clients(inspection: Inspection) -> tuple[GpuClientsStatus, ...]:
    """All GPUs by index, each with its processes by PID."""
    resources = {allocation.key: allocation.resource for allocation in inspection.allocations}
    rows = []
    for gpu in inspection.gpus:
        found = []
        for client in sorted(gpu.clients, key=lambda client: client.pid):
            holder = _holder(inspection, client.allocation_key or "")
            found.append(
                ClientStatus(
                    pid=client.pid,
                    command=client.command,
                    used_bytes=client.used_bytes,
                    mps=client.mps,
                    allocation_key=client.allocation_key,
                    resource=resources.get(client.allocation_key or "", ""),
                    namespace=holder.namespace,
                    pod=holder.pod,
                    container=holder.container,
                )
            )
        group = gpu.group if gpu.group != gpu.info.uuid else ""
        rows.append(GpuClientsStatus(uuid=gpu.info.uuid, index=gpu.info.index, group=group, clients=tuple(found)))
    return tuple(rows)


def targets(inspection: Inspection, pod: str, container: str | None = None) -> tuple[Target, ...]:
    """The live allocations of a pod, or of one of its containers; never none.

    Args:
        pod: `namespace/name`, or the name alone where only one namespace has such a pod.

    Raises:
        ConfigError: pods of several namespaces have that name.
        GpufracError: no such pod or container holds a live allocation.
    """
    namespace, _, name = pod.rpartition("/")
    held = [target for target in _targets(inspection) if target.pod and name == target.pod]
    held = [target for target in held if not namespace or target.namespace == namespace]
    if not held:
        pods = sorted({f"{target.namespace}/{target.pod}" for target in _targets(inspection) if target.pod})
        raise GpufracError(
            f"cannot find a live allocation of pod {pod[:300]!r}: pods that hold one are {_some(pods) or 'none'}"
        )
    namespaces = sorted({target.namespace for target in held})
    if len(namespaces) > 1:
        raise ConfigError(
            f"cannot tell which pod {name!r} is meant: say one of {_some(f'{space}/{name}' for space in namespaces)}"
        )
    if container is None:
        return tuple(held)
    chosen = tuple(target for target in held if target.container == container)
    if not chosen:
        names = sorted({target.container for target in held})
        raise GpufracError(
            f"cannot find a live allocation of container {container[:300]!r} in pod {namespaces[0]}/{name}: "
            f"containers that hold one are {_some(names)}"
        )
    return chosen


def _targets(inspection: Inspection) -> list[Target]:
    found = []
    for allocation in inspection.allocations:
        holder = _holder(inspection, allocation.key)
        found.append(
            Target(
                key=allocation.key,
                resource=allocation.resource,
                namespace=holder.namespace,
                pod=holder.pod,
                container=holder.container,
                gpus=allocation.gpus,
            )
        )
    return found


def _holder(inspection: Inspection, key: str) -> Holder:
    holder = inspection.holders.get(key)
    return holder if isinstance(holder, Holder) else Holder()


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - 10} more" if len(listed) > 10 else ""
    return ", ".join(listed[:10]) + more
