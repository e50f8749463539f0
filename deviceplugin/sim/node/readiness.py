"""Is everything that a simulated node offers there?"""

from collections.abc import Mapping
from typing import Any

from deviceplugin.sim.kubelet.devicemanager import NodeResource
from deviceplugin.sim.kubelet.kubelet import StubKubelet
from mpsd.common.errors import GpufracError
from mpsd.config.model import NodeConfig
from mpsd.localapi.call import call
from mpsd.localapi.client import MpsdClient
from mpsd.localapi.snapshot import DaemonState, Snapshot

ANSWER_S = 60.0
"""For an answer of the plugin, which a busy machine may take long for."""
_ON_THE_WAY = (DaemonState.ABSENT, DaemonState.STARTING, DaemonState.CONFIGURING)


def pending(config: NodeConfig, kubelet: StubKubelet) -> tuple[str, str] | None:
    """Which process the node waits for and why, None when it is up."""
    try:
        snapshot = MpsdClient(config.mpsd_socket).snapshot()
    except GpufracError as error:
        return "mpsd", str(error)
    if reason := _daemons_pending(snapshot):
        return "mpsd", reason
    try:
        status = plugin_status(config)
    except GpufracError as error:
        return "plugin", str(error)
    if reason := lists_pending(snapshot, status, kubelet.resources):
        return "plugin", reason
    runtime = kubelet.nri
    if config.annotations is not None and runtime is not None and not runtime.plugins:
        return "plugin", "it has not registered at the container runtime (NRI)"
    return None


def plugin_status(config: NodeConfig) -> dict[str, Any]:
    """What the plugin's status says. Raises GpufracError."""
    return call(config.plugin_socket, "status", {}, dict[str, Any], ANSWER_S)


def lists_pending(snapshot: Snapshot, status: Mapping[str, Any], shown: Mapping[str, NodeResource]) -> str:
    """Why the kubelet may not know yet what can be had, empty where it does (pure).

    Args:
        snapshot: of mpsd, from before `status` was asked for.
        status: of the plugin, from before the kubelet was asked what is `shown`.
    """
    if status["mpsdError"]:
        return str(status["mpsdError"])
    if status["mpsdInstance"] != snapshot.instance or status["mpsdGeneration"] < snapshot.generation:
        return "it has not heard yet what mpsd sees"
    if not status["runtime"]:
        return "it does not know the container runtime yet"
    if not status["listsAreNew"]:
        return "it has not listed yet what it knows"
    for resource in status["resources"]:
        name = resource["name"]
        if resource["registration"] != "registered" or name not in shown:
            return f"{name} is not registered: {resource['registrationError'] or 'no reason given'}"
        if (shown[name].allocatable, shown[name].capacity) != (resource["healthy"], resource["listed"]):
            return f"the kubelet has not got the list of {name} yet"
    return ""


def _daemons_pending(snapshot: Snapshot) -> str:
    if not snapshot.gpus:
        return f"mpsd sees no GPU: {snapshot.reason or 'not looked yet'}"
    for gpu in snapshot.gpus:
        if gpu.daemon is not None and gpu.daemon.state in _ON_THE_WAY and not gpu.not_shared:
            return f"the MPS daemon of GPU {gpu.info.index} is {gpu.daemon.state}: {gpu.daemon.reason}"
    return ""
