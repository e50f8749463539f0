"""Codes of why we are at no container runtime over NRI."""

from mpsd.common.reason import Code


class NriCode(Code):
    """Why the plugin is not registered at the container runtime."""

    STARTING = ("NriStarting", "The plugin has not tried yet.", "Nothing: that takes a moment.")
    NOT_REACHABLE = (
        "RuntimeNotReachable",
        "The container runtime takes no connections on its NRI socket.",
        "Read the message: start the runtime, or turn NRI on in its configuration.",
    )
    ENDED = (
        "RuntimeLeft",
        "The link to the container runtime ended, or never came about.",
        "Read the message and the runtime's log; it is tried again.",
    )
