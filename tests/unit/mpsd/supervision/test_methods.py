"""The table of mpsd's local API: nothing that changes something passes for a look."""

from mpsd.limits.api import LimitsApi
from mpsd.localapi.methods import Access
from mpsd.localapi.snapshot import CleanedUp
from mpsd.supervision.methods import methods
from mpsd.supervision.terminate import Terminator
from tests.unit.mpsd.supervision.bench import Bench


def nothing_is_cleaned() -> CleanedUp:
    raise AssertionError


def test_what_only_looks_and_what_changes_something(calm: Bench) -> None:
    supervisor = calm.supervisor
    table = methods(supervisor, Terminator(supervisor), LimitsApi(supervisor), nothing_is_cleaned)
    of = {access: {name for name, method in table.items() if method.access is access} for access in Access}
    assert of[Access.READ] == {"snapshot", "watch", "desired", "clients", "limits", "status", "health", "state_root"}
    assert of[Access.OPERATE] == {"apply", "set_limits", "replace", "confirm_indices", "terminate", "cleanup"}
