"""Units as systemd reads them, and whose a unit is."""

import shutil
import subprocess
from pathlib import Path

import pytest

from deviceplugin.draft.units import MPSD, NAMES, PLUGIN, Owner, owner, quoted, units
from mpsd.supervision.ends import ENDS, End

UNITS = units(("/opt/gpufrac/bin/gpufrac",), "/etc/gpufrac/config.yaml", "1.0")


def values(text: str, key: str) -> list[str]:
    return [line.partition("=")[2] for line in text.splitlines() if line.partition("=")[0] == key]


def test_both_start_before_the_kubelet_and_mpsd_first() -> None:
    assert "kubelet.service" in values(UNITS[PLUGIN], "Before")[0]
    assert {PLUGIN, "kubelet.service", "k3s.service"} <= set(values(UNITS[MPSD], "Before")[0].split())
    assert values(UNITS[PLUGIN], "After") == [MPSD]
    assert [values(UNITS[name], "Type") for name in NAMES] == [["notify"], ["notify"]]


def test_an_end_of_mpsd_has_its_time_and_spares_daemons() -> None:
    most_s = ENDS[End.STOPPING].most_s
    assert most_s is not None
    assert int(values(UNITS[MPSD], "TimeoutStopSec")[0]) > most_s
    assert values(UNITS[MPSD], "KillMode") == ["process"]


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("/usr/bin/gpufrac", "/usr/bin/gpufrac"),
        ("/opt/my tools/gpufrac", '"/opt/my tools/gpufrac"'),
        ("/opt/100%/$x", "/opt/100%%/$$x"),
        ('/a"b\\c', '"/a\\"b\\\\c"'),
    ],
)
def test_words_of_a_command_mean_themselves(word: str, text: str) -> None:
    assert quoted(word) == text


def test_whose_a_unit_is() -> None:
    text = UNITS[MPSD]
    assert owner(None) is Owner.NOBODY
    assert owner(text) is Owner.OURS
    assert owner(units(("/x",), "/y", "0.9")[MPSD]) is Owner.OURS, "of another version, for another place"
    assert owner(text.replace("RestartSec=2", "RestartSec=9")) is Owner.EDITED
    assert owner(text.partition("\n")[2]) is Owner.FOREIGN
    assert owner("") is Owner.FOREIGN


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd: systemd-analyze is not on PATH")
def test_systemd_understands_every_line(short_tmp: Path) -> None:
    program = short_tmp / "gpu frac"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for name, text in units((str(program),), "/etc/gpufrac/config.yaml", "1.0").items():
        (short_tmp / name).write_text(text)
    command = ["systemd-analyze", "verify", *(str(short_tmp / name) for name in NAMES)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    complaints = [line for line in done.stderr.splitlines() if "gpufrac-" in line]
    assert complaints == []
    (short_tmp / PLUGIN).write_text((short_tmp / PLUGIN).read_text() + "\n[Service]\nRestartt=always\n")
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert "Restartt" in done.stderr, "it would have said so"
