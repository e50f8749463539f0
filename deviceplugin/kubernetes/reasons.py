"""Codes of what keeps the plugin from the Kubernetes API. Nothing else depends on it."""

from mpsd.common.reason import Code


class KubernetesCode(Code):
    """Why the node's condition, events or pods of the Kubernetes API are not as they should be."""

    AWAY = (
        "ApiServerAway",
        "The API server can't be asked, or nothing says where it is.",
        "Read the message; see `kubernetes.access`.",
    )
    REFUSES = (
        "ApiServerRefuses",
        "The API server answers, and refuses something.",
        "Read the message; grant what deploy/rbac.yaml does.",
    )
