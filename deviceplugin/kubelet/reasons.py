"""Codes of what goes wrong between the plugin and the kubelet."""

from mpsd.common.reason import Code


class KubeletCode(Code):
    """Why a resource is not registered at the kubelet, or the kubelet does not tell who holds what."""

    NOT_ASKED_YET = ("NotAskedYet", "The kubelet has not been looked at yet.", "Nothing: that takes a moment.")
    NOT_THERE = (
        "KubeletNotThere",
        "The kubelet's sockets are not where the config says.",
        "Start the kubelet, or correct `kubelet.root` and `kubelet.devicePlugins`.",
    )
    NOT_SERVED = (
        "ResourceNotServed",
        "The plugin can't serve the resource on its socket in the kubelet's directory.",
        "Read the message; it is tried again.",
    )
    NOT_REGISTERED = (
        "NotRegistered",
        "The kubelet did not take the registration of the resource, or was not asked yet.",
        "Read the message and the kubelet's log; it is tried again.",
    )
    PODS_NOT_SHOWN = (
        "PodsNotShown",
        "The kubelet does not list its pods' devices, so no pod gets a name and nothing is released.",
        "Look whether the kubelet runs, and whether `kubelet.root` is its --root-dir.",
    )
    CHECKPOINT_NOT_READ = (
        "CheckpointNotRead",
        "The kubelet's checkpoint of devices can't be read, so who starts just now is not known.",
        "Read the message; `kubelet.devicePlugins` names its directory.",
    )
