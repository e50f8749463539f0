"""Messages of nri.pkg.api.v1alpha1 <-> values of `model` (pure).

Missing submessages count as empty, numbers we don't know as UNKNOWN; fields we don't know are skipped.
"""

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from deviceplugin.api import nri_v1alpha1_pb2 as pb
from deviceplugin.nri.model import Adjustment, Container, ContainerState, Mount, Pod
from mpsd.common.errors import ProtocolError

REMOVAL = "-"
"""Before a variable's name or a mount's destination: remove it."""
USER = "user"
"""A type of namespace."""
M = TypeVar("M", bound=Message)


def parse(kind: type[M], payload: bytes) -> M:
    """Raises ProtocolError for what is no such message, also for text that is not UTF-8 (Go sends none)."""
    message = kind()
    try:
        message.ParseFromString(payload)
    except DecodeError as error:
        raise ProtocolError(f"cannot read a {kind.DESCRIPTOR.name}: {error}") from error
    return message


def pod_of(message: pb.PodSandbox) -> Pod:
    """A sandbox of the wire as our value."""
    return Pod(
        id=message.id,
        name=message.name,
        uid=message.uid,
        namespace=message.namespace,
        labels=dict(message.labels),
        annotations=dict(message.annotations),
        cgroup_parent=message.linux.cgroup_parent,
        pid=message.pid,
        runtime_handler=message.runtime_handler,
    )


def pod_message(pod: Pod) -> pb.PodSandbox:
    """A pod as the wire has it."""
    return pb.PodSandbox(
        id=pod.id,
        name=pod.name,
        uid=pod.uid,
        namespace=pod.namespace,
        labels=pod.labels,
        annotations=pod.annotations,
        linux=pb.LinuxPodSandbox(cgroup_parent=pod.cgroup_parent),
        pid=pod.pid,
        runtime_handler=pod.runtime_handler,
    )


def container_of(message: pb.Container) -> Container:
    """A container of the wire as our value."""
    return Container(
        id=message.id,
        pod_id=message.pod_sandbox_id,
        name=message.name,
        state=_state(message.state),
        labels=dict(message.labels),
        annotations=dict(message.annotations),
        args=tuple(message.args),
        env=tuple(message.env),
        mounts=tuple(_mount(mount) for mount in message.mounts),
        cgroups_path=message.linux.cgroups_path,
        pid=message.pid,
        cdi_devices=tuple(device.name for device in message.CDI_devices),
        user_namespace=any(namespace.type == USER for namespace in message.linux.namespaces),
    )


def container_message(container: Container) -> pb.Container:
    """A container as the wire has it."""
    return pb.Container(
        id=container.id,
        pod_sandbox_id=container.pod_id,
        name=container.name,
        state=pb.ContainerState.Name(container.state.value),
        labels=container.labels,
        annotations=container.annotations,
        args=container.args,
        env=container.env,
        mounts=[_mount_message(mount) for mount in container.mounts],
        linux=pb.LinuxContainer(
            cgroups_path=container.cgroups_path,
            namespaces=[pb.LinuxNamespace(type=USER)] if container.user_namespace else [],
        ),
        pid=container.pid,
        CDI_devices=[pb.CDIDevice(name=name) for name in container.cdi_devices],
    )


def adjustment_of(message: pb.ContainerAdjustment) -> Adjustment:
    """What a runtime makes of a plugin's answer."""
    variables = [(variable.key, variable.value) for variable in message.env]
    destinations = [mount.destination for mount in message.mounts]
    return Adjustment(
        removed_env=tuple(name.removeprefix(REMOVAL) for name, _ in variables if name.startswith(REMOVAL)),
        env=tuple((name, value) for name, value in variables if not name.startswith(REMOVAL)),
        removed_mounts=tuple(path.removeprefix(REMOVAL) for path in destinations if path.startswith(REMOVAL)),
        mounts=tuple(_mount(mount) for mount in message.mounts if not mount.destination.startswith(REMOVAL)),
        cdi_devices=tuple(device.name for device in message.CDI_devices),
        annotations=tuple(message.annotations.items()),
    )


def adjustment_message(adjustment: Adjustment) -> pb.ContainerAdjustment:
    """Removals first, as a runtime sorts them anyway (containerd/nri pkg/adaptation/result.go)."""
    return pb.ContainerAdjustment(
        annotations=dict(adjustment.annotations),
        mounts=[
            *(pb.Mount(destination=f"{REMOVAL}{path}") for path in adjustment.removed_mounts),
            *(_mount_message(mount) for mount in adjustment.mounts),
        ],
        env=[
            *(pb.KeyValue(key=f"{REMOVAL}{name}") for name in adjustment.removed_env),
            *(pb.KeyValue(key=name, value=value) for name, value in adjustment.env),
        ],
        CDI_devices=[pb.CDIDevice(name=name) for name in adjustment.cdi_devices],
    )


def _state(number: int) -> ContainerState:
    try:
        return ContainerState(number)
    except ValueError:
        return ContainerState.UNKNOWN


def _mount(message: pb.Mount) -> Mount:
    return Mount(message.destination, message.source, message.type, tuple(message.options))


def _mount_message(mount: Mount) -> pb.Mount:
    return pb.Mount(destination=mount.destination, type=mount.type, source=mount.source, options=mount.options)
