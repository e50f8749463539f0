"""The stub kubelet's device checkpoint: `kubelet_internal_checkpoint` in the form of kubelet 1.20 to 1.36.

The checksum differs: a real one hashes how Go prints the struct, ours the JSON text. So, as with a real kubelet, a file
that was changed behind its back is not believed.
"""

import base64
import binascii
import os
import zlib
from collections.abc import Iterable, Mapping

import msgspec

from deviceplugin.sim.kubelet.devicemanager import Held, Slot

FILE_NAME = "kubelet_internal_checkpoint"


class _Entry(msgspec.Struct):
    PodUID: str
    ContainerName: str
    ResourceName: str
    DeviceIDs: dict[str, list[str]]
    AllocResp: str


class _Data(msgspec.Struct):
    PodDeviceEntries: list[_Entry] | None
    RegisteredDevices: dict[str, list[str]]


class _File(msgspec.Struct):
    Data: _Data
    Checksum: int


def write(directory: str, held: Mapping[Slot, Held], registered: Mapping[str, Iterable[str]]) -> None:
    """Replaces the file as a whole. Raises OSError."""
    entries = [
        _Entry(
            slot.pod_uid,
            slot.container,
            slot.resource,
            {str(node): list(ids) for node, ids in devices.by_numa.items()},
            base64.b64encode(devices.answer).decode(),
        )
        for slot, devices in held.items()
    ]
    data = _Data(entries or None, {name: list(ids) for name, ids in registered.items()})
    path = os.path.join(directory, FILE_NAME)
    temporary = os.path.join(directory, f".{FILE_NAME}.tmp")
    with open(temporary, "wb") as file:
        file.write(msgspec.json.encode(_File(data, _checksum(data))))
    os.replace(temporary, path)


def read(directory: str) -> tuple[dict[Slot, Held], list[str]]:
    """What each container holds, and the registered resources. A missing or damaged file holds nothing."""
    try:
        with open(os.path.join(directory, FILE_NAME), "rb") as file:
            found = msgspec.json.decode(file.read(), type=_File)
        if found.Checksum != _checksum(found.Data):
            return {}, []
        held = {
            Slot(e.PodUID, e.ContainerName, e.ResourceName): Held(
                {int(node): tuple(ids) for node, ids in e.DeviceIDs.items()},
                base64.b64decode(e.AllocResp, validate=True),
            )
            for e in found.Data.PodDeviceEntries or ()
        }
    except (OSError, msgspec.MsgspecError, binascii.Error, ValueError):
        return {}, []
    return held, list(found.Data.RegisteredDevices)


def _checksum(data: _Data) -> int:
    return zlib.crc32(msgspec.json.encode(data))
