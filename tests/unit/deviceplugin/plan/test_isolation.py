"""Pods that run apart from the host, and what is left of a level there."""

import pytest

from deviceplugin.plan.isolation import level_left, of_container, of_processes
from deviceplugin.plan.reasons import IsolationCode
from mpsd.common.reason import message_of
from mpsd.config.model import Enforcement

SANDBOX, USERS, NONE = IsolationCode.SANDBOX, IsolationCode.USER_NAMESPACE, None


@pytest.mark.parametrize(
    ("handler", "users", "code"),
    [
        ("", False, NONE),
        ("runc", False, NONE),
        ("nvidia", False, NONE),
        ("crun", True, USERS),
        ("kata", False, SANDBOX),
        ("kata-qemu-nvidia-gpu", False, SANDBOX),
        ("runsc", True, SANDBOX),
        ("gVisor", False, SANDBOX),
    ],
)
def test_what_the_runtime_tells_of_a_container(handler: str, users: bool, code: IsolationCode | None) -> None:
    found = of_container(handler, user_namespace=users)
    assert (None if found is None else found.code) is code
    assert bool(message_of(found)) is (code is not NONE)


@pytest.mark.parametrize(
    ("names", "code"),
    [
        ((), NONE),
        (("python3",), NONE),
        (("qemu-system-x86", "virtiofsd"), SANDBOX),
        (("cloud-hyperviso",), SANDBOX),
        (("runsc-sandbox", "runsc-gofer", "exe"), SANDBOX),
        (("virtiofsd",), NONE),
        (("virt-launcher", "qemu-system-x86"), NONE),  # a virtual machine as a container's program
    ],
)
def test_what_the_processes_of_a_pod_tell(names: tuple[str, ...], code: IsolationCode | None) -> None:
    found = of_processes(names)
    assert (None if found is None else found.code) is code


def test_a_cgroup_holds_in_a_user_namespace_and_nothing_does_in_a_sandbox() -> None:
    users, sandbox = of_container("", user_namespace=True), of_container("kata", user_namespace=False)
    for given, in_users in (
        (Enforcement.HARD, Enforcement.HARD),
        (Enforcement.COOPERATIVE, Enforcement.NONE),
        (Enforcement.NONE, Enforcement.NONE),
    ):
        left = tuple(level_left(isolation, given) for isolation in (None, users, sandbox))
        assert left == (given, in_users, Enforcement.NONE)
