"""A daemon is ours, foreign or gone: each verdict on its evidence."""

from collections.abc import Mapping

import pytest

from mpsd.daemon.adopt import Candidate, DaemonIdentity, Evidence, Foreign, Gone, Ours, judge

PIPE = "/run/gpufrac/mps/GPU-1"
MARKED = {"CUDA_MPS_PIPE_DIRECTORY": PIPE, "GPUFRAC_DAEMON": "GPU-1"}
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
