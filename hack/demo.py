"""A short story on a simulated node: what happens, as an operator would see it. Exit code 0 when it ends as told."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from deviceplugin.sim.node.node import SimulatedNode
from deviceplugin.sim.objects.manifests import LoadedPod, load_manifests
from mpsd.config.load import load_config
from mpsd.localapi.client import MpsdClient
from mpsd.localapi.snapshot import DaemonStatus

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
GPUFRAC = str(Path(sys.executable).with_name("gpufrac"))
STEPS = 9


class Story:
    """Prints each step when it begins and what came of it when it ends."""

    def __init__(self) -> None:
        self._number = 0

    def step(self, title: str, action: Callable[[], list[str]]) -> None:
        self._number += 1
        print(f"[{self._number}/{STEPS}] {title} ... ", end="", flush=True)
        begun_s = time.monotonic()
        lines = action()
        print(f"done in {time.monotonic() - begun_s:.1f} s", flush=True)
        for line in lines:
            print(f"      {line}", flush=True)


def gpufrac(*arguments: str, expect: int = 0) -> list[str]:
    """Runs the command line; its output, line by line."""
    got = subprocess.run([GPUFRAC, *arguments], capture_output=True, text=True, check=False)
    need(got.returncode == expect, f"gpufrac {' '.join(arguments)}: exit code {got.returncode}: {got.stderr}")
    return (got.stdout + got.stderr).rstrip().splitlines()


def need(condition: object, text: str) -> None:
    if not condition:
        raise SystemExit(f"\ndemo: this went wrong: {text}")


def pods(name: str) -> list[LoadedPod]:
    return [loaded for loaded in load_manifests(str(EXAMPLES / name)) if isinstance(loaded, LoadedPod)]


def main() -> None:
    story = Story()
    with tempfile.TemporaryDirectory(prefix="gf-", dir="/tmp") as directory:
        config = str(EXAMPLES / "config.yaml")
        story.step("Check the config", lambda: gpufrac("config", "check", config))
        node = SimulatedNode(directory, load_config(config), gpus=1)
        try:
            tell(story, node, f"{directory}/run")
        finally:
            node.close()
    print("\nThat was a whole node in one directory, and it is gone. Try your own: .venv/bin/gpufrac sim run --help")


def tell(story: Story, node: SimulatedNode, run_root: str) -> None:
    mpsd = MpsdClient(f"{run_root}/mpsd.sock")

    def daemon() -> DaemonStatus:
        status = mpsd.snapshot().gpus[0].daemon
        assert status is not None
        return status

    def start() -> list[str]:
        node.start()
        return gpufrac("resources", "--run-root", run_root)

    def admit() -> list[str]:
        report = node.admit(pods("pods.yaml"))
        need(all(pod["phase"] == "Admitted" for pod in report["pods"]), str(report["pods"]))
        return [
            f"{pod['namespace']}/{pod['name']}/{container['name']}: {container['resource']}, "
            f"limit {container['allocation']['limitBytes'] >> 30} GiB, {container['allocation']['enforcement']}"
            for pod in report["pods"]
            for container in pod["containers"]
        ]

    def over_the_limit() -> list[str]:
        environment = node.client_environment("default", "notebook")
        lines = []
        for size, expected in (("20Gi", 0), ("21Gi", 1)):
            got = subprocess.run(
                [sys.executable, "-m", "mpsd.sim.cuda", "--allocate", size],
                env=environment,
                cwd=EXAMPLES.parent,
                capture_output=True,
                text=True,
                check=False,
            )
            need(got.returncode == expected, got.stdout + got.stderr)
            lines.append(f"notebook allocates {size}: {got.stdout.strip()}{'' if expected else ' bytes granted'}")
        return lines

    def full() -> list[str]:
        waiting, refused = node.admit(pods("too-big.yaml"))["pods"]
        need((waiting["phase"], refused["phase"]) == ("Pending", "Failed"), f"{waiting} {refused}")
        node.delete(refused["namespace"], refused["name"])
        return [f"{pod['name']}: {pod['phase']}: {pod['message']}" for pod in (waiting, refused)]

    def daemon_dies() -> list[str]:
        before = daemon()
        assert before.pid is not None
        os.kill(before.pid, signal.SIGKILL)
        lines, seen = [], ""
        while True:
            now = daemon()
            if now.state != seen:
                seen = now.state
                lines.append(f"pid {now.pid or '-'}: {now.state}{': ' + now.reason if now.reason else ''}")
            if now.state == "ready" and now.pid != before.pid:
                return lines
            time.sleep(0.02)

    def plugin_dies() -> list[str]:
        node.processes.stop("plugin", signal.SIGKILL)
        node.processes.start("plugin")
        node.wait_ready()
        return ["registered again; nothing lost"]

    def kubelet_restarts() -> list[str]:
        failed = node.restart_kubelet()
        node.wait_ready()
        need(not failed, f"{failed} did not survive")
        return ["registered again; every pod stayed"]

    story.step("Bring up a node: one simulated 80 GiB GPU, kubelet, mpsd, plugin", start)
    story.step("Admit three pods", admit)
    story.step("Allocate up to a limit, then over it", over_the_limit)
    story.step("Ask for more than is left", full)
    story.step("kill -9 the GPU's MPS daemon", daemon_dies)
    story.step("kill -9 the plugin", plugin_dies)
    story.step("Restart the kubelet", kubelet_restarts)
    story.step("Look at the node", lambda: gpufrac("status", "--run-root", run_root))
    print()
    print("\n".join(gpufrac("allocations", "--run-root", run_root)))


if __name__ == "__main__":
    main()
