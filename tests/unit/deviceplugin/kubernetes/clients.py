"""Clients of a stub API server, for tests."""

from functools import partial
from pathlib import Path

from deviceplugin.kubernetes.access import Access, node_name
from deviceplugin.kubernetes.client import ApiClient
from tests.apiserver import StubApiServer
from tests.waiting import NEVER_S

our_node = partial(node_name, "n1")


def client_of(directory: Path, server: StubApiServer, timeout_s: float = NEVER_S, **user: str) -> ApiClient:
    """A client whose kubeconfig is in `directory`; `user` is its user's entry."""
    path = directory / "config"
    path.write_text(server.kubeconfig(**user))
    return ApiClient(Access(str(path)), timeout_s=timeout_s)
