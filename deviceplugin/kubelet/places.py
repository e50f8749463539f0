"""Where a kubelet keeps what we need of it. Two directories, as one of them is a constant of the kubelet: the
registration socket and the checkpoint of devices do not follow its --root-dir, everything else does."""

import os
from typing import NamedTuple

from mpsd.config.model import NodeConfig


class KubeletPlaces(NamedTuple):
    """`root`: its --root-dir; `device_plugins`: pkg/apis/deviceplugin/v1beta1, DevicePluginPath."""

    root: str
    device_plugins: str

    @property
    def registration_socket(self) -> str:
        """Where device plugins register (kubelet: a constant below its device plugin directory)."""
        return os.path.join(self.device_plugins, "kubelet.sock")

    @property
    def pods(self) -> str:
        """One directory per pod that the kubelet has not cleaned up after, by UID."""
        return os.path.join(self.root, "pods")

    @property
    def pod_resources_socket(self) -> str:
        """Where the kubelet serves PodResources."""
        return os.path.join(self.root, "pod-resources", "kubelet.sock")

    def missing(self) -> str:
        """What is not there and which setting names it, empty while both sockets are: a kubelet has both or none."""
        registration, resources = (
            os.path.exists(path) for path in (self.registration_socket, self.pod_resources_socket)
        )
        if registration and resources:
            return ""
        if registration:
            return (
                f"{self.pod_resources_socket} is not there, but {self.registration_socket} is: set kubelet.root (now "
                f"{self.root}) to the kubelet's --root-dir; kubelet.devicePlugins is right"
            )
        if resources:
            return (
                f"{self.registration_socket} is not there, but {self.pod_resources_socket} is: the kubelet is just "
                "starting, or kubelet.devicePlugins is not its directory for device plugins, which does not follow its "
                f"--root-dir (now {self.device_plugins}; kubelets have /var/lib/kubelet/device-plugins unless built "
                "otherwise)"
            )
        return (
            f"neither {self.registration_socket} nor {self.pod_resources_socket} is there: is the kubelet running, and "
            f"are kubelet.devicePlugins ({self.device_plugins}) and kubelet.root ({self.root}, its --root-dir) right?"
        )


def kubelet_places(config: NodeConfig) -> KubeletPlaces:
    """Where the config says the kubelet's things are."""
    return KubeletPlaces(config.kubelet_root, config.kubelet_device_plugins)


def pod_exists(pods: str, uid: str) -> bool:
    """Whether the kubelet has a directory of the pod in that one. What can't be looked at may be there."""
    if "/" in uid or uid in ("", ".", ".."):
        return False
    try:
        os.stat(os.path.join(pods, uid))
    except FileNotFoundError:
        return not os.path.isdir(pods)
    except OSError:
        return True
    return True
