"""What the plugin answers over its local API: a table of methods, each with the right that it takes."""

from collections.abc import Callable, Mapping

import msgspec

from deviceplugin.grants.broker import Broker
from deviceplugin.grants.drains import Drain
from deviceplugin.status.clients import clients, targets
from deviceplugin.status.model import PluginStatus
from mpsd.common.log import get_logger
from mpsd.localapi.health import Health
from mpsd.localapi.methods import Method, operating, reading, shaped

log = get_logger("plugin")


def methods(broker: Broker, status: Callable[[], PluginStatus], health: Callable[[], Health]) -> dict[str, Method]:
    """The table.

    Args:
        status: the plugin as it is now.
        health: whether it lives and can serve.
    """

    def show_clients(params: Mapping[str, object]) -> object:
        shown = status().allocations
        node = broker.node
        return clients(node.gpus, shown, outdated=node.absence, known_unix_s=node.heard_unix_s)

    def show_targets(params: Mapping[str, object]) -> object:
        asked = shaped(params, _Pod)
        return targets(status().allocations, asked.pod, asked.container)

    def drain(params: Mapping[str, object]) -> Drain:
        asked = shaped(params, _DrainGpu)
        drained = broker.drain(asked.gpu, asked.reason)
        log.info("GPU drained", gpu=drained.gpu, reason=drained.text)
        return drained

    def undrain(params: Mapping[str, object]) -> None:
        gpu = shaped(params, _Gpu).gpu
        broker.undrain(gpu)
        log.info("GPU undrained", gpu=gpu)

    return reading(
        {
            "status": lambda _: status(),
            "health": lambda _: health(),
            "state_root": lambda _: broker.node.config.state_root,
            "allocations": lambda _: status().allocations,
            "clients": show_clients,
            "targets": show_targets,
        }
    ) | operating({"drain": drain, "undrain": undrain})


class _Gpu(msgspec.Struct, forbid_unknown_fields=True):
    gpu: str


class _DrainGpu(_Gpu):
    reason: str = ""


class _Pod(msgspec.Struct, forbid_unknown_fields=True):
    pod: str
    container: str | None = None
