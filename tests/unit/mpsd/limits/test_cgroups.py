import os
from pathlib import Path

import pytest

from mpsd.gpu.model import MIB
from mpsd.limits import cgroups
from mpsd.limits.model import same_limit


@pytest.mark.parametrize(
    ("wanted", "found", "same"),
    [
        (None, None, True), (0, 0, True), (0, None, False), (None, 0, False), (8 * MIB, 8 * MIB, True),
        (8 * MIB, 8 * MIB - 1, False), (8 * MIB, 7 * MIB, False), (8 * MIB, 9 * MIB, False),
        (8 * MIB + 5, 8 * MIB, True), (8 * MIB + 5, 8 * MIB + 4, False), (8 * MIB + 5, 9 * MIB, False),
    ],
)  # fmt: skip
def test_a_limit_reads_back_as_set_or_floored_to_whole_mib(wanted: int | None, found: int | None, same: bool) -> None:
    assert same_limit(wanted, found) is same


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("{root}/a/b", ""),
        ("{root}/a b", ""),
        ("{root}", "below"),
        ("{root}/", "below"),
        ("{root}2/a", "below"),
        ("a", "below"),
        ("", "below"),
        ("/", "below"),
        ("{root}/a/../a", "normalised"),
        ("{root}/../root/a", "normalised"),
        ("{root}//a", "normalised"),
        ("{root}/a/", "normalised"),
        ("{root}/a/.", "normalised"),
        ("{root}/a\0", "normalised"),
        ("{root}/a/file", "no such cgroup"),
        ("{root}/gone", "no such cgroup"),
        ("{root}/inside", "symbolic link"),
        ("{root}/outside", "symbolic link"),
        ("{root}/outside/x", "symbolic link"),
        ("{root}/" + "x/" * 3000 + "x", "longer than"),
    ],
)
def test_only_directories_below_the_root_are_cgroups(short_tmp: Path, path: str, words: str) -> None:
    root = short_tmp / "root"
    for name in ("root/a/b", "root/a b", "root2/a", "elsewhere/x"):
        (short_tmp / name).mkdir(parents=True)
    (root / "a/file").write_text("")
    os.symlink(short_tmp / "elsewhere", root / "outside")
    os.symlink(root / "a", root / "inside")
    said = cgroups.objection(str(root), path.format(root=root))
    assert words in said
    assert bool(said) is bool(words)


def test_a_root_behind_a_symbolic_link_is_fine(short_tmp: Path) -> None:
    (short_tmp / "real/a").mkdir(parents=True)
    os.symlink(short_tmp / "real", short_tmp / "root")
    assert cgroups.objection(f"{short_tmp}/root", f"{short_tmp}/root/a") == ""


def test_a_dmem_file_is_read_leniently(short_tmp: Path) -> None:
    assert cgroups.regions(str(short_tmp), "dmem.min") == {}
    text = "nvidia/00000000:1b:00.0/vidmem 42\nnvidia/b max\ndrm/0000:03:00.0/vram0 7\nnvidia/c\nnvidia/d x\n\n"
    (short_tmp / "dmem.min").write_text(text)
    found = cgroups.regions(str(short_tmp), "dmem.min")
    assert found == {cgroups.region_of("00000000:1B:00.0"): 42, "nvidia/b": 2**64 - 1}
