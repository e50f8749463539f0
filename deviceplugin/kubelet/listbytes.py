"""Lists as bytes on the wire: of thousands of devices, most stand there as they did before."""

from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.plan.advertise import Advertisement
from deviceplugin.plan.model import Device

HEALTH = {True: "Healthy", False: "Unhealthy"}


class ListBytes:
    """Of one stream. Keeps the bytes of its last list by part, as lists share the parts that did not change."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[tuple[Device, ...], bytes]] = {}

    def of(self, advertisement: Advertisement) -> bytes:
        """A serialised `ListAndWatchResponse`. Messages of a repeated field may be joined as bytes."""
        parts = [part.devices for part in advertisement.parts.values()]
        # An identity is nobody else's as long as its owner is kept beside it.
        self._last = {id(part): self._last.get(id(part)) or (part, _serialised(part)) for part in parts}
        return b"".join(self._last[id(part)][1] for part in parts)


def _serialised(devices: tuple[Device, ...]) -> bytes:
    messages = []
    for device in devices:
        nodes = [pb.NUMANode(ID=node) for node in device.numa_nodes]
        topology = pb.TopologyInfo(nodes=nodes) if nodes else None
        messages.append(pb.Device(ID=device.id, health=HEALTH[device.healthy], topology=topology))
    return pb.ListAndWatchResponse(devices=messages).SerializeToString()
