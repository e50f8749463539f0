"""Who uses the GPUs, and which allocations a pod holds: for `gpufrac clients` and `gpufrac terminate` (pure)."""

from collections.abc import Iterable, Mapping

import msgspec

from deviceplugin.grants.clients import is_foreign, is_of
from deviceplugin.status.model import AllocationStatus
from mpsd.common.errors import ConfigError, GpufracError
from mpsd.common.reason import Reason, code_of, message_of
from mpsd.localapi.snapshot import GpuClient, GpuClients, GpuStatus
from mpsd.shares.groups import declared_name

RENAME = "camel"


class ClientStatus(msgspec.Struct, frozen=True, kw_only=True, rename=RENAME):
    """A process on a GPU. `mps`: through the MPS daemon. `allocation_key` is what its environment says, None for
    nothing. `foreign`: it holds no allocation of ours. Names are those of its real pod, empty where they are not known;
    `resource` and `container` are empty where it claims no allocation of that pod."""

    pid: int
    command: str
    used_bytes: int | None
    mps: bool
    allocation_key: str | None
    foreign: bool
    resource: str
    namespace: str
    pod: str
    container: str
    pod_uid: str = msgspec.field(name="podUID")


class GpuClientsStatus(msgspec.Struct, frozen=True, kw_only=True, rename=RENAME):
    """The processes on one GPU as mpsd showed them last. `outdated`: why these may not be those of now, empty when they
    are; `known_unix_s`: when they were then, None where that is not known."""

    uuid: str
    index: int
    group: str
    clients: tuple[ClientStatus, ...]
    outdated: str = ""
    outdated_code: str = ""
    known_unix_s: float | None = None


class Target(msgspec.Struct, frozen=True, kw_only=True, rename=RENAME):
    """A live allocation of a pod's container. `pod_uids`: the pods seen to hold it, the newest last."""

    key: str
    resource: str
    namespace: str
    pod: str
    container: str
    gpus: tuple[str, ...]
    pod_uids: tuple[str, ...] = msgspec.field(name="podUIDs")


def clients(
    gpus: Iterable[GpuStatus],
    allocations: Iterable[AllocationStatus],
    looked_up: Mapping[str, GpuClients] | None = None,
    *,
    outdated: Reason | None = None,
    known_unix_s: float | None = None,
) -> list[GpuClientsStatus]:
    """All GPUs by index, each with its processes by PID, named by the pods they are of.

    Args:
        gpus: as mpsd showed them last.
        looked_up: GPU -> its processes now; those shown last stand in where there is none, or an error.
        outdated: why what was shown last may not be so now, None when it is; `known_unix_s`: when it was.
    """
    owners = _Owners(allocations)
    rows = []
    for gpu in sorted(gpus, key=lambda gpu: gpu.info.index):
        answer = (looked_up or {}).get(gpu.info.uuid)
        why = answer.why if answer is not None else outdated
        known = gpu.clients if answer is None or answer.error else answer.clients
        named = tuple(owners.named(client) for client in sorted(known, key=lambda client: client.pid))
        rows.append(
            GpuClientsStatus(
                uuid=gpu.info.uuid,
                index=gpu.info.index,
                group=declared_name(gpu.group, gpu.info.uuid),
                clients=named,
                outdated=message_of(why),
                outdated_code=code_of(why),
                known_unix_s=known_unix_s if answer is None else None,
            )
        )
    return rows


class _Owners:
    """Whose each process is, as the live allocations tell."""

    def __init__(self, allocations: Iterable[AllocationStatus]) -> None:
        self._by_key = {allocation.key: allocation for allocation in allocations}
        self._pods = {key: allocation.pod_uids for key, allocation in self._by_key.items()}
        self._by_uid = {a.pod_uids[-1]: a for a in self._by_key.values() if a.pod_uids and a.pod}

    def named(self, client: GpuClient) -> ClientStatus:
        """The process with names. Its own pod's, whatever it claims: the allocation's only where they are the same."""
        key = client.allocation_key or ""
        owner = self._by_key.get(key)
        own = owner if owner is not None and is_of(client, key, self._pods) else None
        pod = own or self._by_uid.get(client.pod_uid)
        return ClientStatus(
            pid=client.pid,
            command=client.command,
            used_bytes=client.used_bytes,
            mps=client.mps,
            allocation_key=client.allocation_key,
            foreign=is_foreign(client, self._pods),
            resource=own.resource if own else "",
            namespace=pod.namespace if pod else "",
            pod=pod.pod if pod else "",
            container=own.container if own else "",
            pod_uid=client.pod_uid,
        )


def targets(allocations: Iterable[AllocationStatus], pod: str, container: str | None = None) -> tuple[Target, ...]:
    """The live allocations of a pod, or of one of its containers; never none.

    Args:
        pod: `namespace/name`, its UID, or the name alone where only one namespace has such a pod.

    Raises:
        ConfigError: pods of several namespaces have that name.
        GpufracError: no such pod or container holds a live allocation.
    """
    namespace, _, name = pod.rpartition("/")
    known = [_target(allocation) for allocation in allocations]
    held = [target for target in known if (target.pod and name == target.pod) or name in target.pod_uids]
    held = [target for target in held if not namespace or target.namespace == namespace]
    if not held:
        pods = sorted({f"{target.namespace}/{target.pod}" for target in known if target.pod})
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


def _target(allocation: AllocationStatus) -> Target:
    return Target(
        key=allocation.key,
        resource=allocation.resource,
        namespace=allocation.namespace,
        pod=allocation.pod,
        container=allocation.container,
        gpus=allocation.gpus,
        pod_uids=allocation.pod_uids,
    )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - 10} more" if len(listed) > 10 else ""
    return ", ".join(listed[:10]) + more
