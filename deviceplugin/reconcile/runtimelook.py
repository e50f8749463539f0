"""Which container runtime is this, and whose environment wins in its containers: ours, or a pod's?"""

import os
import time
from collections.abc import Callable, Sequence

from deviceplugin.grants.broker import Broker
from deviceplugin.nri.model import Runtime
from deviceplugin.nri.runtimes import cdi_loses
from mpsd.config.model import NodeConfig

LOOK_S = 60.0
"""How often the container runtime is asked what it is."""


class RuntimeLook:
    """For one thread; `runtime` is what was found last.

    Args:
        told: what the runtime tells of itself over NRI, where annotated pods are served and it is connected: then our
            variables are set last there.
    """

    def __init__(
        self,
        config: NodeConfig,
        broker: Broker,
        told: Callable[[], Runtime | None],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._broker, self._told, self._monotonic = config, broker, told, monotonic
        self._due_s = float("-inf")
        self.runtime: Runtime | None = None

    def look(self) -> None:
        """Asks the runtime over CRI, every LOOK_S, unless it tells of itself."""
        if self._is_told() or self._monotonic() < self._due_s:
            return
        from deviceplugin.kubelet.cri import runtime_of

        self._due_s = self._monotonic() + LOOK_S
        if (runtime := runtime_of(self._sockets())) is not None:
            self._broker.set_cdi_loses(cdi_loses(runtime))
            self.runtime = runtime  # who sees it finds in the broker what it means
            self._is_told()  # it may have connected while it was asked

    def _is_told(self) -> bool:
        told = self._told()
        if told is not None:
            self._broker.set_cdi_loses(None)
            self.runtime = told
        return told is not None

    def _sockets(self) -> Sequence[str]:
        from deviceplugin.kubelet.cri import SIMULATED_SOCKET, SOCKETS

        if self._config.backend == "simulated":
            return (os.path.join(self._config.mps.run_root, SIMULATED_SOCKET),)
        return SOCKETS if self._config.annotations is None else (self._config.annotations.cri_socket,)
