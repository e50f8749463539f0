"""Pods that run apart from the host: in a sandbox with a kernel of its own, or in a user namespace (pure).

Limits of MPS and of cgroups are the host's. Into a virtual machine (Kata Containers) neither reaches. gVisor makes the
driver's calls in a process of the sandbox, outside of the container's cgroup, and lets no socket of the host in. In a
user namespace cgroups hold as ever, but whether an MPS daemon takes a client from there is nowhere documented.
"""

from collections.abc import Iterable

from deviceplugin.plan.reasons import IsolationCode
from mpsd.common.reason import Reason
from mpsd.config.model import Enforcement

_SANDBOX_HANDLERS = ("kata", "runsc", "gvisor", "firecracker", "cloud-hypervisor")
"""How the names of their RuntimeClass handlers begin, by convention."""
_SANDBOX_PROCESSES = ("qemu-system", "cloud-hyperviso", "firecracker", "dragonball", "stratovirt", "runsc-sandbox")
"""How the short names of processes begin that run a whole pod."""
_THEIR_HELPERS = ("virtiofsd", "vhost", "nydusd", "runsc", "exe", "containerd-shim", "pause")


def level_left(isolation: Reason | None, given: Enforcement) -> Enforcement:
    """What is left of a level for a container that is kept from the host like that; None: it is not."""
    if isolation is None:
        return given
    if isolation.code == IsolationCode.SANDBOX:
        return Enforcement.NONE
    cooperative = given is Enforcement.COOPERATIVE
    return Enforcement.NONE if isolation.code == IsolationCode.USER_NAMESPACE and cooperative else given


USER_NAMESPACE = Reason(
    IsolationCode.USER_NAMESPACE,
    "its pod has a user namespace of its own (hostUsers: false), and whether MPS holds its clients there is not known: "
    "leave `hostUsers` out, or use a node with hard limits",
)


def of_container(runtime_handler: str, *, user_namespace: bool) -> Reason | None:
    """What keeps a container from the host, as the runtime tells: the handler of its pod's RuntimeClass, and whether it
    is in a user namespace."""
    if runtime_handler.lower().startswith(_SANDBOX_HANDLERS):
        return _sandbox(f"runtime handler {runtime_handler}")
    return USER_NAMESPACE if user_namespace else None


def of_processes(names: Iterable[str]) -> Reason | None:
    """The same, as the short names of all processes of a pod tell. A container may well have a virtual machine as its
    program: only where there is nothing else is it the pod's."""
    found = set(names)
    sandbox = sorted(name for name in found if name.startswith(_SANDBOX_PROCESSES))
    if not sandbox or not all(name.startswith((*_SANDBOX_PROCESSES, *_THEIR_HELPERS)) for name in found):
        return None
    return _sandbox(f"process {sandbox[0]}")


def _sandbox(how: str) -> Reason:
    return Reason(
        IsolationCode.SANDBOX,
        f"its pod runs in a sandbox ({how}), where limits of MPS and of its cgroup do not reach it: leave "
        "`runtimeClassName` out",
    )
