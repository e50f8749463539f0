"""A daemon is ours, foreign or gone: each verdict on its evidence."""

from collections.abc import Mapping

import msgspec
import pytest

from mpsd.daemon.adopt import Candidate, DaemonIdentity, Evidence, Foreign, Gone, Ours, judge

PIPE = "/run/gpufrac/mps/GPU-1"
MARKED = {"CUDA_MPS_PIPE_DIRECTORY": PIPE, "GPUFRAC_DAEMON": "GPU-1"}
V3 = {**MARKED, "CUDA_MPS_PROTOCOL_VERSION": "3", "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}
UNMARKED = {"CUDA_MPS_PIPE_DIRECTORY": PIPE}
OTHER = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps"}


def identity(boot_id: str = "boot", pid: int = 10, start_time: int = 500, pipe_directory: str = PIPE) -> DaemonIdentity:
    return DaemonIdentity(
        boot_id=boot_id, pid=pid, start_time=start_time, process_group=9, pipe_directory=pipe_directory
    )


def candidate(environment: Mapping[str, str] | None, pid: int = 10, start_time: int = 500) -> Candidate:
    return Candidate(pid, start_time, 9, environment)


@pytest.mark.parametrize(
    ("recorded", "candidates", "verdict"),
    [
        pytest.param(None, (), Gone, id="nobody lives"),
        pytest.param(identity(), (), Gone, id="the recorded one died"),
        pytest.param(identity(), (candidate(MARKED),), Ours, id="recorded and marked"),
        pytest.param(identity(), (candidate(UNMARKED),), Ours, id="recorded by an older version"),
        pytest.param(identity(), (candidate(None),), Ours, id="recorded, environment unreadable"),
        pytest.param(None, (candidate(MARKED),), Ours, id="killed between start and record"),
        pytest.param(identity(start_time=400), (candidate(OTHER),), Gone, id="pid reused by something else"),
        pytest.param(identity(start_time=400), (candidate({}),), Gone, id="pid reused, empty environment"),
        pytest.param(identity(start_time=400), (candidate(MARKED),), Ours, id="restarted by hand of ours"),
        pytest.param(identity(boot_id="old"), (candidate(OTHER),), Gone, id="record of an earlier boot"),
        pytest.param(identity(boot_id="old"), (candidate(UNMARKED),), Foreign, id="same numbers in another boot"),
        pytest.param(None, (candidate(UNMARKED),), Foreign, id="started by someone else in our directory"),
        pytest.param(None, (candidate(None),), Foreign, id="unknown is not ours"),
        pytest.param(identity(start_time=400), (candidate(None),), Foreign, id="pid reused, environment unreadable"),
        pytest.param(identity(pipe_directory="/old"), (candidate(UNMARKED),), Foreign, id="record of another place"),
        pytest.param(
            identity(pid=1, start_time=1), (candidate(OTHER, 1, 1), candidate(MARKED)), Ours, id="the second one is it"
        ),
        pytest.param(None, (candidate({**MARKED, "GPUFRAC_DAEMON": "GPU-2"}),), Foreign, id="marked for another GPU"),
    ],
)
def test_verdict(recorded: DaemonIdentity | None, candidates: tuple[Candidate, ...], verdict: type) -> None:
    found = judge(Evidence("boot", "GPU-1", PIPE, recorded, candidates))
    assert type(found) is verdict
    if isinstance(found, Ours):
        assert found.identity == identity()


@pytest.mark.parametrize(
    ("environment", "recorded", "protocol", "gpus"),
    [
        pytest.param(V3, None, 3, ("GPU-1", "GPU-2"), id="what it was started with"),
        pytest.param({**MARKED, "CUDA_MPS_PROTOCOL_VERSION": "2"}, None, 2, (), id="no GPUs named"),
        pytest.param(MARKED, (3, ("GPU-1",)), 2, (), id="its environment counts, not the record"),
        pytest.param(None, (3, ("GPU-1",)), 3, ("GPU-1",), id="unreadable: the record"),
        pytest.param(None, (2, ()), 2, (), id="unreadable: an old record"),
    ],
)
def test_protocol_and_gpus(
    environment: Mapping[str, str] | None,
    recorded: tuple[int, tuple[str, ...]] | None,
    protocol: int,
    gpus: tuple[str, ...],
) -> None:
    record = None if recorded is None else msgspec.structs.replace(identity(), protocol=recorded[0], gpus=recorded[1])
    found = judge(Evidence("boot", "GPU-1", PIPE, record, (candidate(environment),)))
    assert isinstance(found, Ours)
    assert (found.identity.protocol, found.identity.gpus) == (protocol, gpus)
