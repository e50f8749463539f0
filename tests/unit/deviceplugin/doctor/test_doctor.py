"""Prerequisites as rows, and a doctor that works while everything is down."""

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from deviceplugin.cli.doctor import doctor
from deviceplugin.doctor.checks import DISK_LOW_BYTES, INOTIFY_LOW, Facts, Place, rows_of
from deviceplugin.doctor.look import gather
from deviceplugin.doctor.model import Row, State, exit_code, well
from deviceplugin.doctor.reasons import DoctorCode
from mpsd.common.reason import Reason
from mpsd.config.model import CdiConfig, MpsConfig, NodeConfig
from mpsd.gpu.model import GpuHealth
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, GpuStatus, Snapshot
from tests.builders import info
from tests.unit.deviceplugin.cli.test_whys import allocation, status

GOOD = Facts(
    simulated=True,
    places=(Place("stateRoot", "/s", exists=True, free_bytes=DISK_LOW_BYTES),),
    inotify_instances=INOTIFY_LOW,
    clock_kept=True,
    own_files=(),
)


def of(facts: Facts, check: str) -> Row:
    (found,) = [one for one in rows_of(facts) if one.check == check]
    return found


BAD = [
    ({"simulated": False}, "MPS program", State.FAIL, DoctorCode.NO_MPS_BINARY),
    ({"driver_trouble": "no NVML"}, "driver", State.FAIL, DoctorCode.NO_DRIVER),
    ({"socket_objection": "is too long"}, "socket paths", State.FAIL, DoctorCode.PATH_TOO_LONG),
    ({"closed": "chmod o+x /a"}, "run root", State.FAIL, DoctorCode.CLOSED),
    ({"places": (Place("stateRoot", "/s", exists=False),)}, "stateRoot", State.WARN, DoctorCode.NO_DIRECTORY),
    (
        {"places": (Place("stateRoot", "/s", exists=False, trouble="no"),)},
        "stateRoot",
        State.UNKNOWN,
        DoctorCode.CANNOT_LOOK,
    ),
    (
        {"places": (Place("stateRoot", "/s", exists=True, free_bytes=DISK_LOW_BYTES - 1),)},
        "stateRoot",
        State.FAIL,
        DoctorCode.DISK_FULL,
    ),
    ({"nofile": "too few"}, "open files", State.WARN, DoctorCode.FEW_FILES),
    ({"inotify_instances": INOTIFY_LOW - 1}, "inotify", State.WARN, DoctorCode.FEW_WATCHES),
    ({"inotify_instances": None}, "inotify", State.UNKNOWN, DoctorCode.CANNOT_LOOK),
    ({"clock_kept": None}, "clock", State.UNKNOWN, DoctorCode.NO_CLOCK),
    ({"clock_kept": False}, "clock", State.WARN, DoctorCode.NO_CLOCK),
    ({"cdi_errors": {"/c.json": ("broken",)}}, "CDI files", State.WARN, DoctorCode.CDI_NOT_USABLE),
    ({"own_files": None}, "stale CDI files", State.UNKNOWN, DoctorCode.CANNOT_LOOK),
    ({"assumed": True}, "config", State.UNKNOWN, DoctorCode.NO_CONFIG),
    ({"assumed": True, "kubelet_missing": "no"}, "kubelet", State.UNKNOWN, DoctorCode.NO_KUBELET),
    ({"kubelet_missing": "no socket"}, "kubelet", State.FAIL, DoctorCode.NO_KUBELET),
    ({}, "hard limits", State.UNKNOWN, DoctorCode.NOT_TOLD),
    ({}, "registration", State.UNKNOWN, DoctorCode.NOT_TOLD),
    ({}, "stale CDI files", State.UNKNOWN, DoctorCode.NOT_TOLD),
]


@pytest.mark.parametrize(("change", "check", "state", "code"), BAD)
def test_what_is_missing_is_a_row_with_reason_and_remedy(
    change: dict[str, object], check: str, state: State, code: DoctorCode
) -> None:
    found = of(msgspec.structs.replace(GOOD, **change), check)
    assert found.state == state
    assert found.reason is not None
    assert found.reason.code == code
    assert found.remedy == code.advice


def test_what_is_there_has_no_reason() -> None:
    fine = [one for one in rows_of(GOOD) if one.state == State.OK]
    checks = {"driver", "MPS program", "socket paths", "stateRoot", "open files", "inotify", "clock", "CDI files"}
    assert checks <= {one.check for one in fine}
    assert all(one.reason is None and not one.remedy for one in fine)


def test_what_needs_attention_is_told_once() -> None:
    down = Reason("ProcessNotReachable", "mpsd is down")
    other = Reason("SelfTestFailed", "it failed")
    rows = rows_of(msgspec.structs.replace(GOOD, mpsd_error=down, attention=(down, other)))
    assert [one.check for one in rows if one.reason == down] == ["mpsd"]
    assert [one.check for one in rows if one.reason == other] == ["attention"]


def test_the_exit_code_is_of_the_worst_row() -> None:
    bad = Row("a", State.FAIL)
    assert exit_code([well("a"), Row("b", State.WARN), Row("c", State.UNKNOWN)], down=False) == 0
    assert exit_code([well("a"), bad], down=False) == 1
    assert exit_code([bad], down=True) == 3


def test_facts_are_gathered_from_the_node_as_it_is(tmp_path: Path) -> None:
    cdi = tmp_path / "cdi"
    cdi.mkdir()
    (cdi / "gpufrac.dev-allocation_abc.json").write_text("{")
    (cdi / "gpufrac.dev-allocation_barred-1.json").write_text("{")
    config = NodeConfig(
        resources=(),
        backend="simulated",
        cdi=CdiConfig(directory=str(cdi)),
        mps=MpsConfig(run_root=f"/{'x' * 90}"),
        kubelet_root=str(tmp_path),
        kubelet_device_plugins=str(tmp_path),
        state_root=str(tmp_path / "none"),
    )
    facts = gather(config, None, None, (None, None), (), proc=str(tmp_path))
    assert facts.own_files == ("abc",)
    assert str(cdi / "gpufrac.dev-allocation_abc.json") in facts.cdi_errors
    assert facts.socket_objection
    assert facts.kubelet_missing
    assert facts.inotify_instances is None
    assert facts.clock_kept in (True, False), "the kernel tells"
    exists = {place.setting: place.exists for place in facts.places}
    assert exists["cdi.directory"]
    assert not exists["stateRoot"]


def test_the_command_works_while_both_processes_are_down(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "apiVersion: gpufrac.dev/v1\nkind: NodeConfig\nbackend: simulated\n"
        "resources:\n- name: gpufrac.dev/gpu-8gi\n  compute: {mode: sm-sharing}\n  memory: {request: 8Gi, limit: 8Gi}\n"
    )
    arguments = ["--config", str(config), "--run-root", str(tmp_path)]
    shown = CliRunner().invoke(doctor, [*arguments, "-o", "json"])
    assert shown.exit_code == 3, shown.output
    document = msgspec.json.decode(shown.stdout)
    states = {one["check"]: one["state"] for one in document["rows"]}
    assert (states["mpsd"], states["plugin"]) == ("fail", "fail")
    assert states["hard limits"] == "unknown"
    table = CliRunner().invoke(doctor, arguments)
    assert table.exit_code == 3
    assert "what to do:" in table.output


def test_a_cdi_file_without_an_allocation_is_stale() -> None:
    facts = msgspec.structs.replace(GOOD, plugin=status(allocation("a", "live")), own_files=("live", "gone"))
    found = of(facts, "stale CDI files")
    assert found.reason == Reason(DoctorCode.STALE_FILE, "of allocation gone")
    assert of(msgspec.structs.replace(facts, own_files=("live",)), "stale CDI files").state == State.OK


def test_daemons_that_run_prove_their_program_wherever_this_command_looks() -> None:
    for state, expected in ((DaemonState.READY, State.OK), (DaemonState.BACKOFF, State.FAIL)):
        gpu = GpuStatus(info=info(0), health=GpuHealth.OK, daemon=DaemonStatus(state=state))
        snapshot = Snapshot(instance="i", generation=1, gpus=(gpu,))
        assert of(Facts(snapshot=snapshot), "MPS program").state is expected
