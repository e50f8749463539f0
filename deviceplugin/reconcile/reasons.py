"""Codes of what reconciling finds: limits that are not in force, allocations that can't be let go, CDI files."""

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
    OVER_LIMIT = (
        "OverLimit",
        "Its processes together use more than its limit, which nothing holds them to as a whole.",
        "Give it a larger share, or end it; use hard limits.",
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
    DEFINED_ELSEWHERE = (
        "DeviceDefinedElsewhere",
        "A CDI file of somebody else defines devices of ours.",
        "Move away the file that the message names.",
    )
    COPY_STAYS = (
        "CopyStays",
        "A copy of one of our CDI files is in our directory and can't be set aside.",
        "Move away the file that the message names.",
    )
    OTHERS_NOT_READ = (
        "OtherFilesNotRead",
        "A CDI directory can't be read, so whether others define devices of ours is not known.",
        "Read the message.",
    )


class DevicesCode(Code):
    """Why containers get their GPU devices as they do, where that is not by the node's CDI specs."""

    NO_GPU_KNOWN = ("NoGpuKnownYet", "mpsd has reported no GPU yet.", "Wait, or see its log.")
    CONFIGURED = ("AsConfigured", "`cdi.gpuDevices: envvar` wants the nvidia runtime to make them.", "Nothing.")
    NO_KIND = (
        "NoCdiKind",
        "No kind of the node's CDI specs names every GPU, so the nvidia runtime must make them.",
        "Have CDI specs generated, such as by `nvidia-ctk cdi generate`, if that is not wanted.",
    )
    KIND_INCOMPLETE = (
        "CdiKindIncomplete",
        "The kind of CDI specs that serves the node does not name every GPU now.",
        "Have CDI specs generated anew, such as by `nvidia-ctk cdi generate`.",
    )
