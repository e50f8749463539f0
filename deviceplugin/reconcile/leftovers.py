"""What the plugin leaves on a node: who still holds shares, and the files that go when nobody does. For an uninstall,
while the plugin is stopped."""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress

from cdi.atomic import remove_file
from cdi.errors import CdiError
from cdi.writer import SpecDirectory
from deviceplugin.grants.ledger import Ledger
from deviceplugin.grants.statefiles import DRAINS, LEDGER, LOCK, NODE, state_directory
from deviceplugin.kubelet import checkpoint
from deviceplugin.kubelet.places import pod_exists
from deviceplugin.plan import render
from deviceplugin.plan.allocation import Allocation
from mpsd.common.errors import GpufracError
from mpsd.localapi.snapshot import Places

STATE_FILES = (NODE, DRAINS, LOCK)
"""Beside the ledger; they mean nothing without the plugin."""


def clear(places: Places) -> list[str]:
    """Removes our CDI files, the records of allocations that nobody holds, and then the plugin's other state. What
    could not be, or may not: a pod that holds a share has to go first."""
    return [*_clear_cdi(places.cdi_directory), *_clear_state(places)]


def _clear_cdi(directory: str) -> list[str]:
    if not os.path.isdir(directory):
        return []
    try:
        with SpecDirectory(directory, render.VENDOR, render.CLASS) as specs:
            specs.collect_temp_files()
            return [str(error) for error in specs.apply({}).errors.values()]
    except CdiError as error:
        return [str(error)]


def _clear_state(places: Places) -> list[str]:
    state = state_directory(places.state_root)
    directory = os.path.join(state, LEDGER)
    if not os.path.isdir(directory):
        return []
    left: list[str] = []
    try:
        ledger = Ledger(directory)
        try:
            allocations, problems = ledger.load()
            holders, unknown = _holders(allocations, places)
            for allocation in allocations:
                if who := holders.get(allocation.key) or (unknown if allocation.container is None else ""):
                    left.append(f"a share of {allocation.resource} is held: {who}")
                else:
                    ledger.remove(allocation.key)
            left += problems
        finally:
            ledger.close()
        if not left:
            for name in STATE_FILES:
                remove_file(os.path.join(state, name))
            for path in (directory, state):
                with suppress(OSError):  # something of another's is in it
                    os.rmdir(path)
    except (GpufracError, OSError) as error:
        left.append(str(error))
    return left


def _holders(allocations: Iterable[Allocation], places: Places) -> tuple[Mapping[str, str], str]:
    """Which allocations pods still hold, and by whom; and why that can't be told of the others, empty when it can."""
    found = {}
    entries: list[checkpoint.Entry] = []
    unknown = ""
    try:
        entries = checkpoint.read(places.device_plugins)
    except checkpoint.CheckpointError as error:
        unknown = str(error)
    to_do = "delete that pod first"
    if not os.path.isdir(places.pods):
        to_do = f"whether it is gone can't be told, as {places.pods} is not to be seen: run this where it is"
    for allocation in allocations:
        for uid, container in _named(allocation, entries):
            if pod_exists(places.pods, uid):
                found[allocation.key] = f"container {container} of the pod with UID {uid}: {to_do}"
    return found, unknown


def _named(allocation: Allocation, entries: Iterable[checkpoint.Entry]) -> Iterable[tuple[str, str]]:
    """The pods and containers that may hold it: of a share those of the kubelet's checkpoint."""
    if (own := allocation.container) is not None:
        return [(own.pod_uid, own.container)]
    shares = allocation.resource, allocation.device_ids
    return [
        (entry.pod_uid, entry.container)
        for entry in entries
        if allocation.key == entry.allocation_key
        or (entry.allocation_key is None and shares == (entry.resource, entry.device_ids))
    ]
