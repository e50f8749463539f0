"""Records what this version writes and says, for the tests that the next one reads it:

    .venv/bin/python -m tests.recorded.record

Done once per release, before anything is changed. Paths and the boot's ID become templates; PIDs and times stay.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from deviceplugin.sim.kubelet import checkpoint
from deviceplugin.sim.node.node import SimulatedNode
from mpsd.common.processes import boot_id
from tests.recorded.scene import (
    BOOT,
    DRAINED,
    RECORDED,
    ROOT,
    SCENES,
    answers,
    config_of,
    cuda_process,
    gpufrac,
    outputs,
    pods_of,
    refused_config,
)
from tests.recorded.shape import shape

STATE = ("state/mpsd.json", "state/selftest.json", "state/plugin/node.json", "state/plugin/drains.json")
PATTERNS = ("state/plugin/allocations/*.json", "cdi/gpufrac.dev-*.json")


def record(scene: str) -> None:
    place = RECORDED / scene
    for name in ("state", "cdi", "answers"):
        shutil.rmtree(place / name, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix="gf-", dir="/tmp"))

    def keep(name: str, text: str) -> None:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text.replace(str(directory), ROOT).replace(boot_id(), BOOT).rstrip("\n") + "\n")

    def keep_json(name: str, value: Any) -> None:
        keep(name, json.dumps(value, indent=1))

    try:
        with SimulatedNode(str(directory), config_of(scene)) as node:
            fields = {"selftest": shape(gpufrac(node, "selftest"))}
            fields["sim run"] = shape(node.admit(pods_of(scene)))
            fields["drain"] = shape(gpufrac(node, "drain", DRAINED, "--reason", "a fan is replaced"))
            keep("node.yaml", Path(node.config_path).read_text())
            with cuda_process(node, pods_of(scene)[0].pod.name), refused_config(node):
                fields |= {command: shape(said) for command, said in outputs(node).items()}
                for process, methods in answers(node).items():
                    for method, answer in methods.items():
                        keep_json(f"answers/{process}-{method}.json", answer)
            held, registered = checkpoint.read(node.kubelet.device_plugins)
            checkpoint.write(str(directory), held, dict.fromkeys(registered, ()))
            keep("checkpoint.json", (directory / checkpoint.FILE_NAME).read_text())
            keep_json("pods.json", {pod.spec.name: pod.uid for pod in node.kubelet.pods()})
            for name in (*STATE, *(str(p.relative_to(directory)) for glob in PATTERNS for p in directory.glob(glob))):
                keep(name, (directory / name).read_text())
            keep_json("fields.json", fields)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    for each in SCENES:
        record(each)
