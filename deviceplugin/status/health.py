"""The plugin's readiness, from the values that `gpufrac status` shows (pure)."""

from deviceplugin.annotated.readiness import READY
from deviceplugin.plan.reasons import OfferCode
from deviceplugin.status.attention import unregistered
from deviceplugin.status.model import PluginStatus
from mpsd.common.reason import OlderCode, Reason, reason_of, reasons_of


def not_ready(plugin: PluginStatus) -> tuple[Reason, ...]:
    """What keeps the plugin from granting a share to a pod that comes now, or its container from starting. Empty: it
    can serve, though a resource may offer nothing here and a GPU be in trouble."""
    records = (why for why in reasons_of(plugin.problems, plugin.problem_codes) if why.code == OfferCode.NO_RECORDS)
    found = [
        reason_of(plugin.mpsd_error, plugin.mpsd_error_code),
        *records,
        *unregistered(plugin.resources),
        reason_of(plugin.kubelet_error, plugin.kubelet_error_code),
        reason_of(plugin.cdi_error, plugin.cdi_error_code),
    ]
    known = [reason for reason in found if reason is not None]
    annotated = plugin.annotated
    if annotated is not None and annotated.readiness_code != READY and not known:  # else it says the same once more
        code = annotated.error_code or annotated.readiness_code or OlderCode.UNKNOWN
        known.append(Reason(code, f"annotated pods are not served: {annotated.readiness_message}"))
    return tuple(known)
