"""Edits and answers."""

import msgspec
import pytest

from cdi.encode import encode_spec
from deviceplugin.plan import render
from deviceplugin.plan.start import configured_shared_memory
from mpsd.config.model import GIB, Delivery, Enforcement, MpsConfig
from mpsd.gpu.model import Mode
from tests.builders import allocation, uuid

A = allocation("a", f"{uuid(0)}::0")
PIPE = "/run/gpufrac/mps/x"


def env(**changes: object) -> dict[str, str]:
    return dict(render.environment(msgspec.structs.replace(A, **changes)))


def test_a_container_is_attached_with_its_limit_by_its_own_ordinal() -> None:
    got = env(gpu_kind="nvidia.com/gpu")
    assert got["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert got["GPUFRAC_ALLOCATION"] == A.key
    assert got["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8192M"
    assert got["CUDA_MPS_PIPE_DIRECTORY"] == "/tmp/nvidia-mps"
    assert got["GPUFRAC_MEMORY_FRACTION"] == "0.1000"
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in got
    assert env(thread_percent=50)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"


def test_without_a_cdi_kind_the_nvidia_runtime_is_told_the_uuids() -> None:
    assert env()["NVIDIA_VISIBLE_DEVICES"] == uuid(0)


def test_time_slicing_mounts_no_daemon_and_sets_no_mps_limit() -> None:
    got = env(mode=Mode.TIME_SLICING)
    assert not [name for name in got if name.startswith("CUDA_MPS")]
    assert render.mounts(msgspec.structs.replace(A, mode=Mode.TIME_SLICING), PIPE) == ()


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(("soft_gib", "request_mib"), [(0, "0"), (8, "8192")])
def test_a_hard_limit_is_told_to_the_toolkits_hook_with_what_is_guaranteed(
    mode: Mode, soft_gib: int, request_mib: str
) -> None:
    hard = msgspec.structs.replace(
        A, mode=mode, enforcement=Enforcement.HARD, soft_bytes=soft_gib * GIB, limit_bytes=12 * GIB
    )
    got = dict(render.environment(hard))
    assert got["NVIDIA_GPU_MEMORY_REQUEST"] == request_mib
    assert got["NVIDIA_GPU_MEMORY_LIMIT"] == "12288"
    assert (got["GPUFRAC_ENFORCEMENT"], got["GPUFRAC_MEMORY_LIMIT_BYTES"]) == ("hard", str(12 * GIB))
    # Time-slicing reaches a daemon only where somebody borrows, and never has a limit of MPS.
    reaches = mode is Mode.SM_SHARING or soft_gib > 0
    assert ("CUDA_MPS_PIPE_DIRECTORY" in got) is reaches
    assert (render.mounts(hard, PIPE) == (("/tmp/nvidia-mps", PIPE),)) is reaches
    assert ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" in got) is (mode is Mode.SM_SHARING)


def test_a_limit_that_is_not_hard_is_not_told_to_a_hook_that_could_not_set_it() -> None:
    assert not [name for name in env() if name.startswith("NVIDIA_GPU_MEMORY")]


def test_no_client_limit_on_several_gpus() -> None:
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in env(gpus=(uuid(0), uuid(1)))


def test_a_container_is_told_its_fault_domain() -> None:
    assert env(gpus=(uuid(1), uuid(0)))["GPUFRAC_FAULT_DOMAIN"] == f"{uuid(0)},{uuid(1)}"
    assert env(mode=Mode.TIME_SLICING)["GPUFRAC_FAULT_DOMAIN"] == A.key


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("gpus", [(uuid(0),), (uuid(1), uuid(0))])
def test_which_of_its_gpus_a_program_uses_is_left_to_its_pod(mode: Mode, gpus: tuple[str, ...]) -> None:
    assert "CUDA_VISIBLE_DEVICES" not in env(mode=mode, gpus=gpus)


def test_the_fraction_is_rounded_down() -> None:
    assert env(limit_bytes=2, memory_total_bytes=3)["GPUFRAC_MEMORY_FRACTION"] == "0.6666"


def test_the_spec_is_valid_and_needs_no_newer_version() -> None:
    data = msgspec.json.decode(encode_spec(render.spec(A, PIPE)))
    assert data["cdiVersion"] == "0.3.0"
    assert data["kind"] == "gpufrac.dev/allocation"
    assert data["devices"][0]["name"] == f"s{A.key}"


def test_an_answer_names_the_gpus_first_and_gives_nothing_a_pod_could_override() -> None:
    got = render.answer(msgspec.structs.replace(A, gpu_kind="nvidia.com/gpu"), PIPE)
    assert got.cdi_devices == (f"nvidia.com/gpu={uuid(0)}", f"gpufrac.dev/allocation=s{A.key}")
    assert got.envs == ()
    assert got.mounts == ()


def test_delivery_both_repeats_the_edits_for_runtimes_without_cdi() -> None:
    got = render.answer(msgspec.structs.replace(A, gpu_kind="nvidia.com/gpu", delivery=Delivery.BOTH), PIPE)
    assert dict(got.envs)["NVIDIA_VISIBLE_DEVICES"] == uuid(0)
    assert got.mounts == (("/tmp/nvidia-mps", PIPE),)


def test_the_key_comes_back_from_our_device_name_only() -> None:
    assert render.key_of_device(f"gpufrac.dev/allocation=s{A.key}") == A.key
    for name in ("", "x", "nvidia.com/gpu=0", "gpufrac.dev/allocation=", "gpufrac.dev/allocation=s12"):
        assert render.key_of_device(name) is None


def test_a_container_sees_the_daemons_shared_memory_only_where_the_config_says_so() -> None:
    assert configured_shared_memory(A, MpsConfig()) == ""
    directory = configured_shared_memory(A, MpsConfig(shared_memory=True))
    assert uuid(0) in directory
    assert render.mounts(A, PIPE, directory) == (("/tmp/nvidia-mps", PIPE), ("/dev/shm", directory))
    for writable, option in ((False, "ro"), (True, "rw")):
        (device,) = render.spec(A, PIPE, directory, writable=writable).devices
        assert [mount.options[1] for mount in device.container_edits.mounts] == [option, "rw"]
    assert render.mounts(msgspec.structs.replace(A, mode=Mode.TIME_SLICING), PIPE, directory) == ()
