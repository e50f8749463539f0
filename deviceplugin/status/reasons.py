"""Codes of what status finds by itself: of the plugin's own process, of its metrics, and what needs somebody."""

from mpsd.common.reason import Code


class ProcessCode(Code):
    """What a process of gpufrac lacks, or why it shows nothing."""

    NOT_REACHABLE = (
        "ProcessNotReachable",
        "A process of gpufrac does not answer on its socket.",
        "Start it, or see its log; with other directories, give `--run-root`.",
    )
    NOT_UNDERSTOOD = (
        "AnswerNotUnderstood",
        "A process of gpufrac answers what this command can't use.",
        "Use the command of the version that runs.",
    )
    PROCESSES_NOT_SEEN = (
        "ProcessesNotSeen",
        "The plugin can't see or read the processes of containers.",
        "Run it in the host's PID namespace (hostPID: true), as root and privileged.",
    )
    NOT_THE_HOSTS = (
        "DirectoryNotTheHosts",
        "A directory that must be the host's is not.",
        "Mount the directory from the host at the same path.",
    )
    NODE_NAME_NOT_GIVEN = (
        "NodeNameNotGiven",
        "The plugin is in a pod and does not know its node's name.",
        "Set NODE_NAME by the downward API, or `kubernetes.nodeName`.",
    )
    RECORD_NOT_USABLE = (
        "RecordNotUsable",
        "A record of allocations or drains could not be used, and was set aside.",
        "Read the message: it says where the file is and what to do.",
    )


class MetricsCode(Code):
    """Why no metrics are served."""

    ADDRESS_UNKNOWN = (
        "AddressUnknown",
        "The name of the address is not known.",
        "Name an address of this node in `metrics.address`.",
    )
    ADDRESS_IN_USE = (
        "AddressInUse",
        "Another process listens there.",
        "End it, or set another `metrics.address`.",
    )
    ADDRESS_NOT_HERE = ("AddressNotHere", "The node has no such address.", "Set another `metrics.address`.")
    CANNOT_LISTEN = ("CannotListen", "The address can't be listened on.", "Read the message; see `metrics.address`.")


class AttentionCode(Code):
    """What else `gpufrac status` names under what needs attention: all others have the code of their cause."""

    CONFIG_NEEDS_RESTART = (
        "ConfigNeedsRestart",
        "Keys of the config file have changed that take effect at a restart.",
        "Restart the process that the message names.",
    )
    ANNOTATIONS_DROPPED = (
        "AnnotationsNoLongerServed",
        "An annotated pod lives, and the config has no `annotations` any more.",
        "Put the section back, or delete the pod.",
    )
    DRAINED_GPU_GONE = (
        "DrainedGpuGone",
        "A GPU that an operator drained is no longer on the node.",
        "If it is not to come back: `gpufrac undrain`.",
    )
    CLAIMED_BY_OTHERS = (
        "ClaimedByOthers",
        "Processes of a pod say that an allocation of another pod is theirs.",
        "Look at the pod that the message names: its environment was copied or made up.",
    )
    SELF_TEST_FAILED = (
        "SelfTestFailed",
        "The last self-test found limits that do not hold.",
        "See `gpufrac selftest`.",
    )
    SELF_TEST_NOT_READ = (
        "SelfTestNotRead",
        "The result of the last self-test can't be used.",
        "Run `gpufrac selftest` again.",
    )
