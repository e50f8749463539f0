"""The two long-lived processes of a simulated node: mpsd and the device plugin, as children of ours."""

import os
import signal
import subprocess
import sys

import deviceplugin
from deviceplugin.sim.node.config import FILE_NAME
from mpsd.common.errors import GpufracError

STOP_TIMEOUT_S = 20.0
LOG_TAIL_LINES = 20


class NodeError(GpufracError):
    """The simulated node can't be brought up, or one of its processes died."""


class Children:
    """By name: `mpsd` or `plugin`."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def log_path(self, name: str) -> str:
        """Where it logs."""
        return os.path.join(self._directory, "log", f"{name}.log")

    def check(self) -> None:
        """Raises NodeError when a process of the node has died."""
        for name, process in self._running.items():
            code = process.poll()
            if code is not None:
                how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
                raise NodeError(f"cannot go on: gpufrac {name} died ({how}){self.log_tail(name)}")

    def start(self, name: str) -> int:
        """Starts `mpsd` or `plugin`; its PID."""
        config_path = os.path.join(self._directory, FILE_NAME)
        with open(self.log_path(name), "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "deviceplugin.cli.main", name, "--config", config_path],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(self._directory),
                start_new_session=True,  # Ctrl-C is for us: we stop them in order
            )
        self._running[name] = process
        return process.pid

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Ends `mpsd` or `plugin` and waits for it; SIGKILL after STOP_TIMEOUT_S."""
        process = self._running.pop(name, None)
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(number)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()

    def restart(self, name: str) -> int:
        """Ends and starts `mpsd` or `plugin`; the new PID."""
        self.stop(name)
        return self.start(name)

    def log_tail(self, name: str) -> str:
        """The last lines of its log, to be put behind a message."""
        try:
            with open(self.log_path(name), encoding="utf-8", errors="replace") as file:
                lines = file.read().splitlines()[-LOG_TAIL_LINES:]
        except OSError:
            lines = []
        return "\n".join([f"\nlast lines of the log of {name}:", *(f"  {line}" for line in lines or ["(none)"])])


def _environment(directory: str) -> dict[str, str]:
    environment = {**os.environ, "GPUFRAC_SIM_NODE": directory}
    root = os.path.dirname(os.path.dirname(os.path.abspath(deviceplugin.__file__)))
    if "site-packages" not in root:  # run from a checkout: the children need it on their path, too
        environment["PYTHONPATH"] = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    return environment
