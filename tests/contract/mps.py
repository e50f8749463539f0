"""What the suites need to drive a control daemon by its command line: the emulator, or a real binary on real hardware.

GPUFRAC_MPS_BINARY names a real `nvidia-cuda-mps-control`; GPUFRAC_CUDA_CLIENT a program that takes the arguments of
`mpsd.sim.cuda` (--allocate BYTES, --hold) and prints what it prints.
"""

import contextlib
import csv
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from mpsd.config.model import GIB, SimulatedConfig, SimulatedGpu
from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.mps.install import install_emulator
from tests.lines import next_line
from tests.waiting import WAIT_S, until

DRIVER_3 = "615.71.09"
"""A driver with protocol 3."""


def alive(pid: int) -> bool:
    """Whether a process lives; a zombie that its init does not reap does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


class ClientProcess:
    """A CUDA client that holds its memory."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.pid = process.pid

    def line(self) -> str:
        """Its next line of output."""
        return next_line(self.process.stdout, WAIT_S)

    def end(self) -> int:
        """Lets it end by itself; its exit status."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class Mps:
    """One pipe directory and the binary under test."""

    def __init__(self, root: Path, binary: str, client: list[str] | None, environment: Mapping[str, str]) -> None:
        self.root = root
        self.binary = binary
        self.client = client
        self.pipe = root / "pipe"
        self.log = root / "log"
        self.environment = {
            **environment,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.log),
        }
        self.config = root / "mps.toml"
        self.clients: list[ClientProcess] = []
        self.front_ends: list[subprocess.Popen[bytes]] = []
        self.pids: set[int] = set()

    def run(self, *arguments: str, text: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
        """The binary with these arguments and this on stdin."""
        return subprocess.run(
            [self.binary, *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            env={**self.environment, **environment},
            check=False,
        )

    def start(self, *flags: str, **environment: str) -> int:
        """Starts the daemon; its PID."""
        done = self.run("-d", *flags, **environment)
        assert done.returncode == 0, done
        self.pids.add(self.pid())
        return self.pid()

    def start3(self, config: str = "", *flags: str, **environment: str) -> int:
        """Starts a daemon of protocol 3 with this configuration file; its PID."""
        self.config.write_text(config)
        return self.start("-p", "3", *flags, "-a", str(self.config), **environment)

    def pid(self) -> int:
        """The daemon's, by its pid file; where there is none (protocol 3: not documented) by its environment."""
        with contextlib.suppress(FileNotFoundError):
            return int((self.pipe / "nvidia-cuda-mps-control.pid").read_text().strip())
        wanted = f"CUDA_MPS_PIPE_DIRECTORY={self.pipe}".encode()
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_ours = wanted in (directory / "environ").read_bytes().split(b"\0")
                is_control = b"nvidia-cuda-mps-control" in (directory / "cmdline").read_bytes()
                if is_ours and is_control and os.getsid(int(directory.name)) != os.getsid(0):  # no front-end of ours
                    return int(directory.name)
        raise FileNotFoundError("no daemon")

    def ask(self, command: str) -> str:
        """One command's reply."""
        done = self.run(text=command + "\n")
        assert done.returncode == 0, done
        return done.stdout

    def tell(self, *words: str) -> str:
        """What a command of protocol 3 prints. Fails the test where it fails."""
        done = self.run(*words)
        assert done.returncode == 0, done
        return done.stdout

    def rows(self, *words: str) -> list[list[str]]:
        """A list of protocol 3, read as its users have to."""
        return list(csv.reader(self.tell(*words, "--format=csv,noheader").splitlines()))

    def wait_ready(self, server: str = "s") -> int:
        """The PID of a server of protocol 3 once it is Ready."""
        until(lambda: self.tell("server", "get", server, "status").split()[-1:] == ["Ready"], "a Ready server")
        pid = int(self.tell("server", "get", server, "pid").split()[-1])
        self.pids.add(pid)
        return pid

    def servers(self) -> list[int]:
        pids = [int(line) for line in self.ask("get_server_list").splitlines()]
        self.pids.update(pids)
        return pids

    def wait_server(self) -> int:
        """The PID of the server once it is ACTIVE."""
        until(
            lambda: any(self.ask(f"get_server_status {pid}").strip() == "ACTIVE" for pid in self.servers()), "a server"
        )
        return self.servers()[0]

    def hold(
        self, *arguments: str, at: tuple[str, ...] = (), await_line: bool = True, **environment: str
    ) -> ClientProcess:
        """A client that holds what it was given; after its first line unless told otherwise.

        `at`: server and namespace of protocol 3 whose socket it uses.
        """
        if self.client is None:
            pytest.skip("needs a CUDA client: name one in GPUFRAC_CUDA_CLIENT")
        client = ClientProcess(
            subprocess.Popen(
                [*self.client, *arguments, "--hold"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**self.environment, "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe.joinpath(*at)), **environment},
            )
        )
        self.clients.append(client)
        if await_line:
            assert client.line().isdigit()
        return client

    def allocate(self, size: str, *arguments: str, at: tuple[str, ...] = (), **environment: str) -> str:
        """What a client prints that allocates this much and ends. `at`: as for `hold`."""
        if self.client is None:
            pytest.skip("needs a CUDA client: name one in GPUFRAC_CUDA_CLIENT")
        done = subprocess.run(
            [*self.client, *arguments, "--allocate", size],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            env={**self.environment, "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe.joinpath(*at)), **environment},
            check=False,
        )
        assert done.returncode == (0 if done.stdout.strip().isdigit() else 1), done
        return done.stdout.strip()

    def hold_command(self, command: str) -> "subprocess.Popen[bytes]":
        """A front-end whose answer is not waited for; ended with everything else."""
        process = subprocess.Popen(
            [self.binary], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=self.environment
        )
        assert process.stdin is not None
        process.stdin.write(command.encode() + b"\n")
        process.stdin.close()
        self.front_ends.append(process)
        return process

    def control_log(self) -> str:
        return (self.log / "control.log").read_text()

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for process in self.front_ends:
            process.kill()
            process.wait()
        with contextlib.suppress(OSError, ValueError):
            self.pids.add(self.pid())
        with contextlib.suppress(OSError):
            self.pids.update(int(pid) for pid in re.findall(r"Starting new server (\d+)", self.control_log()))
        for pid in self.pids:
            if alive(pid) and b"nvidia-cuda-mps" in Path(f"/proc/{pid}/cmdline").read_bytes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def emulator(root: Path, gpus: int = 2, driver: str = "580.95.05") -> Mps:
    """The emulator on its own simulated driver in `root/sim`: GPUs of 80 GiB."""
    simulation = root / "sim"
    config = SimulatedConfig(gpus=(SimulatedGpu(memory_bytes=80 * GIB),) * gpus, driver=driver)
    SimulatedDriver.create(str(simulation), config)
    binary = install_emulator(str(root / "bin"), str(simulation))
    client = [sys.executable, "-m", "mpsd.sim.cuda"]
    return Mps(root, binary, client, {"GPUFRAC_SIM_DIRECTORY": str(simulation)})


@contextlib.contextmanager
def real_or_emulator(root: Path, protocol: int = 2) -> Iterator[Mps]:
    """What the contract runs on. A real binary that does not know the protocol skips the test."""
    binary = os.environ.get("GPUFRAC_MPS_BINARY")
    if binary is None:
        mps = emulator(root) if protocol == 2 else emulator(root, driver=DRIVER_3)
    else:
        client = os.environ.get("GPUFRAC_CUDA_CLIENT")
        mps = Mps(root, binary, shlex.split(client) if client else None, {"PATH": os.defpath})
        if protocol == 3 and "namespace" not in mps.run("-p", "3", "-h").stdout:  # the documented probe
            pytest.skip("needs a control daemon of protocol 3: driver 615 or newer")
    try:
        yield mps
    finally:
        mps.close()
