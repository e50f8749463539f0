"""Why an annotated container is refused: codes, and the error that carries one (pure)."""

from mpsd.common.errors import GpufracError
from mpsd.common.reason import Code, Reason


class AnnotationCode(Code):
    """Why an annotated container may not be created or started now, where it is not that it can't be granted."""

    BAD_ANNOTATION = (
        "BadAnnotation",
        "An annotation has a value that must not be guessed at.",
        "Correct the annotation that the message names.",
    )
    NO_GPU_NAMED = (
        "NoGpuNamed",
        "No scheduler wrote which GPUs the container gets.",
        "Look whether the pod's `schedulerName` is right.",
    )
    UNKNOWN_GPU = ("UnknownGpuNamed", "Its annotation names what is no GPU of this node.", "Name one of the node's.")
    NOT_TRUSTED = (
        "NotTrusted",
        "Its list of GPUs is not believed, as anybody can write annotations.",
        "See `annotations.trust` in the config.",
    )
    SHARE_NOT_KNOWN = (
        "ShareNotKnown",
        "It holds a share, and whose that is can't be told yet.",
        "Nothing: it is tried again.",
    )
    SHARE_NOT_LOWERED = (
        "ShareNotLowered",
        "It holds a share, and its annotations ask for something other than a lower limit.",
        "Take the annotations or the share out of the pod.",
    )
    KEPT_APART = (
        "KeptApart",
        "It is kept from the host so that its limit would not reach it.",
        "Read the message: it says what to leave out of the pod.",
    )
    VARIABLE_TWICE = (
        "VariableTwice",
        "Its environment has a variable of ours twice, which this runtime can't override.",
        "Set it once, or not at all.",
    )
    NOT_ATTACHED = (
        "NotAttachedYet",
        "It is granted, and may not start yet.",
        "Nothing: it is tried again. The message says what it waits for.",
    )
    NOT_MADE_BY_US = (
        "NotMadeWithUs",
        "It was created without what gpufrac gives it.",
        "Nothing: it is made again. If it stays, the container runtime does not apply what an NRI plugin says.",
    )
    NO_CGROUP = ("NoCgroupNamed", "The runtime names no cgroup of it that is understood.", "Report the runtime.")
    LIMIT_NOT_IN_FORCE = (
        "LimitNotSettable",
        "Its memory limit can't be put in force on its cgroup.",
        "Read the driver's error in the message; it is tried again.",
    )
    FAILED = ("AnnotatedFailed", "Something that is needed for it failed.", "Read the message; it is tried again.")


class ServingCode(Code):
    """What is not as it should be with annotated pods that are served."""

    ANNOTATION_IGNORED = (
        "AnnotationIgnored",
        "An annotation does not do what its author meant.",
        "Write the key that the message names.",
    )
    LESS_THAN_ASKED = (
        "LessThanAsked",
        "A container got less memory than it asks for.",
        "Nothing: `annotations.shortfall` allows that. Ask for less, or set it to refuse.",
    )
    STARTED_ALONE = (
        "StartedAlone",
        "A container was started while gpufrac was not there, and runs without its limit.",
        "Delete the pod, so that it is made again with its limit, or set `annotations.whenAway: stop`.",
    )
    CREATED_ALONE = (
        "CreatedAlone",
        "A container was created while gpufrac was not there.",
        "Nothing: its start is refused, and it is made again.",
    )
    RUNTIME_DOES_NOT_WAIT = (
        "RuntimeDoesNotWait",
        "The container runtime makes containers without gpufrac while that is away.",
        "Set what the message names in the runtime's configuration.",
    )
    NOT_COMPARED = (
        "NotCompared",
        "Containers of which the container runtime told nothing can't be found.",
        "Look at `annotations.criSocket`.",
    )


class RefusedError(GpufracError):
    """A container that may not be created or started now, and why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.reason = Reason(code, message)
