"""Where a plugin keeps every other one out: a lock file in each directory that two must not share."""

import os

from deviceplugin.grants.statefiles import LOCK, state_directory

SHARED_LOCK = ".gpufrac-plugin.lock"
"""In directories of others: neither a CDI spec nor a socket, so nobody reads or removes it (kubelet 1.36 verified)."""


def lock_files(run_root: str, state_root: str, cdi_directory: str, device_plugins: str) -> tuple[str, ...]:
    """Their paths, of the directories that are there."""
    ours = (run_root, state_directory(state_root))
    paths = [os.path.join(directory, LOCK) for directory in ours]
    paths += [os.path.join(directory, SHARED_LOCK) for directory in (cdi_directory, device_plugins)]
    return tuple(path for path in paths if os.path.isdir(os.path.dirname(path)))
