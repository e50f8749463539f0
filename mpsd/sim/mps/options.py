"""How one control daemon is started, and why it cannot."""

from __future__ import annotations

import os
import sys

from mpsd.sim.wire import pipe_directory


class StartError(Exception):
    """The daemon cannot start: `status` for the caller, and a text, maybe empty."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


class Options:
    """Command line and environment of one daemon. `config_path` is of protocol 3."""

    def __init__(
        self,
        simulation: str,
        protocol: int,
        foreground: bool,
        multiuser: bool,
        config_path: str | None = None,
    ) -> None:
        self.simulation = simulation
        self.server_binary = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "nvidia-cuda-mps-server")
        self.foreground = foreground
        self.multiuser = multiuser
        self.config_path = config_path
        self.pipe_directory = pipe_directory(protocol)
        self.log_directory = os.environ.get("CUDA_MPS_LOG_DIRECTORY") or "/var/log/nvidia-mps"
