"""Where things of a node are, below one directory."""

from pathlib import Path

from mpsd.localapi.snapshot import Places


def places(root: Path) -> Places:
    return Places(
        cdi_directory=str(root / "cdi"),
        state_root=str(root / "state"),
        run_root=str(root / "run"),
        log_root=str(root / "log"),
        device_plugins=str(root / "kubelet" / "device-plugins"),
        pods=str(root / "kubelet" / "pods"),
    )
