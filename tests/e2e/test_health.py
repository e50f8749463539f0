"""Real processes are asked how they are, and tell systemd: while they serve, hang, wait and stop."""

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli import gpufrac
from tests.e2e.pluginnode import SMALL, PluginNode
from tests.waiting import WAIT_S

RESOURCES = f"""
  - {{name: {SMALL}, memory: {{request: 8Gi}}, compute: {{mode: sm-sharing}}}}
"""


class Systemd:
    """The other side of NOTIFY_SOCKET of one process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.listener.bind(path)
        self.listener.settimeout(WAIT_S)
        self.heard: list[str] = []
        self.status = ""

    def hear(self) -> list[str]:
        """The lines of the next datagram."""
        lines = self.listener.recv(4096).decode().split("\n")
        self.heard += lines
        self.status = next((line for line in lines if line.startswith("STATUS=")), self.status)
        return lines

    def until(self, line: str) -> None:
        """Waits for a line from now on."""
        give_up_s = time.monotonic() + WAIT_S
        while line not in self.hear():
            assert time.monotonic() < give_up_s, self.heard

    def until_status(self, begin: str) -> None:
        """Waits for a status, which may be told already."""
        give_up_s = time.monotonic() + WAIT_S
        while not self.status.startswith(f"STATUS={begin}"):
            self.hear()
            assert time.monotonic() < give_up_s, self.heard

    def drain(self) -> None:
        """Forgets what came so far."""
        self.listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.hear()
        self.listener.settimeout(WAIT_S)

    def is_silent(self, wait_s: float) -> bool:
        """Whether nothing comes in this time."""
        self.listener.settimeout(wait_s)
        try:
            self.listener.recv(4096)
        except TimeoutError:
            return True
        finally:
            self.listener.settimeout(WAIT_S)
        return False


@pytest.fixture
def systemd(short_tmp: Path) -> Iterator[dict[str, Systemd]]:
    made = {name: Systemd(f"{short_tmp}/{name}.notify") for name in ("mpsd", "plugin")}
    yield made
    for one in made.values():
        one.listener.close()


def check(node: PluginNode, kind: str, process: str) -> tuple[int, str]:
    done = gpufrac("status", f"--check={kind}", "--process", process, "--run-root", f"{node.root}/run")
    return done.returncode, done.stdout


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def test_probes_and_systemd_are_told_how_both_processes_are(
    short_tmp: Path, systemd: dict[str, Systemd], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = PluginNode(short_tmp, gpus=1, resources=RESOURCES)
    monkeypatch.setenv("WATCHDOG_USEC", "600000")
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        node.kubelet.start()
        monkeypatch.setenv("NOTIFY_SOCKET", systemd["mpsd"].path)
        processes["mpsd"] = node.mpsd.start()
        systemd["mpsd"].until("READY=1")
        systemd["mpsd"].until("WATCHDOG=1")
        daemon = node.mpsd.until_ready().gpus[0].daemon
        assert daemon is not None
        assert daemon.pid is not None
        assert b"NOTIFY_SOCKET" not in environment_of(daemon.pid)
        assert b"WATCHDOG_USEC" not in environment_of(daemon.pid)
        systemd["mpsd"].until_status("ready")
        assert check(node, "ready", "mpsd") == (0, "ok: mpsd can serve\n")
        assert check(node, "live", "plugin")[0] == 3

        monkeypatch.setenv("NOTIFY_SOCKET", systemd["plugin"].path)
        processes["plugin"] = node.start_plugin()
        systemd["plugin"].until("READY=1")
        systemd["plugin"].until_status("ready")
        assert check(node, "ready", "plugin") == (0, "ok: plugin can serve\n")
        assert check(node, "attention", "plugin") == (0, "ok: nothing needs attention\n")

        for name, process in processes.items():
            process.send_signal(signal.SIGSTOP)
            code, said = check(node, "live", name)
            assert (code, said.partition(":")[0]) == (3, f"{name} does not answer")
            systemd[name].drain()
            assert systemd[name].is_silent(0.6), "it would be killed now"
            process.send_signal(signal.SIGCONT)
            systemd[name].until("WATCHDOG=1")
            assert check(node, "live", name)[0] == 0

        systemd["mpsd"].drain()
        processes["mpsd"].send_signal(signal.SIGTERM)
        systemd["mpsd"].until("STOPPING=1")
        assert processes["mpsd"].wait(WAIT_S) == 0
        systemd["plugin"].until_status("not ready: MpsdAway: ")
        systemd["plugin"].until("WATCHDOG=1")  # a restart of it would change nothing
        assert check(node, "live", "plugin")[0] == 0
        code, said = check(node, "ready", "plugin")
        assert (code, said.partition(":")[0]) == (1, "plugin is not ready")
        systemd["plugin"].drain()
        processes["plugin"].send_signal(signal.SIGTERM)
        systemd["plugin"].until("STOPPING=1")
        assert processes["plugin"].wait(WAIT_S) == 0
    finally:
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
        node.close()
