"""The kubelet's device checkpoint, read only: which pod UID holds which devices, and what we answered.

Format as written by kubelet 1.20 to 1.36 (`kubelet_internal_checkpoint`). Its checksum depends on how Go prints the
struct, so the file is never written. Entries of finished pods stay until the kubelet gets the next device list.
"""

import base64
import binascii
import os

import msgspec
from google.protobuf.message import DecodeError

from cdi.atomic import read_regular
from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.plan import render
from mpsd.common.errors import TransientError
from mpsd.common.marker import MARKER

FILE_NAME = "kubelet_internal_checkpoint"
MAX_BYTES = 64 * 1024 * 1024


class CheckpointError(TransientError):
    """The checkpoint is missing, unreadable or of a form we don't know."""


class Entry(msgspec.Struct, frozen=True):
    """One container's devices of one resource. `allocation_key` is the one in our cached answer, if it is ours."""

    pod_uid: str
    container: str
    resource: str
    device_ids: tuple[str, ...]
    allocation_key: str | None


class _PodDevices(msgspec.Struct):
    PodUID: str
    ContainerName: str
    ResourceName: str
    DeviceIDs: dict[str, list[str] | None] | list[str] | None = None
    AllocResp: str | None = None


class _Data(msgspec.Struct):
    PodDeviceEntries: list[_PodDevices] | None = None


class _File(msgspec.Struct):
    Data: _Data


_decoder = msgspec.json.Decoder(_File)


def read(device_plugins_directory: str) -> list[Entry]:
    """All entries. Raises CheckpointError."""
    path = os.path.join(device_plugins_directory, FILE_NAME)
    try:
        data, _ = read_regular(path, max_bytes=MAX_BYTES)
    except OSError as error:
        raise CheckpointError(f"cannot read the kubelet's checkpoint {path}: {error.strerror or error}") from error
    return parse(data)


def parse(data: bytes) -> list[Entry]:
    """Entries in one file's bytes (pure). Raises CheckpointError."""
    try:
        found = _decoder.decode(data).Data.PodDeviceEntries or []
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"cannot read the kubelet's checkpoint: {error}") from error
    return [
        Entry(e.PodUID, e.ContainerName, e.ResourceName, _device_ids(e.DeviceIDs), _allocation_key(e.AllocResp))
        for e in found
    ]


def _device_ids(by_numa: dict[str, list[str] | None] | list[str] | None) -> tuple[str, ...]:
    if isinstance(by_numa, dict):
        return tuple(sorted({identifier for part in by_numa.values() for identifier in part or ()}))
    return tuple(sorted(set(by_numa or ())))


def _allocation_key(answer: str | None) -> str | None:
    if not answer:
        return None
    try:
        response = pb.ContainerAllocateResponse.FromString(base64.b64decode(answer, validate=True))
    except (binascii.Error, DecodeError, ValueError):
        return None
    keys = [render.key_of_device(device.name) for device in response.cdi_devices]
    # A kubelet without cdi_devices drops that field, but keeps the annotation and the env of `delivery: both`.
    keys += [response.annotations.get(render.KIND), response.envs.get(MARKER)]
    return next((key for key in keys if key and render.is_key(key)), None)
