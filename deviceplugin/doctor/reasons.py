"""Codes of what `gpufrac doctor` finds by itself: all else has the code of who found it."""

from mpsd.common.reason import Code


class DoctorCode(Code):
    """What of a node's prerequisites `gpufrac doctor` found missing, or could not find out."""

    NOT_TOLD = ("NotTold", "The process that knows it does not answer.", "Start it, then look again.")
    NO_DRIVER = ("DriverNotUsable", "The NVIDIA driver gives no answer.", "Install the driver; see its log.")
    NO_GPU = ("NoGpuFound", "The driver lists no GPU.", "Look whether the node has one: lspci, nvidia-smi.")
    NO_MPS_BINARY = (
        "MpsBinaryNotFound",
        "The control program of MPS is not where it is looked for.",
        "Install the driver's programs, or set `mps.binary` or `mps.driverRoot`.",
    )
    PATH_TOO_LONG = ("SocketPathTooLong", "A socket's path would be too long.", "Set a shorter `mps.runRoot`.")
    CLOSED = (
        "DirectoryClosed",
        "Other users can't pass a directory above the run root.",
        "Give the directory that the message names the x bit for others.",
    )
    NO_DIRECTORY = (
        "DirectoryMissing",
        "A directory that gpufrac makes or reads is not there.",
        "Start mpsd and the plugin, which make theirs, or correct the config.",
    )
    FEW_FILES = ("FewOpenFiles", "MPS may need more open files.", "Raise LimitNOFILE of mpsd or of the runtime.")
    FEW_WATCHES = (
        "FewInotifyInstances",
        "The kernel allows few watches of directories to a user.",
        "Raise `fs.inotify.max_user_instances` with sysctl.",
    )
    DISK_FULL = ("DiskAlmostFull", "A disk that records are written to is almost full.", "Make room on it.")
    CDI_NOT_USABLE = (
        "CdiFileNotUsable",
        "Runtimes ignore a CDI file, or a device is defined twice.",
        "Correct or remove the file that the message names.",
    )
    STALE_FILE = (
        "CdiFileStale",
        "A CDI file of ours belongs to no allocation.",
        "Nothing: the plugin removes it once the kubelet was looked at. If it stays, see the plugin's log.",
    )
    NO_KUBELET = (
        "KubeletNotFound",
        "The kubelet's sockets are not there.",
        "Start it, or correct `kubelet` in config.",
    )
    NO_CLOCK = ("ClockNotKept", "Nothing is known to keep the clock in time.", "Run a time service such as chrony.")
    NO_CONFIG = (
        "ConfigNotNamed",
        "No config was named, so the default directories were looked at.",
        "Give the node's config file with `--config`.",
    )
    CANNOT_LOOK = ("CannotLook", "It can't be looked at.", "Run it as root on the node.")
