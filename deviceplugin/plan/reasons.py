"""The codes of planning: why something is not offered, not granted, not enforced, or may not start. What mpsd says of a
GPU, a daemon or the node is passed on with its own code."""

from mpsd.common.reason import Code

WAIT_OR_OTHER = "Wait for an allocation there to end, or use another node."


class OfferCode(Code):
    """Why a GPU, a group or a resource gives nothing new. A request for it is refused with the same code."""

    GPU_NOT_REPORTED = (
        "GpuNotReported",
        "mpsd reported the GPU once and does so no more.",
        "Look at the kernel's log; reset the GPU or restart the node.",
    )
    GPU_NOT_WELL = (
        "GpuNotWell",
        "The GPU is lost or does not answer, and mpsd does not say why.",
        "Look at the kernel's log; reset the GPU or restart the node.",
    )
    DRAINED = "Drained", "An operator drains the GPU.", "`gpufrac undrain` ends that."
    FOREIGN_PROCESSES = (
        "ForeignProcesses",
        "Processes without an allocation use the GPU.",
        "End them (`gpufrac clients` names them) before it is shared.",
    )
    HELD_BY_OTHER_PLUGIN = (
        "HeldByOtherPlugin",
        "A pod holds the whole GPU through another device plugin.",
        "Wait for it to end, or give the other plugin other GPUs.",
    )
    RESERVED = (
        "Reserved",
        "A scheduler's reservation pod holds the GPU for annotated pods.",
        "Nothing: it is free for resources again when that pod ends.",
    )
    MPSD_AWAY = "MpsdAway", "mpsd does not answer, or sees no GPU.", "See the state and the log of `gpufrac mpsd`."
    NO_RECORDS = (
        "LedgerNotWritable",
        "Allocations can't be recorded, so none is given.",
        "Free space under the state directory, or mount it writable.",
    )
    NO_CDI_DEVICE = (
        "NoCdiDevice",
        "The CDI specs of the node name no device for the GPU.",
        "Have them generated anew, such as by `nvidia-ctk cdi generate`.",
    )
    DAEMON_NOT_READY = (
        "DaemonNotReady",
        "The GPU's MPS daemon takes no new containers now.",
        "See `gpufrac daemons`: most states end by themselves.",
    )
    GROUP_CHANGES = (
        "GroupNotAsConfigured",
        "The GPUs can't be grouped as the config has it: one is not there, or allocations hold them as they were.",
        "Wait for those allocations to end, or correct `gpus.groups` in the config.",
    )
    GROUP_INCOMPLETE = (
        "GroupIncomplete",
        "A GPU of the group is not on the node, or not known yet.",
        "Look whether the GPU is there, or correct `gpus.groups` in the config.",
    )
    MODE_BOUND = (
        "BoundToOtherMode",
        "Allocations keep the GPU bound to the other compute mode.",
        "Wait for them to end, ask for that mode, or use another GPU.",
    )
    MEMORY_TAKEN = "MemoryTaken", "The memory of the GPU is granted to others.", WAIT_OR_OTHER
    OVER_COMMITTED = (
        "OverCommitted",
        "More is granted on the GPU than it can give by now.",
        "Wait for allocations to end; it takes nothing new until they fit.",
    )
    CLIENTS_TAKEN = "MpsClientsTaken", "The GPU has as many MPS clients as MPS takes.", WAIT_OR_OTHER
    OTHER_LIMIT = (
        "OtherLimitInForce",
        "MPS protocol 2 has one limit for a group of GPUs, and live allocations there have another.",
        "Wait for them to end.",
    )
    OTHER_GPUS = (
        "OtherGpusInUse",
        "With MPS protocol 2 all containers of a daemon use the same GPUs, and live ones there use others.",
        "Wait for them to end, or use a driver with MPS protocol 3 (r615 or newer).",
    )
    NOT_GUARANTEED = (
        "NotGuaranteed",
        "Somebody there could not get memory back that others borrow, and the limits add up to more than there is.",
        "Wait for that one to end, or lower the limit.",
    )
    DAEMONS_IN_USE = (
        "DaemonsInUse",
        "The GPUs have several MPS daemons, which are in use, and the container needs one for all of them.",
        "Wait until nobody uses them, name other GPUs, or set `annotations.domains: node`.",
    )
    OWN_GROUP = (
        "PartOfGroup",
        "The GPUs are a part of a declared group whose daemon is for the whole of it.",
        "Name all of its GPUs, or declare the group with `members: shared`.",
    )
    ALL_TAKEN = "AllTaken", "All shares of the resource are taken.", WAIT_OR_OTHER
    TOO_LARGE = (
        "LargerThanGpu",
        "A share of the resource does not fit on the GPU at all.",
        "Make it smaller in the config, or give the resource other GPUs.",
    )
    SET_ASIDE = (
        "SetAside",
        "The GPUs are set aside for annotated pods.",
        "`annotations.share: true` lets resources use them, too.",
    )
    NO_GPU_SELECTED = (
        "NoGpuSelected",
        "The config opens no GPU of the node to the resource.",
        "Correct `gpus` of the resource or of the node.",
    )
    NO_GPU = "NoGpuKnown", "No GPU is known yet.", "Wait for mpsd to report them, or see its log."
    NOT_IN_CONFIG = (
        "NotInConfig",
        "The resource is no longer in the config, and allocations of it live.",
        "Nothing: it goes when they end.",
    )
    TOO_MANY_DEVICES = (
        "TooManyDevices",
        "The resource would list more devices than a kubelet safely takes.",
        "Use a larger unit or fewer GPUs.",
    )


class EnforcementCode(Code):
    """Why limits are not hard on a node, or a limit would not be held as its resource or annotations demand."""

    NOT_KNOWN = (
        "NotKnownYet",
        "It is not known yet whether the node can enforce hard limits.",
        "Wait for mpsd's first report.",
    )
    NO_SETTER = (
        "NothingSetsLimits",
        "The driver takes memory limits, and nothing sets them on containers.",
        "Use a container toolkit and CDI specs with the hook that sets them.",
    )
    DELIVERY_BOTH = (
        "CdiDeliveryBoth",
        "With `cdi.delivery: both` a pod can override its limits.",
        "Use `cdi.delivery: cdi`, or accept the resource unenforced.",
    )
    HARD_DEMANDED = (
        "HardLimitsDemanded",
        "The resource demands hard limits, and the node gives less.",
        "Mend what is missing, or lower its `enforcement`.",
    )
    BURST_NEEDS_HARD = (
        "BurstNeedsHardLimits",
        "The limit is above the request, which needs hard limits.",
        "Mend what is missing, or set the limit to the request.",
    )
    BURST_NEEDS_PROTOCOL_3 = (
        "BurstNeedsProtocol3",
        "The limit is above the request, and only MPS protocol 3 takes borrowed memory back.",
        "Use driver r615 or newer and `mps.protocol` auto or 3, or set the limit to the request.",
    )
    TIME_SLICING_NEEDS_HARD = (
        "TimeSlicingNeedsHardLimits",
        "In time-slicing only hard limits hold.",
        "Use sm-sharing, mend what hard limits need, or accept it unenforced.",
    )
    GPU_CANNOT_LIMIT = (
        "GpuCannotLimit",
        "MPS holds nobody to limits on this kind of GPU.",
        "Use other GPUs, or accept it unenforced.",
    )
    GPU_CANNOT_CAP_THREADS = (
        "GpuCannotCapThreads",
        "MPS holds nobody to a share of the compute on this kind of GPU.",
        "Use other GPUs, or ask for no thread percentage.",
    )
    ONE_LIMIT_PER_GROUP = (
        "OneLimitPerGroup",
        "MPS protocol 2 has one limit for all containers on a group of GPUs.",
        "Give its resources one limit, use one GPU, or a driver with MPS protocol 3.",
    )
    BELOW_MINIMUM = (
        "BelowMinimum",
        "The node's `annotations.enforcement` demands more than it can give.",
        "Mend what is missing, or lower the setting.",
    )


class IsolationCode(Code):
    """How a container is kept from the host, where limits of the host may not reach it."""

    SANDBOX = (
        "Sandbox",
        "The pod runs in a sandbox with a kernel of its own, where no limit of the host reaches it.",
        "Leave `runtimeClassName` out.",
    )
    USER_NAMESPACE = (
        "UserNamespace",
        "The pod has a user namespace of its own, and whether MPS holds its clients there is not known.",
        "Leave `hostUsers` out, or use a node with hard limits.",
    )


class StartCode(Code):
    """Why the container of an allocation may not start now. What is granted stays granted meanwhile."""

    RELEASED = "Released", "The allocation is gone.", "Nothing: the pod has ended."
    WAITS_FOR_DAEMON = (
        "WaitsForDaemon",
        "The MPS daemon of its GPUs does not serve containers now.",
        "See `gpufrac daemons`.",
    )
    GPU_NOT_KNOWN = "GpuNotKnown", "mpsd does not know its GPU (yet).", "Wait for mpsd's report; see its log."
    GPU_NOT_IN_MODE = (
        "GpuNotInMode",
        "Its GPU is not in the compute mode that it needs yet.",
        "Wait: mpsd sets it. The message says what keeps it from that.",
    )
    DAEMON_SERVES_OTHERS = (
        "DaemonServesOtherGpus",
        "The MPS daemon serves other GPUs than the allocation has.",
        "Wait until the daemons of its GPUs have made way for one.",
    )
    LIMIT_NOT_SET = (
        "LimitNotSet",
        "The MPS daemon would not hold it to its limit as things are now.",
        "Wait: mpsd sets the limit.",
    )
    NO_DIRECTORY = (
        "NoPipeDirectory",
        "The MPS daemon names no directory by which the container could reach it.",
        "Wait for mpsd's next report; see its log.",
    )
    NO_NAMESPACE = "NoNamespace", "It has no MPS namespace of its own yet.", "Wait: mpsd makes it."
    NOT_HELD = (
        "NotHeld",
        "A process that skips MPS could take its GPU.",
        "Wait: mpsd starts an MPS server that holds it.",
    )
    BURST_NEEDS_PROTOCOL_3 = (
        "DaemonTooOld",
        "Its limit is above its request, and its MPS daemon speaks protocol 2.",
        "Have the daemon replaced: `gpufrac mpsd replace`.",
    )
    HARD_LOST = (
        "HardLimitsLost",
        "It was granted with a hard limit, and the node can't enforce one any more.",
        "Mend what the message names, or end the pod.",
    )
    SHARES_IN_USE = (
        "SharesInUse",
        "Processes of the pod that had its shares before still live.",
        "Wait for them to end, or end them.",
    )
    FILE_NOT_WRITTEN = (
        "CdiFileNotWritten",
        "Its CDI file is just being written, or can't be.",
        "Nothing, or see `gpufrac status` for what keeps it from that.",
    )


class RefusalCode(Code):
    """What is wrong with a request by itself. One for lack of room has the code of what is in the way: OfferCode."""

    NO_SHARE = "NoShare", "The request names no device.", "This is the kubelet's fault: report it."
    SHARE_TWICE = "ShareTwice", "The request names a device twice.", "This is the kubelet's fault: report it."
    NOT_A_SHARE = "NotAShare", "The request names what is no device ID of ours.", "Ask for one that the node lists."
    UNKNOWN_RESOURCE = "UnknownResource", "The node does not offer the resource.", "Use a node that lists it."
    UNKNOWN_GPU = "UnknownGpu", "The request names a GPU or a group that is not on the node.", "Use one that is."
    UNKNOWN_SHARE = "UnknownShare", "The request names a device that is not listed.", "Ask for one that is."
    ONE_SHARE_ONLY = (
        "OneShareOnly",
        "A container may hold one share of this resource, and it asks for more.",
        "Ask for 1 of a larger resource, or for units.",
    )
    SEVERAL_GPUS = (
        "UnitsOfSeveralGpus",
        "The kubelet chose units of several GPUs, and they must lie on one.",
        "Ask for fewer units, or create the pod again.",
    )
    NOT_OFFERED_THERE = (
        "NotOfferedThere",
        "The resource has no shares on that GPU or group.",
        "The message says why; use another GPU or resource.",
    )
    RESOURCE_CLOSED = (
        "ResourceClosed",
        "The resource gives nothing on this node.",
        "The message says why; `gpufrac resources` shows it, too.",
    )
    NOT_SERVED = (
        "AnnotationsNotServed",
        "The node's config has no `annotations`, so annotated pods get nothing.",
        "Add the section, or use another node.",
    )
    NOT_FOR_ANNOTATED = (
        "GpuNotForAnnotated",
        "The GPU is not for annotated pods.",
        "Name another GPU, or add it to `annotations.gpus`.",
    )
    REQUEST_ABOVE_LIMIT = "RequestAboveLimit", "The request is above the limit.", "Lower it, or raise the limit."
    MORE_THAN_USABLE = (
        "MoreThanUsable",
        "The request or the limit is above what the GPU can give at all.",
        "Ask for less: the message says how much is usable.",
    )
    BEING_RELEASED = (
        "BeingReleased",
        "What the container held before is just being released.",
        "Nothing: it is tried again.",
    )
    KEY_IN_USE = (
        "KeyInUse",
        "What the kubelet runs has the key of other shares, so it can't be adopted.",
        "End the pod, so that it is granted anew.",
    )


PASSING = frozenset({RefusalCode.BEING_RELEASED})
FINAL: frozenset[str] = frozenset({*RefusalCode, *EnforcementCode, *IsolationCode} - PASSING)
"""Refusals that no waiting helps: the request itself, or the node as it is."""
