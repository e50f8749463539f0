"""`gpufrac sim` as users run it: whole simulated nodes, with mpsd and plugin in processes of their own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli import gpufrac
from tests.waiting import WAIT_S, until

RESOURCE = "gpufrac.dev/gpu-8gi"

CONFIG = """
apiVersion: gpufrac.dev/v1
kind: NodeConfig
resources:
  - {name: example.com/half, memory: {fraction: 0.5}, compute: {mode: sm-sharing}}
  - {name: example.com/huge, memory: {request: 500Gi}, compute: {mode: sm-sharing}}
"""


def pod(name: str, count: int = 1, resource: str = RESOURCE, extra: str = "") -> str:
    return (
        f"apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  containers:\n"
        f"  - name: main\n    image: x\n    {extra}\n    resources: {{limits: {{{resource}: {count}}}}}\n---\n"
    )


def process(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, and how that ended."""
    return subprocess.run(
        [sys.executable, "-m", "deviceplugin.cli.main", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def run(*arguments: str, text: str) -> tuple[int, dict[str, Any]]:
    done = gpufrac("sim", "run", "-o", "json", *arguments, "-", text=text)
    assert "Traceback" not in done.stderr
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def mentioning(directory: str) -> list[int]:
    """Processes that have to do with a node's directory."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{entry}/environ").read_bytes() + Path(f"/proc/{entry}/cmdline").read_bytes()
                if f"{directory}/".encode() in text or f"={directory}\0".encode() in text:
                    found.append(int(entry))
    return found


# --- run


def test_run_shows_what_pods_get() -> None:
    code, report = run(text=pod("one", extra="env: [{name: CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, value: 0=79G}]"))
    assert code == 0
    assert [gpu["memoryBytes"] for gpu in report["node"]["gpus"]] == [80 << 30]
    (shown,) = report["pods"]
    assert (shown["name"], shown["namespace"], shown["phase"]) == ("one", "default", "Admitted")
    (container,) = shown["containers"]
    assert container["resource"] == RESOURCE
    allocation = container["allocation"]
    assert [i.partition("::")[0] for i in container["deviceIDs"]] == allocation["gpus"]
    assert (allocation["requestBytes"], allocation["limitBytes"]) == (8 << 30, 8 << 30)
    assert (allocation["mode"], allocation["enforcement"]) == ("sm-sharing", "cooperative")
    assert container["env"]["GPUFRAC_ALLOCATION"] == allocation["key"]
    assert container["env"]["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8192M", "a pod can't override it"
    assert "/dev/nvidia0" in {node["path"] for node in container["deviceNodes"]}
    assert container["env"]["CUDA_MPS_PIPE_DIRECTORY"] in {mount["containerPath"] for mount in container["mounts"]}
    assert len(container["cdiDevices"]) == 2
    assert not os.path.exists(report["node"]["directory"])
    assert mentioning(report["node"]["directory"]) == []


def test_what_a_cluster_leaves_pending_is_pending_and_what_a_kubelet_refuses_failed(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    text = (
        pod("several", resource="example.com/half", count=2)
        + pod("fits", resource="example.com/half")
        + pod("many", resource="example.com/half", count=2)
        + pod("huge", resource="example.com/huge")
        + pod("foreign", resource="nvidia.com/gpu")
        + pod("slip", resource="example.com/Half")
        + pod("by-name", resource="nvidia.com/gpu").replace("spec:", "spec:\n  nodeName: simulated")
    )
    code, report = run("--config", str(config), "--gpu-memory", "16Gi", "--gpus", "1", text=text)
    assert code == 1
    pods = {shown["name"]: shown for shown in report["pods"]}
    assert {name: shown["phase"] for name, shown in pods.items()} == {
        "several": "Failed",
        "fits": "Admitted",
        "many": "Pending",
        "huge": "Pending",
        "foreign": "Pending",
        "slip": "Pending",
        "by-name": "Admitted",
    }
    assert pods["several"]["reason"] == "UnexpectedAdmissionError"
    assert pods["several"]["code"] == "OneShareOnly"
    assert {pods[name]["reason"] for name in ("many", "huge", "foreign", "slip")} == {"Unschedulable"}
    many = pods["many"]["message"]
    assert many.startswith(
        "0/1 nodes are available: 1 Insufficient example.com/half. Asked for 2 example.com/half, free 1"
    )
    assert report["node"]["resources"]["example.com/huge"]["reason"] in pods["huge"]["message"]
    assert "write instead example.com/half: 1 (0.5 of a GPU's usable memory)" in pods["foreign"]["message"]
    assert pods["slip"]["insufficient"] == [
        {"resource": "example.com/Half", "asked": 1, "free": 0, "offered": False, "didYouMean": "example.com/half"}
    ]
    assert pods["by-name"]["containers"][0]["without"] == ["nvidia.com/gpu"]
    assert pods["by-name"]["notes"][0].endswith("the container runs without it, WITHOUT devices")
    assert report["node"]["resources"]["example.com/half"]["allocatable"] == 2, "as it was before these pods"


def test_a_burst_beyond_the_room_of_a_node_is_pending_though_lists_lag() -> None:
    """What the last pod got is not in the lists yet when the next one comes."""
    text = pod("a", resource="gpufrac.dev/memory-gib", count=70) + "".join(pod(f"p{n}") for n in range(3))
    code, report = run(text=text)
    assert code == 1
    assert [shown["phase"] for shown in report["pods"]] == ["Admitted", "Admitted", "Pending", "Pending"]


def test_run_prints_text_for_people(tmp_path: Path) -> None:
    manifest = tmp_path / "web.yaml"
    manifest.write_text(
        "apiVersion: apps/v1\nkind: StatefulSet\nmetadata: {name: web}\nspec:\n  replicas: 2\n"
        "  selector: {matchLabels: {app: web}}\n  template:\n    metadata: {labels: {app: web}}\n    spec:\n"
        "      initContainers:\n      - {name: init, image: x, resources: {limits: {gpufrac.dev/memory-gib: 2}}}\n"
        "      containers:\n      - {name: main, image: x, resources: {limits: {gpufrac.dev/memory-gib: 3}}}\n"
        "---\napiVersion: v1\nkind: Service\nmetadata: {name: web}\n"
    )
    done = process("sim", "run", str(manifest))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "default/web-0: Admitted" in done.stdout
    assert "container init (init container): gpufrac.dev/memory-gib" in done.stdout
    assert "limit         3Gi" in done.stdout
    assert "v1 Service: not a kind" in done.stdout
    assert done.stdout.endswith("2 of 2 pods admitted.\n")
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text", "expected"),
    [
        (["-"], "a: [", "<stdin>"),
        (["-"], pod("p").replace(": 1}", ": 500m}"), "must be an integer"),
        (["/does/not/exist.yaml"], "", "cannot read manifest /does/not/exist.yaml"),
        (["--config", "/does/not/exist.yaml", "-"], pod("p"), "cannot be read"),
        (["--gpus", "0", "-"], pod("p"), "--gpus"),
        (["--gpu-memory", "80GB", "-"], pod("p"), "80GB"),
        (["--driver", "new", "-"], pod("p"), "driver version"),
        ([], "", "Missing argument"),
    ],
)
def test_bad_input_is_said_and_nothing_is_started(arguments: list[str], text: str, expected: str) -> None:
    done = gpufrac("sim", "run", *arguments, text=text)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_leaves_nothing_when_it_is_interrupted(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "deviceplugin.cli.main", "sim", "run", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(pod("p").encode())
    directory = until(lambda: node_of_a_child(process.pid))
    process.send_signal(number)
    assert process.wait(WAIT_S) == 1
    assert not os.path.exists(directory)
    assert mentioning(directory) == []


def node_of_a_child(pid: int) -> str | None:
    """The directory of the node that a `sim run` brings up, once it has a child."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        for variable in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            if variable.startswith(b"GPUFRAC_SIM_NODE="):
                return variable.partition(b"=")[2].decode()
    return None


# --- a node that stays up


class Up:
    """`gpufrac sim up` in a process of its own."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = str(directory)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deviceplugin.cli.main", "sim", "up", "-d", self.directory, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline()

    def sim(self, command: str, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        run_it = process if command == "client" else gpufrac  # a client takes the place of its process
        done = run_it("sim", command, "-d", self.directory, *arguments, text=text)
        assert "Traceback" not in done.stderr
        return done

    def stop(self, number: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, error = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, error


@pytest.fixture
def up(short_tmp: Path) -> Iterator[Up]:
    node = Up(short_tmp / "n", "--gpus", "2", "--gpu-memory", "40Gi")
    try:
        assert "is up" in node.first_line, node.stop()[1]
        yield node
    finally:
        node.stop()


def test_a_node_that_stays_up(up: Up) -> None:
    admitted = up.sim("admit", "-o", "json", "-", text=pod("a") + pod("b"))
    assert admitted.returncode == 0, admitted.stderr
    assert [shown["phase"] for shown in json.loads(admitted.stdout)["pods"]] == ["Admitted", "Admitted"]

    granted = up.sim("client", "a/main", "--allocate", "7Gi")
    assert (granted.returncode, granted.stdout) == (0, f"{7 << 30}\n")
    over = up.sim("client", "default/a/main", "--allocate", "9Gi")
    assert (over.returncode, over.stdout) == (1, "CUDA_ERROR_OUT_OF_MEMORY\n")

    again = up.sim("admit", "-", text=pod("a"))
    assert (again.returncode, again.stdout) == (1, "")
    assert "default/a" in again.stderr
    refused = up.sim("admit", "-", text=pod("big", count=9))
    assert refused.returncode == 1
    assert "default/big: Pending: Unschedulable" in refused.stdout
    assert "Asked for 9 gpufrac.dev/gpu-8gi, free 6 (8 of 8 allocatable, 2 held by pods)" in refused.stdout
    bad = up.sim("admit", "-", text="a: [")
    assert bad.returncode == 2

    restarted = up.sim("restart-kubelet")
    assert restarted.returncode == 0, restarted.stderr
    assert up.sim("client", "a/main", "--allocate", "1Gi").returncode == 0

    assert up.sim("delete", "a").returncode == 0
    assert up.sim("delete", "a").returncode == 1
    assert up.sim("client", "a/main").returncode == 1
    assert up.sim("delete", "-", text=pod("b")).returncode == 0
    assert up.sim("client", "nonsense").returncode == 2

    other = process("sim", "up", "-d", up.directory)
    assert other.returncode == 2
    assert "a simulated node runs there" in other.stderr

    assert up.stop(signal.SIGTERM) == (0, "")
    assert mentioning(up.directory) == []
    down = up.sim("admit", "-", text=pod("a"))
    assert down.returncode == 3
    assert "gpufrac sim up" in down.stderr


@pytest.mark.parametrize("name", ["mpsd", "plugin"])
def test_a_child_that_dies_ends_the_node(up: Up, name: str) -> None:
    assert up.sim("admit", "-", text=pod("a")).returncode == 0
    (pid,) = [
        pid
        for pid in mentioning(up.directory)
        if f"main\0{name}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(pid, signal.SIGKILL)
    _, error = up.process.communicate(timeout=WAIT_S)
    assert up.process.returncode == 1
    assert f"gpufrac {name} died (signal SIGKILL)" in error
    assert "last lines of the log" in error
    assert mentioning(up.directory) == []


def test_a_node_that_was_killed_is_cleaned_up_by_the_next(up: Up) -> None:
    assert up.sim("admit", "-", text=pod("a")).returncode == 0
    up.process.kill()
    up.process.communicate(timeout=WAIT_S)
    assert mentioning(up.directory), "its children live on"
    after = Up(Path(up.directory))
    assert "is up" in after.first_line
    assert after.sim("admit", "-", text=pod("a")).returncode == 0
    assert after.stop()[0] == 0
    assert mentioning(up.directory) == []


# --- memory limits of driver r615

HARD_CONFIG = """
apiVersion: gpufrac.dev/v1
kind: NodeConfig
resources:
  - {name: example.com/pair, memory: {request: 8Gi}, compute: {mode: sm-sharing}, gpus: {groups: [pair]}}
  - {name: example.com/slice, memory: {request: 8Gi}, compute: {mode: time-slicing}, gpus: {include: [2]}}
  - {name: example.com/burst, memory: {request: 12Gi, limit: 30Gi}, compute: {mode: time-slicing}, gpus: {include: [3]}}
gpus: {groups: {pair: [0, 1]}}
enforcement: {minimum: hard}
"""
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
GIB = 1 << 30


@pytest.fixture(params=["dmem", "misc"])
def hard(short_tmp: Path, request: pytest.FixtureRequest) -> Iterator[Up]:
    config = short_tmp / "config.yaml"
    config.write_text(HARD_CONFIG)
    options = ["--no-dmem"] if request.param == "misc" else []
    node = Up(short_tmp / "n", "--driver", "615.71.09", "--gpu-memory", "40Gi", "--config", str(config), *options)
    try:
        assert "is up" in node.first_line, node.stop()[1]
        yield node
    finally:
        node.stop()


@contextlib.contextmanager
def holding(node: Up, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """A client that holds what it was granted."""
    with subprocess.Popen(
        [sys.executable, "-m", "deviceplugin.cli.main", "sim", "client", "-d", node.directory, *arguments, "--hold"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip().isdigit()
            yield process
        finally:
            process.terminate()


def test_a_hard_limit_holds_whatever_a_process_does(hard: Up) -> None:
    admitted = hard.sim(
        "admit", "-o", "json", "-", text=pod("p", resource="example.com/pair") + pod("s", resource="example.com/slice")
    )
    assert admitted.returncode == 0, admitted.stdout
    for shown in json.loads(admitted.stdout)["pods"]:
        assert shown["containers"][0]["allocation"]["enforcement"] == "hard"

    def allocate(target: str, size: str, *options: str) -> str:
        return hard.sim("client", target, "--allocate", size, *options).stdout.strip()

    reordered = ("--env", "CUDA_VISIBLE_DEVICES=1,0")
    without_mps = ("--env", "CUDA_MPS_PIPE_DIRECTORY=/nowhere")
    for escape in ((), ("-i",), reordered, ("-i", *reordered), ("--device", "1"), without_mps, ("-i", *without_mps)):
        assert allocate("p/main", "8193Mi", *escape) == OUT_OF_MEMORY, escape
        assert allocate("p/main", "8Gi", *escape) == str(8 * GIB), escape
    info = json.loads(hard.sim("client", "s/main", "--info", "-i").stdout.splitlines()[0])
    assert (info["mps"], info["total_bytes"], len(info["devices"])) == (False, 8 * GIB, 1)
    with holding(hard, "s/main", "--allocate", "5Gi", "-i"):
        assert allocate("s/main", "4Gi") == OUT_OF_MEMORY, "a second process"
        assert allocate("s/main", "3Gi", "-i") == str(3 * GIB)
    with holding(hard, "p/main", "--allocate", "5Gi"):
        assert allocate("p/main", "4Gi", "-i", *without_mps) == OUT_OF_MEMORY
        assert allocate("p/main", "4Gi", "--device", "1") == str(4 * GIB), "each GPU has its own limit"
    assert hard.stop() == (0, "")
    assert mentioning(hard.directory) == []


def test_who_borrows_is_evicted_by_who_is_entitled(hard: Up) -> None:
    text = pod("a", resource="example.com/burst") + pod("b", resource="example.com/burst")
    assert hard.sim("admit", "-", text=text).returncode == 0
    over = hard.sim("client", "a/main", "--allocate", "31Gi")
    assert over.stdout.strip() == OUT_OF_MEMORY
    with holding(hard, "a/main", "--allocate", "30Gi", "-i") as borrower:
        assert borrower.stdout is not None
        beyond = hard.sim("client", "b/main", "--allocate", "13Gi")
        assert beyond.stdout.strip() == OUT_OF_MEMORY, "above its own request it has no claim"
        assert borrower.poll() is None
        entitled = hard.sim("client", "b/main", "--allocate", "12Gi")
        assert entitled.stdout.strip() == str(12 * GIB)
        assert borrower.stdout.readline().strip() == "CUDA_ERROR_MPS_CLIENT_TERMINATED"
        assert borrower.wait(WAIT_S) == 1


@pytest.mark.parametrize(
    ("options", "enforcement"),
    [
        (("--driver", "615.71.09"), "hard"),
        (("--driver", "615.71.09", "--no-dmem"), "hard"),
        (("--driver", "615.71.09", "--no-memory-hook"), "cooperative"),
        (("--driver", "580.95.05"), "cooperative"),
    ],
)
def test_run_shows_the_level_of_a_node(options: tuple[str, ...], enforcement: str) -> None:
    code, report = run(*options, text=pod("one"))
    assert code == 0
    (container,) = report["pods"][0]["containers"]
    assert container["allocation"]["enforcement"] == enforcement
    # The toolkit's hook is told ours wherever the driver has limits: or it would act on the pod's own.
    assert container["env"].get("NVIDIA_GPU_MEMORY_LIMIT") == ("8192" if "615.71.09" in options else None)
    hooked = "k8s.device-plugin.nvidia.com/gpu=" in container["cdiDevices"][0]
    assert hooked == (enforcement == "hard")


GREEDY = pod("greedy", extra="env: [{name: CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, value: 0=70G}]")
SHARES_ONLY = f"""
apiVersion: gpufrac.dev/v1
kind: NodeConfig
resources:
  - {{name: {RESOURCE}, memory: {{request: 8Gi}}, compute: {{mode: sm-sharing}}}}
"""


@pytest.mark.parametrize(("version", "config", "runs"), [("1.32.1", "", True), ("1.32.1", SHARES_ONLY, False)])
def test_on_a_runtime_where_the_pod_beats_its_cdi_device_no_limit_is_promised_that_does_not_hold(
    tmp_path: Path, version: str, config: str, runs: bool
) -> None:
    options = ["--nri-runtime", f"cri-o:{version}"]
    if config:
        (tmp_path / "node.yaml").write_text(config)
        options += ["--config", str(tmp_path / "node.yaml")]
    code, report = run(*options, text=GREEDY)
    (container,) = report["pods"][0]["containers"]
    assert (code == 0) == runs
    if runs:  # delivered over NRI
        assert container["env"]["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8192M"
        assert container["allocation"]["enforcement"] == "cooperative"
    else:
        offered = report["node"]["resources"][RESOURCE]
        assert offered["allocatable"] == 0
        assert "CRI-O 1.34" in offered["reason"]


ENVVAR = f"""
apiVersion: gpufrac.dev/v1
kind: NodeConfig
cdi: {{gpuDevices: envvar}}
resources:
  - {{name: {RESOURCE}, memory: {{request: 8Gi}}, compute: {{mode: time-slicing}}, enforcement: hard}}
"""


@pytest.mark.parametrize("hook", [True, False])
def test_limits_are_hard_with_envvar_where_the_nvidia_runtime_sets_them(tmp_path: Path, hook: bool) -> None:
    (tmp_path / "node.yaml").write_text(ENVVAR)
    options = [
        "--config",
        str(tmp_path / "node.yaml"),
        "--driver",
        "615.71.09",
        *([] if hook else ["--no-memory-hook"]),
    ]
    code, report = run(*options, text=pod("p"))
    assert (code == 0) is hook
    if hook:
        assert report["pods"][0]["containers"][0]["allocation"]["enforcement"] == "hard"
    else:
        assert "1.20.1" in report["node"]["resources"][RESOURCE]["reason"]
