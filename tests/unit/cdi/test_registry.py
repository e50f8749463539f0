"""Which devices a node has, from files good and bad."""

import os
from pathlib import Path

import pytest
from msgspec import structs

from cdi.encode import encode_spec
from cdi.model import ContainerEdits, Hook, Spec
from cdi.registry import BrokenFile, Found, NotFound, Registry, build, find_gpu_kind
from cdi.scan import scan
from tests.unit.cdi.support import UUIDS, env_spec, registry_of, spec_file

GPU = "nvidia.com/gpu"
PLUGIN_GPU = "k8s.device-plugin.nvidia.com/gpu"


@pytest.fixture
def dirs(short_tmp: Path) -> tuple[Path, Path]:
    static, dynamic = short_tmp / "etc", short_tmp / "run"
    static.mkdir()
    dynamic.mkdir()
    return static, dynamic


def _scan(dirs: tuple[Path, Path]) -> Registry:
    return scan([str(d) for d in dirs])


def _write(path: Path, kind: str, *names: str, prefix: str = "D") -> None:
    path.write_bytes(encode_spec(env_spec(kind, *names, prefix=prefix)))


def _reason(registry: Registry, name: str) -> str:
    answer = registry.resolve(name)
    assert isinstance(answer, NotFound)
    assert answer.name == name
    return answer.reason


def test_which_files_are_read(dirs: tuple[Path, Path]) -> None:
    static, _ = dirs
    _write(static / "a.json", GPU, "json")
    _write(static / ".hidden.json", GPU, "hidden")
    (static / "b.yaml").write_text(
        "cdiVersion: 0.3.0\nkind: nvidia.com/gpu\ndevices: [{name: y, containerEdits: {env: [A=1]}}]"
    )
    for name in ("c.yml", "d.json.tmp", "e.JSON", "json", ".f.json.1.0a1b2c3d-0.tmp"):
        _write(static / name, GPU, "ignored")
    (static / "sub.json").mkdir()
    _write(static / "sub.json" / "g.json", GPU, "ignored")
    (static / "link.json").symlink_to(static / "c.yml")
    registry = _scan(dirs)
    assert registry.devices_of(GPU) == ("hidden", "ignored", "json", "y")
    assert registry.errors == {}
    answer = registry.resolve("nvidia.com/gpu=json")
    assert isinstance(answer, Found)
    assert (answer.file.path, answer.file.version, answer.file.priority) == (str(static / "a.json"), "0.3.0", 0)


def test_missing_directories_are_empty() -> None:
    registry = scan(["/nonexistent/a", "/nonexistent/b"])
    assert registry == Registry(("/nonexistent/a", "/nonexistent/b"))
    assert _reason(registry, "ven/cls=d") == "no spec of kind ven/cls in /nonexistent/a, /nonexistent/b"


def test_a_broken_file_hurts_only_itself(dirs: tuple[Path, Path]) -> None:
    static, dynamic = dirs
    _write(static / "good.json", GPU, "0")
    (static / "cut.json").write_bytes(b'{"cdiVersion":"0.3.0","ki')
    (static / "newer.json").write_bytes(b'{"cdiVersion":"9.0.0","kind":"aa/bb","devices":[]}')
    (dynamic / "cut.yaml").write_bytes(b"a: [")
    (dynamic / "dangling.json").symlink_to("nowhere")
    os.mkfifo(dynamic / "pipe.json")
    (dynamic / "todir.json").symlink_to(static)
    registry = _scan(dirs)
    assert registry.devices_of(GPU) == ("0",)
    errors = {Path(path).name: faults for path, faults in registry.errors.items()}
    assert set(errors) == {"cut.json", "newer.json", "cut.yaml", "dangling.json", "pipe.json", "todir.json"}
    assert errors["cut.json"][0].startswith("not JSON")
    assert errors["newer.json"][0].startswith("cdiVersion: '9.0.0'")
    assert errors["dangling.json"] == ("a link to nothing",)
    assert errors["pipe.json"] == ("cannot read it: not a regular file",)
    assert "cut.json (not JSON" in _reason(registry, "aa/bb=d")


def test_a_later_directory_overrides(dirs: tuple[Path, Path]) -> None:
    static, dynamic = dirs
    _write(static / "a.json", GPU, "0", "1", prefix="STATIC")
    _write(dynamic / "a.json", GPU, "0", prefix="DYNAMIC")
    registry = _scan(dirs)
    env = {n: f.device.container_edits.env for n, f in registry.devices.items()}
    assert env == {"nvidia.com/gpu=0": ("DYNAMIC=0",), "nvidia.com/gpu=1": ("STATIC=1",)}
    assert registry.errors == {}
    assert scan([str(dynamic), str(static)]).devices["nvidia.com/gpu=0"].device.container_edits.env == ("STATIC=0",)


def test_the_same_device_twice_in_a_directory_is_lost_and_others_stay(dirs: tuple[Path, Path]) -> None:
    static, dynamic = dirs
    _write(dynamic / "a.json", GPU, "0", "1")
    _write(dynamic / "b.json", GPU, "0", "2")
    registry = _scan(dirs)
    assert registry.devices_of(GPU) == ("1", "2")
    a, b = str(dynamic / "a.json"), str(dynamic / "b.json")
    assert registry.conflicts == {"nvidia.com/gpu=0": (a, b)}
    assert registry.errors == {
        a: (f"device nvidia.com/gpu=0 is also defined in {b}",),
        b: (f"device nvidia.com/gpu=0 is also defined in {a}",),
    }
    assert _reason(registry, "nvidia.com/gpu=0") == f"defined more than once in one directory: {a}, {b}; keep one"
    _write(static / "c.json", GPU, "0")
    assert isinstance(_scan(dirs).resolve("nvidia.com/gpu=0"), NotFound)


def test_conflicts_do_not_depend_on_the_order_of_files() -> None:
    files = [
        spec_file(env_spec(GPU, "0"), "/etc/cdi/a.json"),
        spec_file(env_spec(GPU, "0", "1"), "/etc/cdi/b.json"),
        spec_file(env_spec(GPU, "0"), "/run/cdi/a.json", 1),
        spec_file(env_spec(GPU, "0"), "/run/cdi/b.json", 1),
    ]
    registry = build(files)
    assert registry == build(reversed(files))
    assert registry.conflicts == {
        "nvidia.com/gpu=0": ("/etc/cdi/a.json", "/etc/cdi/b.json", "/run/cdi/a.json", "/run/cdi/b.json")
    }
    assert registry.devices_of(GPU) == ("1",)


def test_a_directory_that_is_a_link_is_not_looked_into(dirs: tuple[Path, Path], short_tmp: Path) -> None:
    static, _ = dirs
    _write(static / "a.json", GPU, "0")
    link = short_tmp / "link"
    link.symlink_to(static)
    registry = scan([str(link)])
    assert registry.devices == {}
    assert "symbolic link" in registry.errors[str(link)][0]
    assert "symbolic link" in _reason(registry, "nvidia.com/gpu=0")


def test_a_file_in_the_place_of_a_directory(dirs: tuple[Path, Path], short_tmp: Path) -> None:
    (short_tmp / "file").write_bytes(b"")
    assert scan([str(short_tmp / "file")]).errors == {str(short_tmp / "file"): ("cannot list it: Not a directory",)}


def test_reasons_name_what_there_is() -> None:
    registry = registry_of(env_spec(GPU, *(str(n) for n in range(7))))
    assert _reason(registry, "nvidia.com/gpu=9") == "kind nvidia.com/gpu has only 0, 1, 2, 3, 4 and 2 more"
    assert _reason(registry, "aa/bb=c") == "no spec of kind aa/bb in /etc/cdi, /var/run/cdi"
    assert _reason(registry, "gpu0").startswith("cannot use 'gpu0' as CDI device")


def test_gpu_kind_is_the_first_that_names_every_uuid() -> None:
    toolkit, plugin = env_spec(GPU, "0", "1", *UUIDS, "all"), env_spec(PLUGIN_GPU, *UUIDS)
    both = find_gpu_kind(registry_of(toolkit, plugin), UUIDS)
    assert (both.kind, both.reasons) == (GPU, {})
    assert both.qualified(UUIDS[0]) == f"nvidia.com/gpu={UUIDS[0]}"
    assert find_gpu_kind(registry_of(plugin), UUIDS).kind == PLUGIN_GPU
    assert find_gpu_kind(registry_of(env_spec(GPU, "0", UUIDS[0]), plugin), UUIDS).kind == PLUGIN_GPU
    assert find_gpu_kind(registry_of(toolkit, plugin), UUIDS, kinds=(PLUGIN_GPU, GPU)).kind == PLUGIN_GPU
    assert find_gpu_kind(registry_of(env_spec("a.b/cls", *UUIDS)), UUIDS, kinds=("a.b/cls",)).kind == "a.b/cls"


def hooked_spec(kind: str, *uuids: str, of_file: bool = False, hook: str = "apply-cuda-memory-limits") -> Spec:
    """Devices with the toolkit's hook, each its own or all through the file."""
    edits = ContainerEdits(hooks=(Hook("createRuntime", "/usr/bin/nvidia-ctk", ("nvidia-ctk", "hook", hook)),))
    plain = env_spec(kind, *uuids)
    if of_file:
        return structs.replace(plain, container_edits=edits)
    devices = tuple(structs.replace(device, container_edits=edits) for device in plain.devices)
    return structs.replace(plain, devices=devices)


@pytest.mark.parametrize(
    ("spec", "hooked"),
    [
        (hooked_spec(PLUGIN_GPU, *UUIDS), True),
        (hooked_spec(PLUGIN_GPU, *UUIDS, of_file=True), True),
        (hooked_spec(PLUGIN_GPU, *UUIDS, hook="update-ldcache"), False),
        (hooked_spec(PLUGIN_GPU, UUIDS[0]), False),
        (env_spec(PLUGIN_GPU, *UUIDS), False),
    ],
    ids=["devices", "file", "other-hook", "half-of-the-gpus", "none"],
)
def test_a_kind_that_sets_memory_limits_comes_first_where_that_is_wanted(spec: Spec, hooked: bool) -> None:
    registry = registry_of(env_spec(GPU, *UUIDS), spec)
    plain, wanted = (find_gpu_kind(registry, UUIDS, prefer_hooked=prefer) for prefer in (False, True))
    assert (plain.kind, wanted.kind) == (GPU, PLUGIN_GPU if hooked else GPU)
    assert plain.hooked == wanted.hooked == ({PLUGIN_GPU} if hooked else set())


def test_the_hook_must_be_on_every_gpu() -> None:
    both = structs.replace(
        env_spec(PLUGIN_GPU, *UUIDS),
        devices=(*hooked_spec(PLUGIN_GPU, UUIDS[0]).devices, *env_spec(PLUGIN_GPU, UUIDS[1]).devices),
    )
    assert find_gpu_kind(registry_of(both), UUIDS).hooked == set()


def test_no_gpu_kind_says_why() -> None:
    def reasons(registry: Registry) -> dict[str, str]:
        found = find_gpu_kind(registry, UUIDS)
        assert found.kind is None
        return dict(found.reasons)

    none = reasons(build([BrokenFile("/etc/cdi/nvidia.yaml", ("not YAML",))]))
    assert set(none) == set(UUIDS)
    assert "no spec of kind nvidia.com/gpu" in none[UUIDS[0]]
    assert "/etc/cdi/nvidia.yaml (not YAML)" in none[UUIDS[0]]
    assert "nvidia-ctk cdi generate --device-name-strategy=uuid" in none[UUIDS[0]]

    index_only = reasons(registry_of(env_spec(GPU, "0", "1", "all")))
    assert "names devices by index only (0, 1, all)" in index_only[UUIDS[1]]
    assert "--device-name-strategy=uuid" in index_only[UUIDS[1]]

    stale = reasons(registry_of(env_spec(GPU, "0", UUIDS[0])))
    assert set(stale) == {UUIDS[1]}
    assert "generate it again" in stale[UUIDS[1]]

    twice = reasons(registry_of(env_spec(GPU, *UUIDS), env_spec(GPU, UUIDS[0])))
    assert set(twice) == {UUIDS[0]}
    assert twice[UUIDS[0]] == "defined more than once in one directory: /etc/cdi/0.json, /etc/cdi/1.json; keep one"
