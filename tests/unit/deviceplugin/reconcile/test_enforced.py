"""Whether containers are held to what was granted, as far as their processes show."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from mpsd.common.processes import PodProcess, start_time
from mpsd.config.model import Enforcement
from mpsd.localapi.snapshot import GpuClient
from tests.builders import (
    CAN,
    CANNOT,
    HOOKED_KIND,
    config,
    fixed,
    info,
    reported,
    resource,
    snapshot,
    status,
    told,
    uuid,
)
from tests.unit.deviceplugin.reconcile.looking import AS_GRANTED, begun, looks, running
from tests.world import World


def test_a_marker_that_cannot_be_read_is_neither_there_nor_absent(world: World) -> None:
    got = world.grant()
    begun(world, got)
    gpu = status(info(0), mode=got.mode, clients=(GpuClient(pid=10, pod_uid="uid-1"),))
    seen = reported(world.broker.node.config, world.infos, world.broker.desired())
    world.broker.observe_snapshot(snapshot(structs.replace(seen[0], clients=gpu.clients), seen[1]))
    world.processes = {"uid-1": running(None, unreadable=True)}
    assert looks(world, 15) == set()
    assert looks(world, 15) == set()
    (shown,) = world.picture().allocations
    assert (shown.enforcement, shown.state) == ("cooperative", "attached")
    assert "can't be told" in shown.reason
    assert "SYS_PTRACE" in shown.reason
    assert any("can't be told" in line for line in told(None, world.picture()))
    world.processes = {"uid-1": running(got.key)}
    assert looks(world, 5) == set()
    assert world.picture().allocations[0].reason == ""


def test_who_sees_no_process_of_a_container_says_so(short_tmp: Path) -> None:
    world = World(short_tmp, blind="the plugin is in a PID namespace of its own")
    got = world.grant()
    begun(world, got)
    assert looks(world, 5) == set()
    assert "PID namespace of its own" in world.picture().allocations[0].reason
    world.ledger.close()


@pytest.mark.parametrize(
    ("name", "value", "level", "words"),
    [
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=70G", "none", "each of its processes may take up to"),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "", "none", "each of its processes may take up to"),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=4G", "cooperative", ""),
        ("NVIDIA_VISIBLE_DEVICES", "all", "none", "GPUs that were not granted"),
        ("NVIDIA_VISIBLE_DEVICES", uuid(1), "none", "GPUs that were not granted"),
        ("NVIDIA_VISIBLE_DEVICES", uuid(0), "cooperative", ""),
        ("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent", "none", "does not reach its MPS daemon"),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100", "cooperative", "more of the GPU's compute"),
    ],
)
def test_every_variable_with_a_limit_or_a_device_is_compared_with_what_was_granted(
    short_tmp: Path, name: str, value: str, level: str, words: str
) -> None:
    world = World(short_tmp, config(resource("a", fixed(8), thread_percent=50), resource("b", fixed(30))))
    got = world.grant()
    begun(world, got)
    granted = AS_GRANTED | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
    world.processes = {"uid-1": running(got.key, variables=granted | {name: value})}
    found = looks(world, 5)
    (shown,) = world.picture().allocations
    assert (shown.enforcement, found) == (level, {got.key} if level == "none" else set())
    assert words in shown.reason
    assert bool(words) == bool(shown.reason)
    assert (name in shown.reason) == bool(words)
    world.ledger.close()


def test_a_pod_in_a_sandbox_is_unenforced_with_the_reason(world: World) -> None:
    got = world.grant()
    begun(world, got)
    world.processes = {"uid-1": [PodProcess(10, "", None, "qemu-system-x86"), PodProcess(11, "", None, "virtiofsd")]}
    world.kubelet.containers[("ns", "pod", "another")] = {}  # all of its containers are in there
    assert looks(world, 5) == {got.key}
    (shown,) = world.picture().allocations
    assert shown.enforcement == "none"
    assert "runs in a sandbox (process qemu-system-x86)" in shown.reason


@pytest.mark.parametrize("own_users", [True, False])
def test_a_container_in_a_user_namespace_is_held_by_its_cgroup_only(world: World, own_users: bool) -> None:
    got = world.grant()
    begun(world, got)
    (_, main) = running(got.key)
    child = replace(main, pid=11, started=1, own_users=True)  # what a program does later is its own
    world.processes = {"uid-1": [replace(main, own_users=own_users), child]}
    assert looks(world, 5) == ({got.key} if own_users else set())
    (shown,) = world.picture().allocations
    assert shown.enforcement == ("none" if own_users else "cooperative")
    assert ("hostUsers" in shown.reason) is own_users


def test_a_container_that_was_made_again_is_looked_at_again(world: World) -> None:
    got = world.grant()
    begun(world, got)
    (_, first) = running(got.key)
    world.processes = {"uid-1": [replace(first, pid=os.getpid(), started=start_time(os.getpid()) or 0)]}
    assert looks(world, 5) == set()
    (_, second) = running(got.key, variables=AS_GRANTED | {"NVIDIA_VISIBLE_DEVICES": "all"})
    world.processes = {"uid-1": [second]}
    assert looks(world, 5) == set(), "the first one is there still"
    world.processes = {"uid-1": [replace(first, pid=os.getpid(), started=1)]}  # another had that PID
    world.begin()
    world.keeper.attach()
    assert looks(world, 5) == set()
    world.processes = {"uid-1": [second]}
    assert looks(world, 10) == {got.key}


def test_a_container_that_ended_is_not_accused_for_what_runs_beside_it(world: World) -> None:
    got = world.grant()
    begun(world, got)
    (_, first) = running(got.key)
    world.processes = {"uid-1": [replace(first, pid=os.getpid(), started=1)]}  # which has ended by the next look
    assert looks(world, 5) == set()
    world.processes = {"uid-1": running(None, None)}  # such as a debug container
    assert looks(world, 120) == set()


def test_nobody_is_accused_of_a_variable_that_changes_nothing(short_tmp: Path) -> None:
    world = World(short_tmp, config(resource("a", fixed(8))))
    got = world.grant()
    begun(world, got)
    loose = AS_GRANTED | {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=70G"}
    world.processes = {"uid-1": running(got.key, variables=loose)}
    assert looks(world, 5) == set(), "the daemon's own limit is no higher than this one's"
    world.ledger.close()


def test_what_was_granted_hard_is_judged_by_what_holds_it_now(world: World) -> None:
    """A node that lost hard limits, such as by an older driver: MPS alone holds what starts there."""
    world.hard_limits = CAN
    world.broker.set_gpu_kind(HOOKED_KIND, {}, frozenset({HOOKED_KIND}))
    world.tell()
    got = world.grant()
    assert got.enforcement is Enforcement.HARD
    begun(world, got)
    (_, first) = running(got.key, variables=AS_GRANTED | {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=70G"})
    world.processes = {"uid-1": [first]}
    assert looks(world, 5) == set(), "its cgroup holds it"
    world.hard_limits = CANNOT
    world.tell()
    world.keeper.attach()
    assert looks(world, 5) == {got.key}
