"""What ends is waited for: how long closing takes at most is said by constants, and no matter of a busy machine."""

import pytest

from deviceplugin.kubernetes import events, node, pods
from tests.waiting import WAIT_S


@pytest.fixture(autouse=True)
def patient_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (events, node, pods):
        monkeypatch.setattr(module, "CLOSE_S", WAIT_S)
