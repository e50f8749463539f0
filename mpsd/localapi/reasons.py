"""Codes of what mpsd's snapshot and answers say, beside those of GPUs (mpsd/gpu/reasons.py).

Each travels beside its message: field `reason` has the message, field `reason_code` the code.
"""

from mpsd.common.reason import Code


class DaemonCode(Code):
    """Why an MPS control daemon is in the state it is in."""

    OTHERS_STILL_THERE = (
        "OthersStillThere",
        "It is to take the place of other daemons, which end when nobody uses them.",
        "Wait: most end within seconds. `gpufrac clients` shows who uses the GPUs.",
    )
    START_FAILED = (
        "StartFailed",
        "The daemon could not be started.",
        "Read the message. It is tried again after a pause.",
    )
    CANNOT_START = (
        "CannotStart",
        "The daemon can't be started as things are configured; trying again soon can't help.",
        "Change what the message names. It is tried again every five minutes.",
    )
    FOREIGN_DAEMON = (
        "ForeignDaemon",
        "A process that mpsd did not start lives in the daemon's pipe directory.",
        "End the process that the message names.",
    )
    START_OVERDUE = (
        "StartOverdue",
        "The daemon did not come up in time and is ended.",
        "Nothing: it is started again. If it stays, read the daemon's log.",
    )
    EXITED = (
        "Exited",
        "The daemon's process ended by itself.",
        "Nothing: it is started again after a pause. Its last log lines say why.",
    )
    CONFIGURE_FAILED = (
        "ConfigureFailed",
        "The daemon's memory limits could not be set and read back.",
        "Read the message. It is tried again; after some failures the daemon counts as wedged.",
    )
    QUERY_FAILED = (
        "QueryFailed",
        "The daemon answered a query with an error or an unexpected value.",
        "Nothing: its limits are set again. Read the message if it stays.",
    )
    NO_ANSWER = (
        "NoAnswer",
        "The daemon did not answer in time.",
        "Nothing: it is asked again; after some failures it counts as wedged.",
    )
    SERVER_FAULT = (
        "ServerFault",
        "A client's fault keeps new clients out of the daemon's MPS server.",
        "End the clients of the server; the message names who faulted.",
    )
    SERVERS_END = (
        "ServersEndAtOnce",
        "MPS servers end as soon as they are started.",
        "Read the message and the server's log: the cause is there.",
    )
    LIMIT_NOT_PROVEN = (
        "LimitNotProven",
        "The daemon works, and a limit that new clients don't depend on did not read back.",
        "Nothing: containers have limits of their own.",
    )
    WEDGED = (
        "Wedged",
        "Several attempts in a row to query or configure the daemon failed.",
        "gpufrac clients shows who uses it; gpufrac mpsd replace --now ends it whoever does.",
    )
    REPLACED = (
        "Replaced",
        "The daemon was ended because it failed, and another takes its place.",
        "Nothing.",
    )
    REPLACED_WHEN_IDLE = (
        "ReplacedWhenIdle",
        "Another daemon takes its place as soon as its clients have ended.",
        "Wait for the clients, or end them: gpufrac clients; gpufrac mpsd replace --now.",
    )
    WAITS_FOR_CLIENTS = (
        "WaitsForClients",
        "The daemon is to end, and waits until its clients have ended.",
        "Nothing, or end the clients: gpufrac clients.",
    )
    OUTDATED = (
        "Outdated",
        "The daemon works, but is not as the config or the driver want it now.",
        "Wait for its clients, or gpufrac mpsd replace --now.",
    )
    OPERATOR_ASKED = ("OperatorAsked", "An operator had the daemon replaced.", "Nothing.")
    KILL_FAILED = (
        "KillFailed",
        "Processes of the daemon survived SIGKILL so far.",
        "Nothing: it is tried again.",
    )
    CANNOT_BE_KILLED = (
        "CannotBeKilled",
        "Processes of the daemon survive every SIGKILL; as a rule they hang in the kernel.",
        "Look for NVRM in the kernel's log; reboot the node.",
    )
    PROTOCOL_NOT_KNOWN = (
        "ProtocolNotKnown",
        "Which MPS protocols the control binary has could not be found out.",
        "Nothing: it is asked again. Or set mps.protocol to 2.",
    )
    PROTOCOL_NOT_THERE = (
        "ProtocolNotThere",
        "The config asks for an MPS protocol that driver or control binary don't have.",
        "Set mps.protocol to auto.",
    )
    PROTOCOL_KNOWN = ("ProtocolKnown", "The MPS protocol to speak is known now.", "Nothing.")


class HealthCode(Code):
    """Why a process does not live, or can't serve, where nothing else has a code for it."""

    LOOP_STUCK = (
        "LoopStuck",
        "A loop of the process does not go round any more: the process hangs.",
        "Restart it; its log has what it did last. Daemons and running containers stay.",
    )
    STARTING = ("Starting", "The process has just started.", "Wait some seconds.")
    GPU_NOT_SERVED = (
        "GpuNotServed",
        "No GPU can be shared now: each one, or its MPS daemon, is in trouble or not up yet.",
        "Wait some seconds. If it stays: `gpufrac gpus` and `gpufrac daemons` show why.",
    )


class ServerHoldCode(Code):
    """Why a GPU in EXCLUSIVE_PROCESS mode is not closed to whoever skips MPS."""

    NOT_HELD = (
        "ServerNotHeld",
        "No MPS server has its context on the GPU, so another process could take it.",
        "Wait: one is started. If it stays, end the process on the GPU that is no MPS client.",
    )


class NamespaceCode(Code):
    """Why an allocation can't start in its MPS namespace (protocol 3)."""

    PENDING = ("NamespacePending", "The namespace is not set up yet.", "Wait some seconds.")
    BAD_NAME = ("NamespaceBadName", "There can't be a namespace of this name.", "Give the resource a plain name.")
    PATH_TOO_LONG = (
        "NamespacePathTooLong",
        "The path of the namespace's socket is longer than a socket's path may be.",
        "Set a shorter mps.runRoot.",
    )
    NOT_THERE = ("NamespaceNotThere", "The daemon does not have the namespace.", "Read what the daemon says about it.")
    LIMITS_DIFFER = (
        "NamespaceLimitsDiffer",
        "The limits of the namespace read back as others than were set.",
        "End the clients in the namespace: limits can't be changed under them.",
    )
    SOCKET_MISSING = (
        "NamespaceSocketMissing",
        "The socket of the namespace is not where clients look for it.",
        "Nothing: it is made anew. End the clients in the namespace if it stays.",
    )
    NOT_LINKED = (
        "NamespaceNotLinked",
        "The socket could not be linked into the directory that containers mount.",
        "Read the message. It is tried again.",
    )
    NEEDS_PROTOCOL_3 = (
        "NeedsProtocol3",
        "The share may exceed its request, which takes MPS protocol 3, and the daemon speaks another.",
        "Replace the daemon: gpufrac mpsd replace.",
    )


class EvictionCode(Code):
    """Whom MPS evicted."""

    ABOVE_REQUEST = (
        "AboveRequest",
        "A client used more memory than its request, and another within its own needed it.",
        "Nothing: memory above a request is lent. Give the container a larger request where it must not happen.",
    )
    CLIENT_NOT_KNOWN = (
        "EvictedNotKnown",
        "The daemon's log counts an eviction, and which client it was is not clear.",
        "See which container ended then with CUDA_ERROR_MPS_CLIENT_TERMINATED.",
    )


class SharingCode(Code):
    """Why a GPU is left alone."""

    EXCLUDED = ("Excluded", "The config excludes the GPU.", "Nothing, or change gpus in the config.")
    MIG = ("MigEnabled", "MIG is enabled on the GPU.", "Disable MIG, or exclude the GPU.")
    NEW_NUMBER = (
        "NewNumber",
        "The GPU is new, and the config means another GPU by its number.",
        "Name GPUs by UUID in the config, or run gpufrac mpsd confirm-indices.",
    )
    NO_MEMORY = (
        "NoMemoryLeft",
        "Nothing of the GPU's memory is left after what driver and config reserve.",
        "Set a smaller gpus.memoryReserve.",
    )
    SOCKET_PATH_TOO_LONG = (
        "SocketPathTooLong",
        "The paths of its MPS sockets would be longer than a socket's path may be.",
        "Set a shorter mps.runRoot.",
    )
    GROUP_NOT_AS_CONFIGURED = (
        "GroupNotAsConfigured",
        "The GPUs can't be grouped as the config has it: one is missing, or allocations hold them as they were.",
        "Wait for these allocations to end, or correct gpus.groups in the config.",
    )
    DISSOLVED = ("GroupDissolved", "Its MPS daemon is of other GPUs by now, and is ending.", "Wait.")
    CLEANED_UP = ("CleanedUp", "Everything was cleaned up on request.", "Restart mpsd to share the GPU again.")


class HardLimitCode(Code):
    """What a node lacks to hold containers to memory limits by their cgroups."""

    NOT_PROBED = ("NotProbed", "mpsd has not looked yet.", "Wait some seconds.")
    DRIVER_TOO_OLD = (
        "DriverTooOld",
        "The driver has no memory limits for cgroups.",
        "Install driver 615 or newer.",
    )
    NO_CGROUP_V2 = (
        "NoCgroupV2",
        "There is no unified cgroup v2 hierarchy where it belongs.",
        "Boot with systemd.unified_cgroup_hierarchy=1, and mount the host's /sys/fs/cgroup in mpsd's pod.",
    )
    NOT_THE_TOP = (
        "CgroupNotTheTop",
        "What is mounted is a part of the cgroup hierarchy, not its top.",
        "Mount the host's /sys/fs/cgroup in mpsd's pod.",
    )
    DMEM_GAP = (
        "DmemGap",
        "The kernel's dmem controller does not reach the cgroups of containers.",
        "Set enforcement.enableDmem: true, or write +dmem to each cgroup.subtree_control.",
    )
    DMEM_NOT_ENABLED = (
        "DmemNotEnabled",
        "mpsd tried to switch the dmem controller on and could not.",
        "Run mpsd as root, with /sys/fs/cgroup writable.",
    )
    REFUSED = (
        "CallsRefused",
        "The driver refuses the calls for memory limits.",
        "Read the driver's error in the message.",
    )
    NO_GPU_TO_ASK = (
        "NoGpuToAsk",
        "No GPU that is well and without MIG could be asked.",
        "Mend the GPUs that the message names, or disable MIG.",
    )


class LimitReadingCode(Code):
    """Why the memory limits of a cgroup can't be told."""

    BAD_CGROUP = (
        "BadCgroup",
        "The path names no cgroup of this node.",
        "Nothing: as a rule its container is gone.",
    )
    NOT_ASKED = ("NotAsked", "The driver could not be asked.", "Read the message; mpsd may not know the GPU yet.")
    REFUSED = ("DriverRefused", "The driver answered with an error.", "Read the driver's error in the message.")
    NO_ANSWER = (
        "NoAnswer",
        "The driver has not answered in time.",
        "Nothing: it is asked again. If it stays, look at the GPU's health.",
    )


class ClientsCode(Code):
    """Why it can't be told who uses a GPU."""

    MPSD_AWAY = ("MpsdAway", "mpsd does not answer.", "See the state and the log of `gpufrac mpsd`.")
    GPU_NOT_KNOWN = ("GpuNotKnown", "mpsd does not know the GPU (yet).", "Wait, or check the GPU's UUID.")
    NO_ANSWER = ("NoAnswer", "Driver or MPS daemon did not answer in time.", "Ask again; look at the GPU's health.")
    FAILED = ("CountFailed", "Driver or MPS daemon answered with an error.", "Read the message.")
    NO_HOST_PIDS = (
        "NoHostPids",
        "The MPS daemon knows its clients by PID 0 only.",
        "Run mpsd in the host's PID namespace (hostPID: true).",
    )
    NOT_LISTED = (
        "ProcessesNotListed",
        "The driver does not list processes, and the MPS daemon can't be asked.",
        "Wait for the daemon to be ready.",
    )


class TerminationCode(Code):
    """Why a client was not ended, or not as asked."""

    NOT_CONFIRMED = (
        "NotConfirmed",
        "The MPS daemon did not confirm that the client's contexts are gone.",
        "Ask again, or with --force: that may take its neighbours down.",
    )
    NOT_AN_MPS_CLIENT = (
        "NotAnMpsClient",
        "The process uses the GPU without MPS.",
        "Ask again with --kill: only killing the process ends it.",
    )
    NOT_THE_ALLOCATIONS = (
        "NotTheAllocations",
        "The process is no longer the allocation's.",
        "Nothing: its PID was used again.",
    )
    CANNOT_BE_KILLED = (
        "CannotBeKilled",
        "The process survives SIGKILL; as a rule it hangs in the kernel.",
        "Look for NVRM in the kernel's log; reboot the node.",
    )


class ConfigCode(Code):
    """Why a changed config file is not in force."""

    REFUSED = (
        "ConfigRefused",
        "The new file has errors, and the config from before stays in force.",
        "Correct what the message names: gpufrac config check FILE.",
    )


class WarningCode(Code):
    """What is short of perfect on a node, as far as mpsd sees it."""

    HOST_FALLS_SHORT = (
        "HostFallsShort",
        "mpsd lacks a right or a thing of the host, so that something it should do does not work.",
        "Give it what the message names.",
    )
    STATE_NOT_SAVED = (
        "StateNotSaved",
        "What mpsd must remember over its own restart can't be written.",
        "Free space under the state directory, or mount it writable.",
    )
    INDICES_MOVED = (
        "IndicesMoved",
        "The driver numbers GPUs anew, and the config's indices mean the GPUs of before.",
        "Name GPUs by UUID in the config, or confirm the new numbers.",
    )
    GPU_NOT_HERE = (
        "ConfigNamesMissingGpu",
        "The config names a GPU that is not on this node.",
        "Correct the config, or look why the GPU is missing.",
    )
    LIMITS_NOT_LOOKED_AFTER = (
        "LimitsNotLookedAfter",
        "Hard limits and leaked guarantees could not be looked after.",
        "Read the message. It is tried again.",
    )
    GUARANTEE_LEAKED = (
        "GuaranteeLeaked",
        "Memory stays guaranteed to a container that is gone.",
        "Set enforcement.leaks: repair, or do what the message says.",
    )

    GPU_NEVER_READ = (
        "GpuNeverRead",
        "The driver counts more GPUs than it can read.",
        "Look for NVRM and Xid in the kernel's log; reset the GPU or reboot.",
    )
    NO_HOST_PIDS = (
        "NoHostPids",
        "An MPS daemon sees its clients as PID 0.",
        "Run mpsd in the host's PID namespace (hostPID: true).",
    )
    DAEMON_WITHOUT_GPU = (
        "DaemonWithoutGpu",
        "An MPS daemon runs, and none of its GPUs is on this node.",
        "Delete the pods that gpufrac allocations names for it; then it ends.",
    )
    COMPUTE_MODE_INHERITED = (
        "ComputeModeInherited",
        "A compute mode was found that may be an earlier mpsd's; it is given back so.",
        "If that is not wanted: nvidia-smi -i UUID -c DEFAULT while nothing is bound there.",
    )
    COMPUTE_MODE_CONTESTED = (
        "ComputeModeContested",
        "Somebody else set the compute mode of a GPU that is bound.",
        "Find what runs nvidia-smi -c, or another MPS agent, on the node.",
    )
    PROCESSES_NOT_LISTED = (
        "ProcessesNotListed",
        "A GPU's driver lists no processes, so who skips MPS is not seen.",
        "Nothing; some drivers can't.",
    )
