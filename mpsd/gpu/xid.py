"""XID -> verdict (pure). An XID is the driver's error number for one GPU; most are a program's fault, some the GPU's.

Sources: CATALOG is NVIDIA's "Analyzing Xid Errors with the Xid Catalog", column "Resolution Bucket (Immediate Action)";
PLUGIN is the list of application errors that NVIDIA/k8s-device-plugin ignores (internal/rm/health.go).
"""

from collections.abc import Iterable
from enum import Enum
from typing import Final, NamedTuple


class Verdict(Enum):
    """IGNORE: other programs can go on using the GPU. CRITICAL: nothing new should start on it."""

    IGNORE = "ignore"
    CRITICAL = "critical"


class Source(Enum):
    """Where a verdict comes from: NVIDIA's XID catalogue, NVIDIA's device plugin, or nowhere (UNKNOWN)."""

    CATALOG = "NVIDIA Xid catalog"
    PLUGIN = "NVIDIA k8s-device-plugin"
    UNKNOWN = "not in the table"


class Xid(NamedTuple):
    """One row. `action` is the catalogue's immediate action, empty where it names none."""

    xid: int
    name: str
    verdict: Verdict
    action: str
    source: Source

    @property
    def text(self) -> str:
        """E.g. `XID 79 (GPU has fallen off the bus)`."""
        return f"XID {self.xid} ({self.name})"


def _ignore(action: str, name: str, xids: Iterable[int]) -> Iterable[Xid]:
    return (Xid(xid, name, Verdict.IGNORE, action, Source.CATALOG) for xid in xids)


def _critical(action: str, name: str, xids: Iterable[int]) -> Iterable[Xid]:
    return (Xid(xid, name, Verdict.CRITICAL, action, Source.CATALOG) for xid in xids)


RECOVERY_ACTION_CHANGED: Final = 154

_ROWS: Final = (
    # One program's fault: the catalogue asks for that program's restart, or for nothing.
    *_ignore("RESTART_APP", "GPU stopped processing", (8,)),
    *_ignore("RESTART_APP", "invalid or corrupted push buffer stream", (11, 25, 32)),
    *_ignore("RESTART_APP", "graphics engine exception", (13,)),
    *_ignore("IGNORE", "injected error", (14,)),
    *_ignore("RESTART_APP", "GPU memory page fault", (31,)),
    *_ignore("IGNORE", "driver firmware error", (37, 38)),
    *_ignore("RESTART_APP", "copy engine exception", (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136))),
    *_ignore("IGNORE", "GPU stopped processing", (43,)),
    *_ignore("IGNORE", "graphics engine fault during context switch", (44,)),
    *_ignore("WORKFLOW_XID_45", "preemptive cleanup, due to previous errors", (45,)),
    *_ignore("RESTART_APP", "video processor exception", (60,)),
    *_ignore("IGNORE", "GPU memory remapping event", (63,)),
    *_ignore("IGNORE", "illegal access by driver", (66, 67)),
    *_ignore("RESTART_APP", "video decoder exception", (68, 83, 84, 88, 89, 96, 97, 98)),
    *_ignore("RESTART_APP", "graphics engine class error", (69,)),
    *_ignore("RESTART_APP", "corrupted data sent to GPU", (80,)),
    *_ignore("RESTART_APP", "JPEG engine error", (82, *range(99, 106))),
    *_ignore("RESTART_APP", "optical flow engine exception", (86, 139)),
    *_ignore("IGNORE", "high single-bit ECC error rate", (92,)),
    *_ignore("IGNORE", "InfoROM wear limit exceeded", (93,)),
    *_ignore("RESTART_APP", "contained memory error", (94,)),
    *_ignore("IGNORE", "SMBPBI test message", (106, 107)),
    # The catalogue says RESET_GPU, the plugin counts it as an application error: one long kernel can cause it.
    Xid(109, "context switch timeout", Verdict.IGNORE, "RESET_GPU", Source.PLUGIN),
    *_ignore("IGNORE", "corrected C2C errors", (121,)),
    *_ignore("IGNORE", "NVLink privilege error", (137,)),
    *_ignore("IGNORE", "CUDA fast path error", (141,)),
    # Says nothing by itself: the action is read.
    *_ignore("XID_154", "GPU recovery action changed", (RECOVERY_ACTION_CHANGED,)),
    *_ignore("IGNORE", "resource retirement failure", (157,)),
    *_ignore("IGNORE", "channel retirement", (160, 161)),
    # Everything else is critical; these rows only give the well-known ones their names.
    *_critical("RESET_GPU", "GPU stopped processing", (46,)),
    *_critical("WORKFLOW_XID_48", "double bit ECC error", (48,)),
    *_critical("CHECK_MECHANICALS", "auxiliary power is not connected", (54,)),
    *_critical("RESET_GPU", "internal micro-controller halt", (62,)),
    *_critical("RESET_GPU", "GPU memory remapping failure", (64,)),
    *_critical("WORKFLOW_NVLINK_ERR", "NVLink error", (74,)),
    *_critical("UPDATE_SWFW", "vGPU start error", (78,)),
    *_critical("RESTART_BM", "GPU has fallen off the bus", (79,)),
    *_critical("RESET_GPU", "uncontained memory error", (95,)),
    *_critical("RESET_GPU", "security fault error", (110,)),
    *_critical("RESET_GPU", "GSP RPC timeout", (119,)),
    *_critical("RESET_GPU", "GSP error", (120,)),
    *_critical("RESET_GPU", "link training failed", (136,)),
    *_critical("RESET_GPU", "unrecovered ECC error", (140,)),
    *_critical("RESET_GPU", "GPU initialization error", (143,)),
    *_critical("WORKFLOW_NVLINK5_ERR", "NVLink error", range(144, 151)),
    *_critical("RESTART_VM", "key rotation error", (151,)),
    *_critical("RESET_GPU", "NVLink software defined error", (155,)),
    *_critical("RESET_GPU", "resource retirement event", (156,)),
    *_critical("RESET_GPU", "GPU fatal timeout", (158,)),
    *_critical("CHECK_UVM", "CHI non-data error", (159,)),
    *_critical("", "PCIe fatal timeout", (167,)),
    *_critical("", "reduced GPU memory capacity", (168,)),
    *_critical("", "internal micro-controller halt", (169,)),
    *_critical("", "uncorrectable DRAM error", (171,)),
    *_critical("", "uncorrectable SRAM error", (172,)),
)

TABLE: Final = {row.xid: row for row in _ROWS}


def verdict(xid: int) -> Xid:
    """The row of an XID. One that the table does not know is CRITICAL: a false alarm costs less than a sick GPU."""
    return TABLE.get(xid) or Xid(xid, "unknown error", Verdict.CRITICAL, "", Source.UNKNOWN)
