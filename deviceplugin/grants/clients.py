"""Whose is a process on a GPU? (pure)

What its environment says is a tenant's word: any process can claim the allocation of another pod. Its pod, which mpsd
has from the process's cgroup, is the kernel's word and goes first, as far as it is known.
"""

from collections.abc import Iterable

from deviceplugin.grants.holders.model import Pods
from mpsd.localapi.snapshot import GpuClient


def is_of(client: GpuClient, key: str, pods: Pods) -> bool:
    """Whether a process is one of an allocation's.

    Where its pod or the allocation's is not known, the process is believed. One of the pod that claims no allocation
    of its pod is of each of them: it is somewhere under one of their limits, and holds each of them.
    """
    held_by = pods.get(key, ())
    if not client.pod_uid or not held_by:
        return client.allocation_key == key
    if client.pod_uid not in held_by:
        return False
    return client.allocation_key == key or client.pod_uid not in pods.get(client.allocation_key or "", ())


def claims(client: GpuClient, pods: Pods) -> bool:
    """Whether a process names an allocation that pods hold, but not its own."""
    held_by = pods.get(client.allocation_key or "", ())
    return bool(client.pod_uid and held_by and client.pod_uid not in held_by)


def is_foreign(client: GpuClient, pods: Pods) -> bool:
    """Whether it holds no allocation of ours, as far as can be told."""
    if claims(client, pods) or client.allocation_key is None:
        return not any(client.pod_uid and client.pod_uid in held_by for held_by in pods.values())
    return False


def pids_text(clients: Iterable[GpuClient]) -> str:
    """Some of them as text, each once."""
    return ", ".join(map(str, list(dict.fromkeys(client.pid for client in clients))[:5]))
