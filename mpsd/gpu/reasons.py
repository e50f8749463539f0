"""Codes of what is wrong with GPUs. They go out in mpsd's snapshot."""

from typing import Final

from mpsd.common.reason import Code, Reason


class GpuCode(Code):
    """What is wrong with one GPU."""

    XID = (
        "CriticalXid",
        "The driver reported an error (XID) after which the GPU must not be relied on.",
        "Wait: it is over after a quiet minute. If it comes again, look up the XID and reset the GPU.",
    )
    RECOVERY_ASKED = (
        "RecoveryAsked",
        "The driver asks for something to be done before the GPU is well again.",
        "Do what the message says: reset the GPU, or reboot the node.",
    )
    PROBE_FAILED = (
        "ProbeFailed",
        "The driver answers questions about the GPU with errors.",
        "Look for NVRM in the kernel's log; reset the GPU if it stays.",
    )
    HANGS = (
        "DriverHangs",
        "A call of the driver for this GPU does not return.",
        "Wait for it to return. Look for NVRM and Xid in the kernel's log; reboot if it stays.",
    )
    LOST = (
        "GpuLost",
        "The driver says that the GPU is gone from the bus.",
        "Look for Xid 79 in the kernel's log; reset the GPU or reboot.",
    )
    NOT_LISTED = (
        "NotListed",
        "The driver no longer lists the GPU.",
        "Look for NVRM and Xid in the kernel's log; reset the GPU or reboot.",
    )
    COMPUTE_MODE_NOT_SET = (
        "ComputeModeNotSet",
        "The GPU's compute mode could not be set or given back.",
        "Read the message; mpsd has to run as root. It is tried again every few seconds.",
    )
    FOREIGN_PROCESSES = (
        "ForeignProcesses",
        "Processes that are no containers of ours use the GPU, so it is not bound.",
        "End the processes that the message names, or exclude the GPU in the config.",
    )


class XidCode(Code):
    """What an XID means that does not keep its GPU from being used on."""

    OF_A_PROGRAM = (
        "XidOfAProgram",
        "An error (XID) that a program causes, or that needs nobody: other programs can go on using the GPU.",
        "Look into the program that ran there, if it comes again.",
    )


class InventoryCode(Code):
    """Why no GPUs are seen, or not all of them."""

    NOT_PROBED = ("NotProbed", "mpsd has just started and not looked at the GPUs yet.", "Wait some seconds.")
    DRIVER_FAILED = (
        "DriverFailed",
        "The driver can't be used or does not list its GPUs.",
        "Read the message: is the driver installed, loaded, and of the same version as its library?",
    )
    DRIVER_HANGS = (
        "DriverHangs",
        "The driver does not return from listing its GPUs.",
        "Look for NVRM and Xid in the kernel's log; reboot if it stays.",
    )
    NO_GPU = ("NoGpu", "The driver works and lists no GPU.", "Look whether the node has a GPU: nvidia-smi -L.")
    GPU_UNREAD = (
        "GpuUnread",
        "A GPU is listed, and could not be read since mpsd started.",
        "Read the message; look for NVRM and Xid in the kernel's log.",
    )


NOT_PROBED: Final = Reason(InventoryCode.NOT_PROBED, "GPUs are not probed yet")
NOT_LISTED: Final = Reason(GpuCode.NOT_LISTED, "the driver no longer lists this GPU")
