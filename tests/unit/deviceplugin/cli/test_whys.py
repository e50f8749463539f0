"""Why a pod and a GPU are as they are."""

import msgspec
import pytest

from deviceplugin.cli.whys import gpu_lines, named_pod, pod_lines
from deviceplugin.status.model import AllocationStatus, GpuAccount, PluginStatus, ResourceStatus


def allocation(pod: str, key: str, **changes: object) -> AllocationStatus:
    values: dict[str, object] = {
        "key": key,
        "resource": "r",
        "deviceIDs": [],
        "group": "GPU-0",
        "gpus": ["GPU-0"],
        "requestBytes": 1 << 30,
        "limitBytes": 2 << 30,
        "mode": "sm-sharing",
        "enforcement": "cooperative",
        "threadPercent": None,
        "namespace": "n" if pod else "",
        "pod": pod,
        "container": "c",
        "podUIDs": [],
        "claimedBy": "",
        "state": "waiting",
        "reason": "no daemon",
        "reasonCode": "DaemonNotReady",
        "createdUnixS": 0.0,
        "adopted": False,
    }
    return msgspec.convert(values | changes, AllocationStatus)


def status(*allocations: AllocationStatus) -> PluginStatus:
    gpu = GpuAccount(
        uuid="GPU-0",
        index=0,
        group="",
        drained="",
        usable_bytes=4 << 30,
        granted_bytes=2 << 30,
        free_bytes=2 << 30,
        allocations=2,
        mode="sm-sharing",
        reason="",
    )
    resource = msgspec.convert(
        {
            **dict.fromkeys(("mode", "enforcement", "minimum", "registration", "registrationError", "reason"), ""),
            **dict.fromkeys(("listed", "healthy", "held", "free"), 0),
            "name": "r",
            "reasons": {"GPU-0": "full"},
            "reasonCodes": {"GPU-0": "NoMemoryLeft"},
        },
        ResourceStatus,
    )
    texts = ("mpsd_error", "kubelet_error", "checkpoint_error", "cdi_error", "config_error", "config_restart_needed")
    return PluginStatus(
        pid=1,
        started_unix_s=0.0,
        **dict.fromkeys((*texts, "gpu_devices", "gpu_devices_reason"), ""),  # type: ignore[arg-type]
        problems=(),
        gpus=(gpu,),
        gone_drained={},
        resources=(resource,),
        allocations=allocations,
    )


ONE, OTHER, UNKNOWN = allocation("a", "1"), allocation("b", "2"), allocation("", "3")


@pytest.mark.parametrize("text", ["a", "n/a", "a/c", "n/a/c"])
def test_a_pod_is_found_however_it_is_named(text: str) -> None:
    assert named_pod(text, [ONE, OTHER, UNKNOWN]) == [ONE]
    assert named_pod(f"{text}x", [ONE, OTHER, UNKNOWN]) == []


def test_a_pod_is_told_with_who_shares_its_gpu_and_what_it_waits_for() -> None:
    text = "\n".join(pod_lines(ONE, status(ONE, OTHER, UNKNOWN)))
    assert "n/b/c, a share of r whose pod is not known" in text
    assert "n/a/c," not in text
    assert "request 1Gi, limit 2Gi" in text
    assert "no daemon (DaemonNotReady)" in text


def test_a_gpu_is_told_with_what_is_on_it_and_why_not_more() -> None:
    text = "\n".join(gpu_lines(status().gpus[0], status(ONE, OTHER)))
    assert "2 containers: n/a/c, n/b/c" in text
    assert "2Gi free of 4Gi, 2Gi granted" in text
    assert "full (NoMemoryLeft)" in text
