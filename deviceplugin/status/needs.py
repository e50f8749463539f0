"""What the plugin needs of its own process and place, and what it can't do without. Reads only.

As a systemd unit that runs as root it has all of it. In a pod each piece has to be given.
"""

import os
from collections.abc import Mapping

from deviceplugin.kubelet.places import kubelet_places
from deviceplugin.kubernetes.frontend import OFF
from deviceplugin.status.reasons import ProcessCode
from mpsd.common.reason import Reason
from mpsd.config.model import NodeConfig
from mpsd.host.checks import environment_objection
from mpsd.host.survival import INITIAL_PID

BLIND = "whether they run with their limits can't be told"


def lacks(config: NodeConfig, *, environ: Mapping[str, str] = os.environ, proc: str = "/proc") -> tuple[Reason, ...]:
    """Each piece that is missing: what can't be done, why, and what to give."""
    if config.backend == "simulated":
        return ()  # its containers are our own user's processes
    blind = sees_no_containers(proc) or environment_objection("the plugin", BLIND, proc)
    nameless = no_node_name(config, environ)
    return (
        *((Reason(ProcessCode.PROCESSES_NOT_SEEN, blind),) if blind else ()),
        *(Reason(ProcessCode.NOT_THE_HOSTS, text) for text in no_host_paths(config, environ)),
        *((Reason(ProcessCode.NODE_NAME_NOT_GIVEN, nameless),) if nameless else ()),
    )


def sees_no_containers(proc: str = "/proc") -> str:
    """Why processes of containers can't be seen, empty when they can. The number of the host's PID namespace is fixed
    (linux/nsfs.h)."""
    try:
        namespace = os.readlink(f"{proc}/self/ns/pid")
    except OSError as error:
        return f"cannot tell whether the plugin is in the host's PID namespace: {error.strerror}: mount /proc"
    if namespace == INITIAL_PID:
        return ""
    return (
        f"cannot see the processes of containers, so {BLIND}: the plugin is in a PID namespace of its own: set "
        "hostPID: true"
    )


def no_host_paths(config: NodeConfig, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Directories that must be the host's and are not."""
    pods = kubelet_places(config).pods
    found = []
    if not os.path.isdir(pods):
        found.append(
            f"cannot see {pods}, so which pods are there can't be told: mount it from the host at the same path"
        )
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return tuple(found)  # not in a pod
    for key, path in (
        ("cdi.directory", config.cdi.directory),
        ("mps.runRoot", config.mps.run_root),
        ("stateRoot", config.state_root),
    ):
        if _of_the_container(path):
            found.append(
                f"{path} ({key}) is the plugin's container's own and goes with it: mount it from the host at the same "
                "path"
            )
    return tuple(found)


def no_node_name(config: NodeConfig, environ: Mapping[str, str]) -> str:
    """Why the node's name may be taken wrong, empty when it is not needed or given."""
    given = config.kubernetes.node_name or environ.get("NODE_NAME", "")
    if config.kubernetes.access == OFF or given or "KUBERNETES_SERVICE_HOST" not in environ:
        return ""
    return (
        "the node's name is not given, and the host's name in a pod may be another: set NODE_NAME by the downward API, "
        "or kubernetes.nodeName"
    )


def _of_the_container(path: str) -> bool:
    """Whether a path lies on the root file system, which in a pod is the container's."""
    try:
        return os.stat(path).st_dev == os.stat("/").st_dev
    except OSError:
        return False  # whoever needs it says so
