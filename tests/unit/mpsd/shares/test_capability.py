"""What MPS can do by compute capability."""

import pytest

from mpsd.shares import capability
from tests.builders import info


@pytest.mark.parametrize(
    ("capabilities", "said", "clients", "several_users"),
    [
        ([(7, 0)], "", 48, True),
        ([(9, 0), (12, 1)], "", 48, True),
        ([(6, 1)], "GPU 0 has compute capability 6.1", 16, False),
        ([(9, 0), (5, 2)], "GPU 1 has compute capability 5.2", 16, False),
        ([(0, 0)], "the driver does not tell the compute capability of GPU 0", 16, True),
    ],
)
def test_below_7_and_where_it_is_not_known_mps_is_not_relied_on(
    capabilities: list[tuple[int, int]], said: str, clients: int, several_users: bool
) -> None:
    infos = [info(index, compute_capability=value) for index, value in enumerate(capabilities)]
    objection = capability.objection(infos)
    assert objection.startswith(said)
    assert bool(objection) is bool(said)
    assert capability.client_limit(infos, 48) == clients
    assert capability.client_limit(infos, 4) == 4
    assert capability.several_users(infos) is several_users
