"""What of gpufrac is on a node where none of its processes runs: what has to be undone first, and what may go then.

Only what we name ourselves is removed, never a directory as a whole: a configured root may have things of others in it.
"""

import glob
import os
import shutil
from collections.abc import Iterator

import msgspec

from deviceplugin.reconcile import leftovers
from mpsd.common import processes
from mpsd.config.model import NodeConfig
from mpsd.daemon.process import is_alive
from mpsd.daemon.state import Saved
from mpsd.host import cgroups
from mpsd.localapi.snapshot import Places

CGROUPS = tuple(f"/sys/fs/cgroup/{at}{cgroups.OWN}" for at in ("", "*/"))
START_MPSD = "start mpsd, and run: gpufrac mpsd cleanup"


def undone(config: NodeConfig) -> list[str]:
    """What only mpsd can undo, and has not: daemons that run, compute modes that are ours still. Empty: nothing."""
    path = next((path for path in config.mpsd_state_files if os.path.lexists(path)), None)
    if path is None:
        return []
    try:
        with open(path, "rb") as file:
            saved = msgspec.json.decode(file.read(), type=Saved)
    except (OSError, msgspec.MsgspecError) as error:
        return [
            f"cannot read {path}, so whether every compute mode was given back is not known ({error}): {START_MPSD}"
        ]
    if saved.boot_id != processes.boot_id():
        return []  # a reboot ended the daemons, and gave the compute modes back
    found = [
        f"an MPS daemon of ours runs (pid {identity.pid}, {name}): {START_MPSD}"
        for name, identity in saved.daemons.items()
        if is_alive(identity)
    ]
    return found + [
        f"GPU {uuid} has a compute mode of ours, and {mode} is to be given back: {START_MPSD}"
        for uuid, mode in saved.compute_modes.items()
    ]


def there(config: NodeConfig, *, logs: bool) -> list[str]:
    """Paths of ours below the configured roots, sorted; logs of daemons only with `logs`."""
    return sorted(path for pattern in _patterns(config, logs=logs) for path in glob.glob(pattern))


def remove(config: NodeConfig, *, logs: bool) -> tuple[list[str], list[str]]:
    """Removes it all. What was removed, and what is left with the reason. May be repeated after it was cut short."""
    left = leftovers.clear(Places.of(config))
    if left:
        return [], left  # a pod holds a share: all stays as it is
    if config.backend == "nvml":
        left += [
            f"processes are in {path}"
            for path in cgroups.clear([path for pattern in CGROUPS for path in glob.glob(pattern)])
        ]
    removed = []
    # What says what is to be undone goes last.
    for path in sorted(there(config, logs=logs), key=lambda path: os.path.basename(path).startswith("mpsd.json")):
        try:
            _remove(path)
            removed.append(path)
        except OSError as error:
            left.append(f"cannot remove {error.filename or path}: {error.strerror}")
    for root in (config.mps.run_root, config.mps.log_root, config.state_root):
        if os.path.isdir(root) and not os.listdir(root):
            os.rmdir(root)
            removed.append(root)
    return removed, left


def others(config: NodeConfig, *, logs: bool) -> list[str]:
    """What is left in the configured roots that is not ours to remove, or that was to be kept."""
    roots = (config.mps.run_root, config.state_root, *([config.mps.log_root] if logs else []))
    return [os.path.join(root, name) for root in roots if os.path.isdir(root) for name in sorted(os.listdir(root))]


def _remove(path: str) -> None:
    """A file, a link, or a directory with all that is in it."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def _patterns(config: NodeConfig, *, logs: bool) -> Iterator[str]:
    run, log, state = (glob.escape(root) for root in (config.mps.run_root, config.mps.log_root, config.state_root))
    yield from (f"{run}/mpsd.*", f"{run}/plugin.*", f"{run}/mps", f"{log}/mpsd.lock")
    yield from (f"{state}/mpsd.*", f"{state}/plugin", f"{state}/selftest.json", f"{state}/events")
    if config.backend == "simulated":
        yield f"{run}/sim"
    if logs:
        yield f"{log}/mps"
