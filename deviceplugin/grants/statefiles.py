"""Where the plugin keeps what outlives it."""

import os

LEDGER = "allocations"
"""The directory of records."""
NODE, DRAINS, LOCK = "node.json", "drains.json", "plugin.lock"
"""Beside it: GPUs as last known, GPUs that an operator drained, and the lock of the one instance."""


def state_directory(state_root: str) -> str:
    """Where the plugin keeps its state, below the configured root."""
    return os.path.join(state_root, "plugin")
