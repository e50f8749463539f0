"""Who may call what."""

import os
from pathlib import Path

import pytest

from mpsd.common.errors import GpufracError
from mpsd.localapi import server as server_module
from mpsd.localapi.call import call
from mpsd.localapi.methods import Access, operating, reading, rights
from mpsd.localapi.server import LocalServer


def test_root_and_the_user_of_the_server_may_all_and_nobody_else_anything() -> None:
    assert rights(0) == rights(os.geteuid()) == frozenset(Access)
    assert rights(os.geteuid() + 12345) == frozenset()


def test_who_may_only_read_can_operate_nothing(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    table = reading({"look": lambda _: 1}) | operating({"touch": done.append})
    monkeypatch.setattr(server_module, "rights", lambda _: frozenset({Access.READ}))
    server = LocalServer(str(short_tmp / "a.sock"), table)
    server.start()
    try:
        assert call(str(short_tmp / "a.sock"), "look", {}, int) == 1
        with pytest.raises(GpufracError, match="cannot call 'touch': it takes the right to operate"):
            call(str(short_tmp / "a.sock"), "touch", {}, object)
    finally:
        server.close()
    assert done == []
