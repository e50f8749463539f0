"""Promises of `cdi` over all specs, names, files and orders."""

import copy
import json
import os
import tempfile
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cdi import names
from cdi.decode import decode_json, decode_yaml
from cdi.encode import encode_spec
from cdi.errors import InvalidNameError, InvalidSpecError, MalformedSpecError
from cdi.inject import apply, effective_env
from cdi.model import ContainerEdits, Device, DeviceNode, Hook, IntelRdt, Mount, NetDevice, Spec
from cdi.registry import BrokenFile, Found, SpecFile, build
from cdi.validate import library_faults, writer_faults
from cdi.version import KNOWN_VERSIONS, is_older, minimum_version
from cdi.writer import SpecDirectory
from tests.unit.cdi.support import CLASS, KIND, VENDOR, check_file

promise = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LETTERS, DIGITS = "aZ", "09"
qualifiers = st.builds(
    "{}{}{}".format, st.sampled_from(LETTERS), st.text(LETTERS + DIGITS + "_.-", max_size=4), st.sampled_from("bY1")
)
device_names = st.sampled_from("bY1") | st.builds(
    "{}{}{}".format, st.sampled_from("bY1"), st.text(LETTERS + DIGITS + "_.:-", max_size=4), st.sampled_from("bY1")
)
text = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=4)
words = st.sampled_from(["a", "B_2", "0", "dev", "x1"])
paths = st.lists(words, min_size=1, max_size=3).map(lambda parts: "/" + "/".join(parts))
env_entries = st.dictionaries(words, text, max_size=2).map(lambda env: tuple(f"{k}={v}" for k, v in env.items()))
uint32 = st.integers(0, 2**32 - 1)

mounts = st.builds(
    Mount,
    host_path=paths,
    container_path=paths,
    options=st.sampled_from([("bind", "rw"), ("rbind", "ro", "nosuid", "nodev")]),
    type=st.sampled_from(["", "bind", "none"]),
)
nodes = st.builds(
    DeviceNode,
    path=paths,
    host_path=st.just("") | paths,
    type=st.sampled_from(["b", "c", "u"]),
    major=st.integers(1, 2**63 - 1),
    minor=st.integers(0, 2**63 - 1),
    file_mode=st.none() | st.integers(0, 0o7777),
    permissions=st.sampled_from(["", "r", "rw", "rwm", "none"]),
    uid=st.none() | uint32,
    gid=st.none() | uint32,
)
hooks = st.builds(
    Hook,
    hook_name=st.sampled_from(["prestart", "createContainer", "poststop"]),
    path=paths,
    args=st.lists(text, max_size=2).map(tuple),
    env=env_entries,
    timeout=st.none() | st.integers(1, 1000),
)
edits = st.builds(
    ContainerEdits,
    env=env_entries,
    device_nodes=st.lists(nodes, max_size=1).map(tuple),
    mounts=st.lists(mounts, max_size=2, unique_by=lambda m: m.container_path).map(tuple),
    hooks=st.lists(hooks, max_size=1).map(tuple),
    additional_gids=st.just(()) | st.lists(st.integers(1, 2**32 - 1), max_size=2).map(tuple),
    intel_rdt=st.none() | st.builds(IntelRdt, clos_id=words, enable_monitoring=st.booleans()),
    net_devices=st.just(()) | st.builds(NetDevice, words, words).map(lambda d: (d,)),
)
some_edits = edits.map(lambda e: e if e != ContainerEdits() else ContainerEdits(env=("A=1",)))
annotations = st.dictionaries(words, text, max_size=2)
devices = st.builds(Device, name=device_names, container_edits=some_edits, annotations=annotations)
specs = st.builds(
    Spec,
    kind=st.builds("{}/{}".format, qualifiers, qualifiers),
    devices=st.lists(devices, min_size=1, max_size=3, unique_by=lambda d: d.name).map(tuple),
    container_edits=edits,
    annotations=annotations,
)
loose_edits = st.builds(
    ContainerEdits,
    env=st.lists(st.text(max_size=6), max_size=3).map(tuple),
    mounts=st.lists(st.builds(Mount, st.text(max_size=4), st.text(max_size=4)), max_size=2).map(tuple),
    additional_gids=st.lists(st.integers(-1, 2), max_size=2).map(tuple),
)
loose_specs = st.builds(
    Spec,
    kind=st.text(max_size=6) | st.just(KIND),
    devices=st.lists(st.builds(Device, st.text(max_size=4), loose_edits), max_size=3).map(tuple),
)


def _sorted(spec: Spec) -> Spec:
    return Spec(spec.kind, tuple(sorted(spec.devices, key=lambda d: d.name)), spec.container_edits, spec.annotations)


@promise
@given(specs)
def test_written_specs_fit_the_schema_and_come_back(spec: Spec) -> None:
    data = encode_spec(spec)
    assert data.endswith(b"}\n")
    check_file(data)
    assert decode_json(data) == (minimum_version(spec), _sorted(spec))


@promise
@given(specs, st.randoms(use_true_random=False))
def test_bytes_do_not_depend_on_order(spec: Spec, random: Any) -> None:
    shuffled = list(spec.devices)
    random.shuffle(shuffled)
    same = Spec(spec.kind, tuple(shuffled), spec.container_edits, dict(reversed(list(spec.annotations.items()))))
    assert encode_spec(same) == encode_spec(spec)


@promise
@given(specs)
def test_version_is_the_lowest_that_readers_take(spec: Spec) -> None:
    raw = json.loads(encode_spec(spec))
    lowest = raw["cdiVersion"]
    for version in KNOWN_VERSIONS:
        data = json.dumps(raw | {"cdiVersion": version}).encode()
        if is_older(version, lowest):
            with pytest.raises(MalformedSpecError, match=f"at least {lowest}"):
                decode_json(data)
        else:
            assert decode_json(data) == (version, _sorted(spec))


@promise
@given(loose_specs)
def test_a_spec_is_written_or_refused_with_reasons(spec: Spec) -> None:
    if writer_faults(spec):
        with pytest.raises(InvalidSpecError) as caught:
            encode_spec(spec)
        str(caught.value).encode()
    else:
        check_file(encode_spec(spec))
        assert library_faults(spec) == ()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


any_bytes = st.binary(max_size=200) | st.text(max_size=80).map(str.encode)


@promise
@given(any_bytes | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_give_a_spec_or_the_one_error(data: bytes) -> None:
    for decode in (decode_json, decode_yaml):
        try:
            version, spec = decode(data)
        except MalformedSpecError:
            continue
        assert version in KNOWN_VERSIONS
        assert library_faults(spec) == ()


@promise
@given(specs, st.data())
def test_a_spec_with_one_thing_replaced_gives_a_spec_or_the_one_error(spec: Spec, data: st.DataObject) -> None:
    raw = json.loads(encode_spec(spec))
    where: Any = raw
    for _ in range(data.draw(st.integers(0, 6))):
        key = data.draw(st.sampled_from(list(where) if isinstance(where, dict) else range(len(where))))
        if not where[key] or not isinstance(where[key], dict | list):
            break
        where = where[key]
    key = data.draw(st.sampled_from(list(where) if isinstance(where, dict) else range(len(where))))
    where[key] = data.draw(json_values)
    encoded = json.dumps(raw).encode()
    outcomes: list[tuple[str, Spec] | None] = []
    for decode in (decode_json, decode_yaml):
        try:
            outcomes.append(decode(encoded))
        except MalformedSpecError:
            outcomes.append(None)
    # The YAML reader may be the stricter one (control characters, surrogates); it never reads something else.
    assert outcomes[1] in (None, outcomes[0])


@promise
@given(specs)
def test_json_read_as_yaml_says_the_same(spec: Spec) -> None:
    # YAML has no place for raw control characters; JSON has.
    data = "".join(c if c.isprintable() else " " for c in encode_spec(spec).decode()).encode()
    assert decode_yaml(data) == decode_json(data)


@promise
@given(qualifiers, qualifiers, device_names)
def test_names_round_trip(vendor: str, class_name: str, device: str) -> None:
    qualified = names.format_qualified(vendor, class_name, device)
    assert names.parse_qualified(qualified) == (vendor, class_name, device)


@promise
@given(st.text(max_size=12) | st.text("ab/=.:-_0", max_size=12))
def test_a_name_parses_only_if_it_can_be_formatted_back(text: str) -> None:
    try:
        parsed = names.parse_qualified(text)
    except InvalidNameError:
        assert not names.is_qualified(text)
    else:
        assert names.format_qualified(*parsed) == text


keys = st.sampled_from(["a", "b", "c", "d"])
kind_specs = st.builds(
    lambda name, edits: Spec(KIND, (Device(name, edits),)),
    device_names,
    some_edits,
)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.dictionaries(keys, kind_specs), min_size=1, max_size=4))
def test_apply_converges_and_changes_nothing_the_second_time(wanted: list[dict[str, Spec]]) -> None:
    with tempfile.TemporaryDirectory(prefix="gf-") as path, SpecDirectory(path, VENDOR, CLASS) as directory:
        foreign = os.path.join(path, f"{VENDOR}-{CLASS}_zz.json")
        with open(foreign, "wb") as file:
            file.write(b'{"kind":"other.dev/x"}')
        for desired in wanted:
            before = directory.ids()
            applied = directory.apply(desired)
            assert not applied.errors
            assert set(applied.removed) == before - desired.keys()
            assert directory.ids() == set(desired)
            assert not directory.apply(desired).changed
            for key, spec in desired.items():
                with open(os.path.join(path, directory.file_name(key)), "rb") as file:
                    assert file.read() == encode_spec(spec)
            assert len(os.listdir(path)) == len(desired) + 1
        with open(foreign, "rb") as file:
            assert file.read() == b'{"kind":"other.dev/x"}'


small_files = st.builds(
    lambda path, priority, kind, device_names: SpecFile(
        f"/{priority}/{path}.json",
        priority,
        "0.3.0",
        Spec(kind, tuple(Device(n, ContainerEdits(env=(f"FROM={priority}/{path}",))) for n in device_names)),
    ),
    st.sampled_from("abc"),
    st.integers(0, 1),
    st.sampled_from(["ven/aa", "ven/bb"]),
    st.lists(st.sampled_from(["x", "y", "z"]), min_size=1, max_size=3, unique=True),
)
file_sets = st.lists(small_files, max_size=5, unique_by=lambda f: f.path)


@promise
@given(file_sets, st.randoms(use_true_random=False))
def test_registry_resolves_as_the_rules_say_whatever_the_order(files: list[SpecFile], random: Any) -> None:
    registry = build(files)
    shuffled = list(files)
    random.shuffle(shuffled)
    assert build([BrokenFile("/x", ("y",)), *shuffled]).devices == registry.devices
    for kind in ("ven/aa", "ven/bb"):
        for name in ("x", "y", "z"):
            defining = [f for f in files if f.spec.kind == kind and any(d.name == name for d in f.spec.devices)]
            per_directory = [sum(f.priority == p for f in defining) for p in (0, 1)]
            answer = registry.resolve(f"{kind}={name}")
            if defining and max(per_directory) == 1:
                assert isinstance(answer, Found)
                assert answer.file == max(defining, key=lambda f: f.priority)
            else:
                assert not isinstance(answer, Found)


@promise
@given(st.lists(specs, min_size=1, max_size=3, unique_by=lambda s: s.kind), annotations, st.lists(paths, max_size=3))
def test_injection_leaves_its_input_and_the_last_env_wins(
    chosen: list[Spec], own_env: dict[str, str], own_mounts: list[str]
) -> None:
    registry = build(SpecFile(f"/etc/cdi/{n}.json", 0, minimum_version(spec), spec) for n, spec in enumerate(chosen))
    asked = [(spec, device) for spec in chosen for device in spec.devices]
    oci_spec = {
        "process": {"env": [f"{k}={v}" for k, v in own_env.items()]},
        "mounts": [{"destination": path, "source": "own"} for path in dict.fromkeys(own_mounts)],
    }
    before = copy.deepcopy(oci_spec)
    result = apply(registry, [f"{spec.kind}={device.name}" for spec, device in asked], oci_spec)
    assert oci_spec == before

    entries = [f"{k}={v}" for k, v in own_env.items()]
    for index, (spec, device) in enumerate(asked):
        if index == 0 or asked[index - 1][0] is not spec:
            entries += spec.container_edits.env
        entries += device.container_edits.env
    assert effective_env(result) == dict(entry.split("=", 1) for entry in entries)

    destinations = [mount["destination"] for mount in result["mounts"]]
    assert len(set(destinations)) == len(destinations)
    applied = {m.container_path for s, d in asked for e in (s.container_edits, d.container_edits) for m in e.mounts}
    assert set(destinations) == set(own_mounts) | applied
    if applied:
        depths = [path.count("/") for path in destinations]
        assert depths == sorted(depths)
