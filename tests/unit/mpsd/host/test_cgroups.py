import os
from pathlib import Path

import pytest

from mpsd.common.errors import TransientError
from mpsd.host import cgroups
from mpsd.host.mountinfo import Mount, parse

POD = "/kubepods/pod1/c1"

V1 = f"12:cpu,cpuacct:{POD}\n11:cpuset:{POD}\n1:name=systemd:{POD}\n"
V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
33 31 0:30 {root} /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset,clone_children
34 31 0:31 {root} /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
"""
V2 = f"0::{POD}\n"
V2_MOUNTS = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID_MOUNTS = V1_MOUNTS + "35 31 0:32 {root} /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
V1_PLACES = tuple(f"/sys/fs/cgroup/{name}/gpufrac" for name in ("cpu,cpuacct", "cpuset", "systemd"))


def locate(
    own: str, mounts: str, root: str = "/", *, host_view: bool = False, private: bool = False
) -> tuple[tuple[str, ...], str]:
    parsed = parse(mounts.format(root=root))
    return cgroups.locate(cgroups.parse_memberships(own), parsed, host_view=host_view, private=private)


def test_mountinfo_is_read_with_its_variable_fields_and_escapes() -> None:
    text = "1 2 0:3 /a\\134b /with\\040blank rw master:1 shared:2 - tmpfs none rw,size=1k\nnonsense\n"
    assert parse(text) == (Mount("/a\\b", "/with blank", "tmpfs", frozenset({"rw", "size=1k"})),)


def test_a_path_with_a_colon_is_kept_and_nonsense_is_left_out() -> None:
    assert cgroups.parse_memberships("3:cpu:/a:b\n0::/\n\nx:y:z\n") == (
        cgroups.Membership(frozenset({"cpu"}), "/a:b"),
        cgroups.Membership(frozenset(), "/"),
    )


@pytest.mark.parametrize(
    ("own", "mounts", "places"),
    [
        (V1, V1_MOUNTS, V1_PLACES),
        (V2, V2_MOUNTS, ("/sys/fs/cgroup/gpufrac",)),
        (V1 + V2, HYBRID_MOUNTS, (*V1_PLACES, "/sys/fs/cgroup/unified/gpufrac")),
    ],
)
def test_every_hierarchy_gets_a_cgroup_at_its_top(own: str, mounts: str, places: tuple[str, ...]) -> None:
    assert locate(own, mounts) == (places, "")


@pytest.mark.parametrize(
    ("own", "mounts", "root", "host_view", "private", "ok"),
    [
        (V1, V1_MOUNTS, POD, False, False, False),  # what runtimes mount into a pod on v1
        (V1, V1_MOUNTS, POD, True, False, False),
        (V2, V2_MOUNTS, "/", False, True, False),  # a private namespace shows the pod's cgroup as the top
        (V2, V2_MOUNTS, "/../../..", False, True, True),  # the host's tree mounted into such a pod
        (V2, V2_MOUNTS, "/../../..", True, True, True),
        (V2, V2_MOUNTS, "/../sibling", True, True, False),
        (V2, V2_MOUNTS, "/", True, True, True),
    ],
)
def test_only_a_mount_that_shows_the_top_will_do(
    own: str, mounts: str, root: str, host_view: bool, private: bool, ok: bool
) -> None:
    places, missing = locate(own, mounts, root, host_view=host_view, private=private)
    assert bool(places) == ok
    assert missing.endswith("does not show the top of its cgroup hierarchy") != ok


@pytest.mark.parametrize(
    ("path", "host_view", "private", "missing"),
    [
        (POD, False, False, "the cgroup hierarchy pids is not mounted"),
        ("/", False, False, ""),
        ("/", False, True, "the cgroup hierarchy pids is not mounted"),
        ("/", True, True, ""),
    ],
)
def test_a_hierarchy_that_is_not_mounted_matters_when_we_may_sit_in_it(
    path: str, host_view: bool, private: bool, missing: str
) -> None:
    found = locate(f"2:pids:{path}\n", V1_MOUNTS, host_view=host_view, private=private)
    assert found == ((), missing)


def test_a_covered_mount_does_not_count() -> None:
    covered = V2_MOUNTS.format(root="/") + V2_MOUNTS.format(root=POD)
    assert locate(V2, covered) == ((), "/sys/fs/cgroup does not show the top of its cgroup hierarchy")
    assert locate(V2, covered + "40 1 0:26 / /host/cgroup rw - cgroup2 none rw\n") == (("/host/cgroup/gpufrac",), "")


def cpuset(top: Path, cpus: str, mems: str) -> None:
    (top / "cpuset.cpus").write_text(cpus)
    (top / "cpuset.mems").write_text(mems)


def test_prepare_fills_cpusets_level_by_level_and_keeps_what_is_set(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuset(short_tmp, "0-7\n", "0\n")
    (own := short_tmp / "gpufrac").mkdir()
    cpuset(own, "2-3\n", "\n")
    (own / "a").mkdir()
    cpuset(own / "a", "\n", "\n")
    places = (str(own), f"{short_tmp}/other")
    assert cgroups.prepare(places, "a") == tuple(f"{place}/a/cgroup.procs" for place in places)
    assert [(own / "a" / f"cpuset.{name}").read_text() for name in ("cpus", "mems")] == ["2-3", "0"]
    assert (short_tmp / "other" / "a").is_dir()


def test_a_cgroup_that_cannot_be_made_is_named_with_what_to_do(short_tmp: Path) -> None:
    (short_tmp / "gpufrac").write_text("in the way")
    with pytest.raises(TransientError, match=r"cannot create the cgroup .*/gpufrac/a: Not a directory: run mpsd"):
        cgroups.prepare((f"{short_tmp}/gpufrac",), "a")


@pytest.mark.parametrize("removals", [1, cgroups.TRIES - 1, cgroups.TRIES])
def test_a_place_that_others_remove_meanwhile_is_made_again(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, removals: int
) -> None:
    make, place, left = os.mkdir, f"{short_tmp}/gpufrac", [removals]

    def mkdir(path: str, mode: int) -> None:
        if path == f"{place}/a" and left[0]:
            left[0] -= 1
            os.rmdir(place)
        make(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    if removals < cgroups.TRIES:
        assert cgroups.prepare((place,), "a") == (f"{place}/a/cgroup.procs",)
    else:
        with pytest.raises(TransientError, match="No such file or directory"):
            cgroups.prepare((place,), "a")


def test_members_are_those_of_any_hierarchy(short_tmp: Path) -> None:
    places = [f"{short_tmp}/{name}" for name in ("one", "two", "gone")]
    for place, pids in zip(places, ("7\n0\n", "5\n7\n"), strict=False):
        Path(place, "a").mkdir(parents=True)
        Path(place, "a", "cgroup.procs").write_text(pids)
    assert cgroups.members(places, "a") == (5, 7)


def test_removal_keeps_what_is_in_use_and_says_so(short_tmp: Path) -> None:
    own = short_tmp / "gpufrac"
    for name in ("a", "b", "busy"):
        (own / name).mkdir(parents=True)
    (own / "busy" / "process").touch()
    cgroups.remove((str(own), f"{short_tmp}/none"), "busy")
    cgroups.remove((str(own),), "a")
    assert sorted(path.name for path in own.iterdir()) == ["b", "busy"]
    assert cgroups.clear((str(own),)) == (f"{own}/busy",)
    cgroups.discard((str(own),))
    (own / "busy" / "process").unlink()
    assert cgroups.clear((str(own), f"{short_tmp}/none")) == ()
    assert not own.exists()
