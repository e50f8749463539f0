"""Whose list of GPUs is believed? (pure)

Who may write a pod's annotations can name any GPU in them. KAI's admission keeps users from its own pods' lists only,
so a pod of another scheduler could help itself.
"""

from collections.abc import Collection

from deviceplugin.plan.allocation import ContainerAsk
from mpsd.common.quantity import quoted
from mpsd.config.model import AnnotationsConfig, TrustPolicy


def distrust(config: AnnotationsConfig, ask: ContainerAsk, reserved: Collection[str]) -> str:
    """Why the GPUs a container names are not believed, empty when they are.

    Args:
        reserved: GPUs that reservation pods hold.
    """
    match config.trust:
        case TrustPolicy.ANY:
            return ""
        case TrustPolicy.NAMESPACES:
            if ask.container.namespace in config.namespaces:
                return ""
            return (
                f"device lists of namespace {quoted(ask.container.namespace)} are not believed: `annotations.trust` "
                f"names {', '.join(config.namespaces)}"
            )
        case TrustPolicy.KAI_RESERVATION:
            missing = [uuid for uuid in ask.gpus if uuid not in reserved]
            if not missing:
                return ""
            return (
                f"no reservation pod in namespace {config.reservation_namespace} holds GPU {', '.join(missing)}, so "
                "KAI did not choose it: have the pod scheduled by KAI, or set `annotations.trust`"
            )
