"""Codes of what reconciling finds: limits that are not in force, and allocations that can't be let go."""

from mpsd.common.reason import Code


class HeldCode(Code):
    """Why a running container is not held to what it was granted, or that can't be told; beside VerdictCode and
    DeviationCode, which tell the same of its processes."""

    PAST_MPS = (
        "PastMps",
        "A process uses the GPU past its MPS daemon, and so past its limit.",
        "Find why it does not find the daemon (its environment), or use hard limits.",
    )
    TWO_RESOURCES = (
        "TwoResources",
        "The container holds two of our resources, and only one limit takes effect.",
        "Ask for one resource per container.",
    )
    STARTED_ALONE = (
        "StartedAlone",
        "The container was started while gpufrac was not there, and runs without its limit.",
        "Delete the pod, so that it is made again with its limit, or set `annotations.whenAway: stop`.",
    )
    LIMIT_NOT_IN_FORCE = (
        "LimitNotInForce",
        "The memory limit of its cgroup read back as another than was set.",
        "Nothing where it was set again; else read the message.",
    )
    LIMIT_NOT_TOLD = (
        "LimitNotTold",
        "Whether its memory limit is in force can't be told now.",
        "Read the message. It is looked at again.",
    )
    NOT_GRANTED = (
        "GuaranteeNotGranted",
        "Its cgroup had memory guaranteed that was not granted to it.",
        "Take NVIDIA_GPU_MEMORY_REQUEST out of its pod and image.",
    )


class ReleaseCode(Code):
    """Why an allocation whose pod is gone stays."""

    NOT_KNOWN = (
        "UsersNotKnown",
        "Whether processes of its pod live still can't be told.",
        "Read the message: as a rule mpsd or a driver does not answer.",
    )
    USES_GPU = ("StillUsesGpu", "A process of its pod still uses the GPU.", "Wait, or end the process.")
    STILL_RUNS = ("StillRuns", "A process of its pod still runs and may use the GPU.", "Wait, or end the process.")
    FILE_STAYS = (
        "CdiFileStays",
        "Its CDI file can't be removed.",
        "See that the CDI directory is writable.",
    )
    RECORD_STAYS = (
        "RecordStays",
        "Its record can't be removed.",
        "Free space under the state directory, or mount it writable.",
    )


class FileCode(Code):
    """Why CDI files are not as they should be."""

    NOT_AS_PERMITTED = (
        "CdiFilesNotAsPermitted",
        "CDI files can't be written or removed, so that containers wait or may start too early.",
        "See that the CDI directory is writable and has space.",
    )
