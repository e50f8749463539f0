"""The NVML adapter over NVIDIA's own binding, with a libnvidia-ml.so.1 of ours below it, in a process of its own."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mpsd.config.load import parse_config
from mpsd.gpu.backend import GpuBackend
from mpsd.gpu.nvml import NvmlBackend
from tests.waiting import WAIT_S

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to build the NVML stand-in")

_backend: type[GpuBackend] = NvmlBackend  # the checker proves that the adapter fits the protocol

ROOT = Path(__file__).parents[2]
UUIDS = [f"GPU-6d6f636b-0000-4000-8000-{n:012d}" for n in range(3)]

PRELUDE = """
import json, msgspec, os, sys
from mpsd.gpu.backend import *
from mpsd.gpu.model import *
from mpsd.gpu.nvml import NvmlBackend
U = ["GPU-6d6f636b-0000-4000-8000-%012d" % n for n in range(3)]
def touch(name, text=""): open(os.path.join(os.environ["MOCK_DIR"], name), "w").write(text)
def remove(name): os.unlink(os.path.join(os.environ["MOCK_DIR"], name))
def out(value): print(msgspec.json.encode(value).decode(), flush=True)
def attempt(call):
    try: return call()
    except GpufracError as exc: return [type(exc).__name__, exc.code, str(exc)]
from mpsd.common.errors import GpufracError
b = NvmlBackend(sysfs=os.environ["MOCK_DIR"])
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    built = {}
    for name, flags in {"new": [], "old": ["-DOLD"]}.items():
        built[name] = tmp_path_factory.mktemp(name)
        library = built[name] / "libnvidia-ml.so.1"
        source = str(Path(__file__).with_name("mocknvml.c"))
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", *flags, "-o", str(library), source], check=True)
    return built


class Mock:
    def __init__(self, directory: Path, libraries: dict[str, Path]) -> None:
        self.directory, self.libraries, self.driver = directory, libraries, "new"

    def touch(self, name: str, text: str = "") -> None:
        (self.directory / name).write_text(text)

    def environment(self) -> dict[str, str]:
        driver = str(self.libraries[self.driver]) if self.driver else ""
        return {**os.environ, "LD_LIBRARY_PATH": driver, "MOCK_DIR": str(self.directory), "PYTHONPATH": str(ROOT)}

    def python(self, code: str) -> Any:
        """Runs the code after PRELUDE; gives the values it put out."""
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
            env=self.environment(), capture_output=True, text=True, timeout=WAIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def mock(short_tmp: Path, libraries: dict[str, Path]) -> Mock:
    return Mock(short_tmp, libraries)


def test_facts(mock: Mock) -> None:
    numa = mock.directory / "bus/pci/devices/0000:a0:00.0/numa_node"
    numa.parent.mkdir(parents=True)
    numa.write_text("0\n")
    mock.touch("mig.1")
    version, uuids, first, second = mock.python("""
        b.open(); out(b.driver_version()); out(b.uuids()); out(b.info(U[0])); out(b.info(U[1]))
    """)
    assert (version, uuids) == ("615.71", UUIDS[:2])
    assert first == {
        "uuid": UUIDS[0], "index": 0, "name": "Mock H100 80GB", "memory_total_bytes": 80 << 30,
        "memory_reserved_bytes": 512 << 20, "compute_capability": [9, 0], "numa_node": 0,
        "pci_bus_id": "00000000:A0:00.0", "mig_enabled": False,
    }  # fmt: skip
    assert second["mig_enabled"] is True
    assert second["numa_node"] == 1  # the driver's own answer, where the kernel shows no such device


def test_numa_node_minus_one_is_none(mock: Mock) -> None:
    numa = mock.directory / "bus/pci/devices/0000:a0:00.0/numa_node"
    numa.parent.mkdir(parents=True)
    numa.write_text("-1\n")
    assert mock.python("b.open(); out(b.info(U[0]))")[0]["numa_node"] is None


def test_old_driver_takes_defaults(mock: Mock) -> None:
    mock.driver = "old"
    mock.touch("procs.0", "12 1024\n")
    info, processes = mock.python("b.open(); out(b.info(U[0])); out(b.processes(U[0]))")
    assert (info["memory_total_bytes"], info["memory_reserved_bytes"]) == (80 << 30, 0)
    assert info["numa_node"] is None
    assert processes == [{"pid": 12, "used_bytes": 1024}]


def test_facts_that_a_gpu_does_not_offer_take_defaults(mock: Mock) -> None:
    mock.touch("unsupported")
    (info,) = mock.python("b.open(); out(b.info(U[0]))")
    assert info == {
        "uuid": UUIDS[0], "index": 0, "name": "", "memory_total_bytes": 0, "memory_reserved_bytes": 0,
        "compute_capability": [0, 0], "numa_node": None, "pci_bus_id": "", "mig_enabled": False,
    }  # fmt: skip


def test_the_recovery_action_is_read_where_the_driver_has_it(mock: Mock) -> None:
    mock.touch("recovery.1", "2\n")
    assert mock.python("b.open(); out(b.recovery_action(U[0])); out(b.recovery_action(U[1]))") == [0, 2]
    mock.driver = "old"
    (refused,) = mock.python("b.open(); out(attempt(lambda: b.recovery_action(U[1])))")
    assert refused[0] == "GpuNotSupportedError"


def test_processes_of_both_lists_once_each(mock: Mock) -> None:
    mock.touch("procs.0", "30 100\n10 -1\n20 -1\n")
    mock.touch("mps.0", "20 7\n30 50\n40 -1\n")
    processes, other = mock.python("b.open(); out(b.processes(U[0])); out(b.processes(U[1]))")
    expected = [(10, None), (20, 7), (30, 100), (40, None)]
    assert [(p["pid"], p["used_bytes"]) for p in processes] == expected
    assert other == []


@pytest.mark.parametrize(
    ("code", "words"),
    [(9, "modprobe nvidia"), (18, "reload the module or reboot the node"), (4, "run as root"), (999, "NVML 999")],
)
def test_init_failure_says_what_to_do_and_heals(mock: Mock, code: int, words: str) -> None:
    mock.touch("init", str(code))
    failure, unopened, uuids = mock.python("""
        out(attempt(b.open)); out(attempt(b.uuids)); remove("init"); b.open(); out(b.uuids())
    """)
    assert failure[:2] == ["GpuError", code]
    assert failure[2].startswith("cannot initialise NVML: ")
    assert words in failure[2]
    assert unopened[:2] == ["GpuError", 1]
    assert uuids == UUIDS[:2]


def test_missing_library_says_what_to_do(mock: Mock) -> None:
    mock.driver = ""
    (failure,) = mock.python("""
        import ctypes
        try: ctypes.CDLL("libnvidia-ml.so.1"); out("present")
        except OSError: out(attempt(b.open))
    """)
    if failure == "present":
        pytest.skip("this machine has a real libnvidia-ml.so.1")
    assert failure[1] == 12
    assert "install the NVIDIA driver" in failure[2]


def test_reopening_is_balanced(mock: Mock) -> None:
    """NVML counts initialisations: after any number of opens and one close it is down."""
    values = mock.python("""
        import pynvml
        b.close(); b.open(); b.open(); b.open(); out(len(b.uuids())); b.close(); b.close()
        try: pynvml.nvmlDeviceGetCount(); out("up")
        except pynvml.NVMLError as exc: out(exc.value)
        out(attempt(lambda: b.info(U[0]))); b.open(); out(len(b.uuids()))
    """)
    assert values[:2] == [2, 1]
    assert values[2][:2] == ["GpuError", 1]
    assert values[3] == 2


def test_lost_gpu_is_left_out_and_named(mock: Mock) -> None:
    mock.touch("lost.0")
    uuids, failure, other = mock.python("""
        b.open(); out(b.uuids()); out(attempt(lambda: b.info(U[0]))); out(b.info(U[1]))
    """)
    assert uuids == [UUIDS[1]]
    assert failure[:2] == ["GpuLostError", 15]
    assert UUIDS[0] in failure[2]
    assert other["uuid"] == UUIDS[1]


def test_look_up_that_fails_for_any_lost_gpu_does_not_take_the_others_down(mock: Mock) -> None:
    mock.touch("lost.0")
    mock.touch("anylost")
    lost, other = mock.python("b.open(); out(attempt(lambda: b.info(U[0]))); out(b.info(U[1]))")
    assert lost[0] == "GpuLostError"
    assert other["uuid"] == UUIDS[1]


def test_vanished_gpu_is_lost_and_indices_shift(mock: Mock) -> None:
    before, after, vanished, count = mock.python("""
        b.open(); out(b.info(U[1])); touch("gone.0"); out(b.info(U[1])); out(attempt(lambda: b.info(U[0])))
        touch("error", "999"); out(attempt(b.uuids))
    """)
    assert (before["index"], after["index"]) == (1, 0)
    assert vanished[:2] == ["GpuLostError", 28]
    assert count[:2] == ["GpuError", 999]


def test_compute_mode_is_set_and_read(mock: Mock) -> None:
    mock.touch("mode.1", "1")
    values = mock.python("""
        b.open(); out(b.compute_mode(U[0])); out(b.compute_mode(U[1]))
        for mode in (ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.PROHIBITED, ComputeMode.DEFAULT):
            b.set_compute_mode(U[0], mode); out(b.compute_mode(U[0]))
        out(attempt(lambda: b.set_compute_mode(U[0], ComputeMode.UNKNOWN)))
        touch("eperm"); out(attempt(lambda: b.set_compute_mode(U[0], ComputeMode.DEFAULT)))
    """)
    assert values[:5] == ["DEFAULT", "UNKNOWN", "EXCLUSIVE_PROCESS", "PROHIBITED", "DEFAULT"]
    assert values[5][0] == "GpuError"
    assert values[6][:2] == ["GpuError", 4]
    assert "run as root" in values[6][2]


def test_memory_limits_are_set_and_read_per_gpu_and_cgroup(mock: Mock) -> None:
    mock.touch("limits.1", "1 18446744073709551615 77 /sys/fs/cgroup/b\n")
    none, *values = mock.python("""
        b.open(); A, B = "/sys/fs/cgroup/a b\\xe9", "/sys/fs/cgroup/b"
        out(attempt(lambda: b.memory_limits(U[0], A)))
        b.set_memory_limits(U[0], A, 1 << 30, (1 << 40) + 1); out(b.memory_limits(U[0], A))
        b.set_memory_limits(U[0], A, 0, None); out(b.memory_limits(U[0], A))
        out(b.memory_limits(U[1], B)); out(b.cgroup_root)
    """)
    assert none[:2] == ["NoLimitError", 6]
    assert "cannot read the memory limits of /sys/fs/cgroup/a b\xe9 on GPU" in none[2]
    assert values == [[1 << 30, (1 << 40) + 1, 0], [0, None, 0], [1, None, 77], "/sys/fs/cgroup"]


def test_a_memory_limit_reads_back_as_the_driver_keeps_it(mock: Mock) -> None:
    mock.touch("limitunit", "4096")
    (limits,) = mock.python("b.open(); b.set_memory_limits(U[0], '/c', 4095, 8193); out(b.memory_limits(U[0], '/c'))")
    assert limits == [0, 8192, 0]


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (3, "GpuNotSupportedError", "takes driver r615"),
        (4, "GpuError", "run as root"),
        (6, "NoLimitError", "no limit on this cgroup"),
        (15, "GpuLostError", "reset"),
        (16, "GpuLostError", "gpu-reset"),
        (28, "GpuLostError", "NVML 28"),
        (999, "GpuError", "NVML 999"),
    ],
)
def test_each_refusal_of_memory_limits_says_what_to_do(mock: Mock, code: int, error: str, words: str) -> None:
    mock.touch("limitcode", str(code))
    for failure in mock.python("""
        b.open(); out(attempt(lambda: b.memory_limits(U[0], "/c")))
        out(attempt(lambda: b.set_memory_limits(U[0], "/c", 0, None)))
    """):
        assert failure[:2] == [error, code]
        assert words in failure[2]


def test_memory_limits_need_root_to_be_set_and_a_gpu_that_is_there(mock: Mock) -> None:
    mock.touch("eperm")
    denied, gone = mock.python("""
        b.open(); out(attempt(lambda: b.set_memory_limits(U[0], "/c", 0, None)))
        out(attempt(lambda: b.memory_limits(U[2], "/c")))
    """)
    assert denied[:2] == ["GpuError", 4]
    assert gone[:2] == ["GpuLostError", 28]  # and not: no limit


def test_a_library_older_than_memory_limits(mock: Mock) -> None:
    mock.driver = "old"
    for failure in mock.python("""
        b.open(); out(attempt(lambda: b.memory_limits(U[0], "/c")))
        out(attempt(lambda: b.set_memory_limits(U[0], "/c", 0, None)))
    """):
        assert failure[:2] == ["GpuNotSupportedError", 13]
        assert "upgrade the driver" in failure[2]


def test_xid_event_names_its_gpu_even_when_that_one_is_lost(mock: Mock) -> None:
    first, second, none, third = mock.python("""
        b.open(); b.uuids()
        touch("xid", "1 31"); out(b.wait_xid(10))
        touch("lost.0"); touch("xid", "0 79"); out(b.wait_xid(10))
        out(b.wait_xid(0.01))
        b.open(); b.uuids(); touch("xid", "1 62"); out(b.wait_xid(10))
    """)
    assert first == [UUIDS[1], 31]
    assert second == [UUIDS[0], 79]
    assert none is None
    assert third == [UUIDS[1], 62]


def test_no_events_offered(mock: Mock) -> None:
    mock.touch("noevents")
    failure, healed = mock.python("""
        b.open(); b.uuids(); out(attempt(lambda: b.wait_xid(10)))
        remove("noevents"); touch("xid", "1 62"); out(b.wait_xid(10))
    """)
    assert failure[:2] == ["GpuNotSupportedError", 3]
    assert healed == [UUIDS[1], 62]


def test_close_ends_a_wait_for_events(mock: Mock) -> None:
    (outcome,) = mock.python("""
        import threading
        b.open(); b.uuids(); result = []
        thread = threading.Thread(target=lambda: result.append(attempt(lambda: b.wait_xid(3600))))
        thread.start(); b.close(); thread.join(120); out(result)
    """)
    assert outcome[0][:2] == ["GpuError", 1]


def test_close_lets_a_running_call_finish(mock: Mock) -> None:
    mock.touch("hang.0")
    (outcome,) = mock.python("""
        import threading, time
        b.open(); result = []
        thread = threading.Thread(target=lambda: result.append(attempt(lambda: b.info(U[0]))))
        thread.start()
        while not b._calls: time.sleep(0.001)
        threading.Timer(0.05, lambda: remove("hang.0")).start()
        b.close(); thread.join(120); out(result)
    """)
    assert outcome[0]["name"] == "Mock H100 80GB"


def test_close_leaves_nvml_open_under_a_call_that_hangs(mock: Mock) -> None:
    mock.touch("hang.0")
    count, down = mock.python("""
        import threading, time, pynvml, mpsd.gpu.nvml
        mpsd.gpu.nvml._IDLE_S = 0.05
        b.open()
        threading.Thread(target=lambda: attempt(lambda: b.info(U[0])), daemon=True).start()
        while not b._calls: time.sleep(0.001)
        b.close(); out(pynvml.nvmlDeviceGetCount()); out(attempt(b.driver_version)); remove("hang.0")
    """)
    assert count == 2
    assert down[:2] == ["GpuError", 1]


class LiveProber:
    """A process with a prober on the stand-in, until its input ends; prints each inventory as a line."""

    CODE = PRELUDE + textwrap.dedent("""
        from mpsd.gpu.prober import Prober
        prober = Prober(b, out, period_s=0.1, deadline_s=0.5)
        prober.start()
        sys.stdin.read()
        prober.close()
    """)

    def __init__(self, mock: Mock) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.CODE],
            env=mock.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    def await_health(self, *wanted: str) -> Any:
        return self._await(lambda i: [gpu["health"] for gpu in i["gpus"]] == list(wanted))

    def await_reason(self, words: str) -> Any:
        return self._await(lambda i: words in (i.get("reason") or {"message": ""})["message"])

    def _await(self, wanted: Callable[[Any], bool]) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if wanted(inventory := json.loads(line)):
                return inventory
        raise AssertionError("the prober's process ended")

    def close(self) -> None:
        self.process.communicate(timeout=WAIT_S)
        assert self.process.returncode == 0


@pytest.fixture
def live(mock: Mock) -> Iterator[LiveProber]:
    mock.touch("procs.1", "77 4096\n")
    prober = LiveProber(mock)
    yield prober
    prober.close()


def test_prober_over_the_binding(mock: Mock, live: LiveProber) -> None:
    inventory = live.await_health("ok", "ok")
    assert inventory["driver_version"] == "615.71"
    assert inventory["gpus"][1]["processes"] == [{"pid": 77, "used_bytes": 4096}]

    mock.touch("lost.1")
    assert "NVML 15" in live.await_health("ok", "lost")["gpus"][1]["reason"]["message"]
    (mock.directory / "lost.1").unlink()
    live.await_health("ok", "ok")

    mock.touch("xid", "0 79")
    assert live.await_health("sick", "ok")["gpus"][0]["reason"]["message"].startswith("XID 79")


def test_prober_survives_a_hanging_driver_call(mock: Mock, live: LiveProber) -> None:
    live.await_health("ok", "ok")
    mock.touch("hang.0")
    live.await_reason("has not returned for over 0.5 s")  # the list asks each GPU for its UUID, so it hangs first
    (mock.directory / "hang.0").unlink()
    live.await_health("ok", "ok")


def test_a_config_is_drafted_for_the_gpus_that_nvml_shows(mock: Mock) -> None:
    mock.touch("mig.1")
    done = subprocess.run(
        [sys.executable, "-m", "deviceplugin.cli.main", "config", "init"],
        env=mock.environment(), capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "# Found: driver 615.71" in done.stdout
    assert f"#   GPU 0: Mock H100 80GB, {UUIDS[0]}, 80Gi, of which 78.5Gi can be shared" in done.stdout
    assert "MIG is on, so it is left alone" in done.stdout
    assert parse_config(done.stdout, "drafted").resources[0].name == "gpufrac.dev/gpu-16gi"
