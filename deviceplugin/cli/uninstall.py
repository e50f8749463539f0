"""What `gpufrac uninstall node` does, and says."""

import os
import threading
from contextlib import ExitStack, suppress

from deviceplugin.cli.output import Failure, counted, say
from deviceplugin.cli.processes import PLUGIN_RUNS, answers, clean_up
from deviceplugin.grants.instance import lock_files
from deviceplugin.reconcile import traces
from mpsd.common.processlock import ProcessLock, ProcessLockError
from mpsd.config.model import NodeConfig


def dry(config: NodeConfig, *, logs: bool) -> None:
    """Says what would be done, and what is in the way."""
    if answers(config.plugin_socket):
        say(PLUGIN_RUNS)
    if answers(config.mpsd_socket):
        say("would have mpsd end its daemons, give compute modes back, and remove CDI files and records")
        say("would then, when mpsd has stopped:")
    for text in [] if answers(config.mpsd_socket) else traces.undone(config):
        say(f"in the way: {text}")
    found = traces.there(config, logs=logs)
    for path in found:
        say(f"would remove {path}")
    if not found:
        say("nothing of gpufrac is in the directories of this config")


def while_mpsd_runs(config: NodeConfig, *, yes: bool) -> bool:
    """Has a running mpsd undo what only it can. Whether one runs. Raises Failure with what could not be undone."""
    if answers(config.plugin_socket):
        raise Failure(PLUGIN_RUNS)
    if not answers(config.mpsd_socket):
        return False
    clean_up(config.mps.run_root, yes=yes)
    return True


def after(config: NodeConfig, *, logs: bool) -> None:
    """Removes what is left where no process runs. Raises Failure."""
    locks = lock_files(config.mps.run_root, config.state_root, config.cdi.directory, config.kubelet_device_plugins)
    mpsd_locks = tuple(path for path in config.mpsd_locks if os.path.isdir(os.path.dirname(path)))
    fresh = {path for path in (*locks, *mpsd_locks) if not os.path.exists(path)}
    with ExitStack() as held:
        try:
            held.enter_context(ProcessLock("plugin", locks, wait_s=0.0, stop=threading.Event()))
            held.enter_context(ProcessLock("mpsd", mpsd_locks, wait_s=0.0, stop=threading.Event()))
        except ProcessLockError as error:
            raise Failure(f"cannot begin: {error}: stop it first") from error
        if undone := traces.undone(config):
            raise Failure("\n".join(undone))
        removed, left = traces.remove(config, logs=logs)
        for path in () if left else locks:  # those in directories of others
            with suppress(OSError):
                os.unlink(path)
    removed = [path for path in removed if path not in fresh]
    for path in removed:
        say(f"removed {path}")
    if left:
        raise Failure("\n".join(f"left: {text}" for text in left))
    for path in traces.others(config, logs=logs):
        say(f"not ours, so it stays: {path}")
    count = counted(len(removed), "path")
    say(f"Nothing of gpufrac is left on this node: {count} removed." if removed else "Nothing of gpufrac was here.")
    if config.kubernetes.access != "off":
        from deviceplugin.kubernetes.node import CONDITION, DRIVER_LABEL

        say(f"At the API server its label can go: kubectl label node NAME {DRIVER_LABEL}-")
        say(f"The node's condition {CONDITION} stays there as Unknown.")
