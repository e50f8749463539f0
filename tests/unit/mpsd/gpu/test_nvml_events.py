"""The event set of NVML has one owner at a time: close() and a thread that waits free it once between them."""

import threading
from collections import Counter
from types import SimpleNamespace

import pytest

from mpsd.gpu.backend import GpuError
from mpsd.gpu.nvml import NvmlBackend
from tests.waiting import WAIT_S

UUID = "GPU-6d6f636b-0000-4000-8000-000000000000"


class FakeNvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


class FakeNvml:
    """NVML with one GPU. A free takes its time: until another one comes, or a while."""

    NVMLError = FakeNvmlError
    nvmlEventTypeXidCriticalError = 8  # noqa: N815

    def __init__(self) -> None:
        self.frees: Counter[int] = Counter()
        self.freeing = threading.Event()
        self._again = threading.Event()
        self._sets = 0

    def nvmlEventSetCreate(self) -> int:  # noqa: N802
        self._sets += 1
        return self._sets

    def nvmlEventSetFree(self, events: int) -> None:  # noqa: N802
        self.frees[events] += 1
        if self.frees[events] > 1:
            self._again.set()
        self.freeing.set()
        self._again.wait(0.2)

    def nvmlEventSetWait(self, events: int, wait_ms: int) -> SimpleNamespace:  # noqa: N802
        assert not self.frees[events], "waited on a set that was freed"
        raise FakeNvmlError(10)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return 1

    def nvmlDeviceRegisterEvents(self, device: int, kinds: int, events: int) -> None: ...  # noqa: N802

    def nvmlShutdown(self) -> None: ...  # noqa: N802


def test_close_against_wait_frees_the_events_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, backend = FakeNvml(), NvmlBackend()
    monkeypatch.setattr("mpsd.gpu.nvml._address", lambda device: device)
    backend._nvml, backend._initialised, backend._listed = nvml, True, (UUID,)
    assert backend.wait_xid(0.001) is None
    closer = threading.Thread(target=backend.close)
    closer.start()
    assert nvml.freeing.wait(WAIT_S)
    with pytest.raises(GpuError, match="it is not open"):
        backend.wait_xid(0.001)
    closer.join(WAIT_S)
    assert not closer.is_alive()
    assert nvml.frees == {1: 1}
