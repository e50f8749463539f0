"""Manifests: what pods they lead to, what is a note, and what is refused with which words."""

import contextlib
import json
import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.sim.manifests import (
    MAX_FILE_BYTES,
    MAX_PODS,
    LoadedPod,
    ManifestError,
    Note,
    load_all,
    load_manifests,
    parse_all,
    parse_manifests,
)
from deviceplugin.sim.pods import FieldRef, PodSpec, Role
from mpsd.quantity import quoted

RESOURCE = "gpufrac.dev/gpu-8gi"


def parse(text: str) -> list[LoadedPod | Note]:
    return parse_manifests(textwrap.dedent(text).encode(), "f.yaml")


def pods(text: str) -> list[PodSpec]:
    return [item.pod for item in parse(text) if isinstance(item, LoadedPod)]


def notes(text: str) -> str:
    items = parse(text)
    return "\n".join(note for i in items for note in (i.notes if isinstance(i, LoadedPod) else (str(i),)))


def problem(text: str) -> str:
    with pytest.raises(ManifestError) as caught:
        parse(text)
    return str(caught.value)


def pod(limits: str = "{gpufrac.dev/gpu-8gi: 1}", requests: str = "{}", spec: str = "", container: str = "") -> str:
    return (
        "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n"
        f"  {spec}\n  containers:\n  - name: main\n    image: x\n    {container}\n"
        f"    resources: {{limits: {limits}, requests: {requests}}}\n"
    )


TEMPLATE = f"""
  template:
    metadata: {{labels: {{app: x}}}}
    spec:
      containers: [{{name: main, image: x, resources: {{limits: {{{RESOURCE}: 1}}}}}}]
"""


# --- kinds


def test_a_pod() -> None:
    (found,) = pods(pod())
    assert (found.full_name, found.containers[0].name) == ("default/p", "main")
    assert found.containers[0].resources == {RESOURCE: 1}
    assert notes(pod()) == ""


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (
            "apiVersion: apps/v1\nkind: StatefulSet\nmetadata: {name: web}\nspec:\n  replicas: 3",
            ["web-0", "web-1", "web-2"],
        ),
        ("apiVersion: apps/v1\nkind: StatefulSet\nmetadata: {name: web}\nspec:\n  ordinals: {start: 5}", ["web-5"]),
        ("apiVersion: apps/v1\nkind: DaemonSet\nmetadata: {name: web}\nspec:", 1),
        ("apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\nspec:", 1),
        ("apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\nspec:\n  replicas: 4", 4),
        ("apiVersion: apps/v1\nkind: ReplicaSet\nmetadata: {name: web}\nspec:\n  replicas: 2", 2),
        ("apiVersion: v1\nkind: ReplicationController\nmetadata: {name: web}\nspec:\n  replicas: 2", 2),
        ("apiVersion: batch/v1\nkind: Job\nmetadata: {name: web}\nspec:", 1),
        ("apiVersion: batch/v1\nkind: Job\nmetadata: {name: web}\nspec:\n  parallelism: 3", 3),
        ("apiVersion: batch/v1\nkind: Job\nmetadata: {name: web}\nspec:\n  parallelism: 3\n  completions: 2", 2),
        ("apiVersion: batch/v1\nkind: Job\nmetadata: {name: web}\nspec:\n  suspend: true", 0),
        ("apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\nspec:\n  replicas: 0", 0),
    ],
)
def test_controllers_make_pods(head: str, expected: int | list[str]) -> None:
    found = [item.name for item in pods(head + TEMPLATE)]
    if isinstance(expected, list):
        assert found == expected
    else:
        assert len(found) == len(set(found)) == expected
        assert all(name.startswith("web-") for name in found)
    assert found == [item.name for item in pods(head + TEMPLATE)], "names are the same each time"
    if not found:
        assert "0 pods" in notes(head + TEMPLATE) or "suspended" in notes(head + TEMPLATE)


def test_names_look_as_controllers_give_them() -> None:
    (found,) = pods("apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\nspec:" + TEMPLATE)
    base, template_hash, suffix = found.name.split("-")
    assert (base, len(template_hash), len(suffix)) == ("web", 10, 5)
    job = "apiVersion: batch/v1\nkind: Job\nmetadata: {name: j}\nspec:\n  completionMode: Indexed\n  parallelism: 2"
    assert [name.split("-")[:2] for name in (p.name for p in pods(job + TEMPLATE))] == [["j", "0"], ["j", "1"]]


def test_a_cron_job_runs_once() -> None:
    head = "apiVersion: batch/v1\nkind: CronJob\nmetadata: {name: c}\nspec:\n  jobTemplate:\n    spec:"
    text = head + textwrap.indent(TEMPLATE, "    ")
    assert len(pods(text)) == 1
    assert "one run of it" in notes(text)
    assert pods(text.replace("spec:\n  jobTemplate", "spec:\n  suspend: true\n  jobTemplate")) == []


def test_lists_are_unpacked() -> None:
    item = yaml.safe_load(pod())
    other = {**item, "metadata": {"generateName": "gen-"}}
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": [item, other, other]})
    first, second, third = (p.name for p in pods(text))
    assert first == "p"
    assert second.startswith("gen-")
    assert second != third


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        ("v1", "Service"),
        ("kubeflow.org/v1", "PyTorchJob"),
        ("batch.volcano.sh/v1alpha1", "Job"),
        ("ray.io/v1", "RayCluster"),
    ],
)
def test_other_kinds_are_noted(version: str, kind: str) -> None:
    text = f"apiVersion: {version}\nkind: {kind}\nmetadata: {{name: x}}\nspec: {{replicas: nonsense}}\n"
    assert pods(text) == []
    assert f"{version} {kind}: not a kind" in notes(text)


def test_documents_comments_and_json() -> None:
    text = f"# a comment\n---\n# only a comment\n---\n{pod()}---\n---\n{pod().replace('name: p', 'name: q')}...\n# end"
    assert [p.name for p in pods(text)] == ["p", "q"]
    values = [yaml.safe_load(pod()), yaml.safe_load(pod().replace("name: p", "name: q"))]
    assert [p.name for p in pods("\n".join(json.dumps(v, indent="\t") for v in values))] == ["p", "q"]
    assert [
        p.name
        for p in pods("{apiVersion: v1, kind: Pod, metadata: {name: flow}, spec: {containers: [{name: c, image: x}]}}")
    ] == ["flow"]


# --- what pods hold


def test_roles_and_order() -> None:
    spec = "initContainers: [{name: i, image: x}, {name: s, image: x, restartPolicy: Always}]"
    (found,) = pods(pod(spec=spec))
    assert [(c.name, c.role) for c in found.containers] == [("i", Role.INIT), ("s", Role.SIDECAR), ("main", Role.APP)]


def test_env() -> None:
    env = (
        "env: [{name: A, value: '1'}, {name: B}, {name: C, valueFrom: {fieldRef: {fieldPath: metadata.name}}}, "
        "{name: D, valueFrom: {secretKeyRef: {name: s, key: k}}}]\n    envFrom: [{configMapRef: {name: cm}}]"
    )
    (found,) = pods(pod(container=env))
    assert found.containers[0].env == (("A", "1"), ("B", ""), ("C", FieldRef("metadata.name")))
    assert "env from objects of a cluster is left out (D, all of cm)" in notes(pod(container=env))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (pod("{gpufrac.dev/gpu-8gi: 0}"), "asks for 0 gpufrac.dev/gpu-8gi: the device plugin is not asked"),
        (pod("{gpufrac.dev/gpu-8gi: null}"), "asks for 0 gpufrac.dev/gpu-8gi"),
        (pod(spec="nodeName: worker-3"), "nodeName worker-3 is another node's"),
        (pod(spec="nodeSelector: {zone: a}"), "nodeSelector zone=a does not match"),
        (pod().replace("    image: x\n", ""), "container main has no image"),
    ],
)
def test_notes(text: str, expected: str) -> None:
    assert expected in notes(text)


def annotated(key: str, value: str = "x") -> str:
    return pod("{}").replace("{name: p}", f"{{name: p, annotations: {{{key}: {value}}}}}")


@pytest.mark.parametrize(
    "key", ["a", "gpu-fraction.limit", "a.B_c-9", "nvidia.com/container.main.gpu-memory.limit", "X.y/Z"]
)
def test_annotations(key: str) -> None:
    (found,) = pods(annotated(key))
    assert found.annotations == {key: "x"}


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        (f"nvidia.com/container.{'c' * 37}.gpu-memory.limit", "name part must be no more than 63 characters"),
        ("-a", "name part must consist of alphanumeric characters"),
        ("nvidia.com/", "name part must consist of alphanumeric characters"),
        ("/a", "prefix part a lowercase RFC 1123 subdomain"),
        ("a/b/c", "prefix part a lowercase RFC 1123 subdomain"),
        (f"{'a' * 254}/b", "prefix part must be no more than 253 characters"),
    ],
)
def test_annotation_keys_that_the_api_server_refuses(key: str, rule: str) -> None:
    assert f"metadata.annotations: Invalid value: {quoted(key)}: {rule}" in problem(annotated(f"'{key}'"))


def test_annotations_that_are_too_long() -> None:
    text = "metadata.annotations: Too long: may not be more than 262144 bytes"
    assert text in problem(annotated("a", "x" * 262_144))


def test_restart_policy_and_scheduler() -> None:
    (found,) = pods(pod())
    assert (found.restart_policy, found.scheduler) == ("Always", "")
    (found,) = pods(pod(spec="restartPolicy: Never\n  schedulerName: kai-scheduler"))
    assert (found.restart_policy, found.scheduler) == ("Never", "kai-scheduler")
    text = 'spec.restartPolicy: Unsupported value: "never": supported values: "Always", "OnFailure", "Never"'
    assert text in problem(pod(spec="restartPolicy: never"))


def test_a_matching_node_selector_is_not_noted() -> None:
    assert notes(pod(spec="nodeSelector: {kubernetes.io/os: linux}\n  nodeName: simulated")) == ""


@pytest.mark.parametrize(
    ("value", "count"),
    [("1", 1), ('"1"', 1), ("1e3", 1000), ("2k", 2000), ("1000m", 1), ("1.0", 1), ("3.", 3), ("+2", 2)],
)
def test_counts_are_quantities(value: str, count: int) -> None:
    (found,) = pods(pod(f"{{{RESOURCE}: {value}}}"))
    assert found.containers[0].resources == {RESOURCE: count}


# --- what the API server refuses


@pytest.mark.parametrize(
    ("limits", "requests", "expected"),
    [
        (
            "500m",
            None,
            'Pod "p" is invalid: spec.containers[0].resources.limits[{r}]: Invalid value: "500m": must be an integer',
        ),
        (
            "-1",
            None,
            'spec.containers[0].resources.limits[{r}]: Invalid value: "-1": must be greater than or equal to 0',
        ),
        ("1", "2", 'spec.containers[0].resources.requests: Invalid value: "2": must be equal to {r} limit of 1'),
        (
            None,
            "1",
            "spec.containers[0].resources.limits: Required value: Limit must be set for non overcommitable resources",
        ),
        (
            '"${X}"',
            None,
            'Pod in version "v1" cannot be handled as a Pod: spec.containers[0].resources.limits[{r}]: "${X}": quantit',
        ),
        ("1Gib", None, "quantities must match the regular expression"),
        ("[1]", None, "quantities must match the regular expression"),
    ],
)
def test_quantities_the_api_server_refuses(limits: str | None, requests: str | None, expected: str) -> None:
    text = pod(f"{{{RESOURCE}: {limits}}}" if limits else "{}", f"{{{RESOURCE}: {requests}}}" if requests else "{}")
    found = problem(text)
    assert expected.replace("{r}", RESOURCE) in found
    assert found.startswith("f.yaml:1 (document 1): ")


def test_names_of_resources() -> None:
    assert 'limits[gpu]: Invalid value: "gpu": must be a standard resource type' in problem(pod("{gpu: 1}"))
    assert problem(pod("{memory: 16 GB}")).endswith("'^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'")
    assert "memory]: Invalid value" in problem(pod("{memory: -1}"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kind: Pod\n", "apiVersion not set"),
        ("apiVersion: v1\n", "kind not set"),
        ("apiVersion: v1\nkind: [Pod]\n", "kind: must be a string, not a list"),
        ("- a\n", "must be an object with apiVersion and kind, not a list"),
        ("just text\n", 'not the string "just text"'),
        ("apiVersion: extensions/v1beta1\nkind: Deployment\n", None),
        ("apiVersion: apps/v1beta2\nkind: Deployment\n", 'no matches for kind "Deployment" in version "apps/v1beta2"'),
        (
            pod().replace("{name: p}", "{}"),
            'Pod "" is invalid: metadata.name: Required value: name or generateName is required',
        ),
        (
            pod().replace("{name: p}", "{name: 12}"),
            'metadata.name: must be a string, not the number 12; write it in quotes: "12"',
        ),
        (
            pod().replace("{name: p}", "{name: Bad_Name}"),
            'metadata.name: Invalid value: "Bad_Name": a lowercase RFC 1123',
        ),
        (pod().replace("{name: p}", "{name: ../../etc}"), "is invalid: metadata.name: Invalid value"),
        (pod().replace("{name: p}", "{name: p, namespace: a/b}"), "metadata.namespace: Invalid value"),
        (pod().replace("name: main", "name: Main"), 'spec.containers[0].name: Invalid value: "Main"'),
        (pod().replace("name: main", "image: y"), "is given twice"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: p}\n", 'Pod "p" is invalid: spec: Required value'),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {}\n", "spec.containers: Required value"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {containers: []}\n", "spec.containers: Required value"),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {containers: {a: b}}\n",
            "spec.containers: must be a list, not an object",
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {containers: [null, 3]}\n",
            "spec.containers[1]: must be an object, not the number 3",
        ),
        (
            pod(container="env: [{name: A, value: 1}]"),
            'spec.containers[0].env[0].value: must be a string, not the number 1; write it in quotes: "1"',
        ),
        (pod(container="env: [{value: x}]"), "spec.containers[0].env[0].name: Required value"),
        (pod(spec="initContainers: [{name: main, image: x}]"), 'spec.containers[0].name: Duplicate value: "main"'),
        (
            pod().replace("{name: p}", "{name: p, annotations: {gpu-fraction: 0.5}}"),
            "metadata.annotations.gpu-fraction: must be a string",
        ),
        (
            "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: w}\nspec:\n  replicas: '3'" + TEMPLATE,
            'spec.replicas: must be a whole number, not the string "3"',
        ),
        (
            "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: w}\nspec:\n  replicas: -1" + TEMPLATE,
            "spec.replicas: Invalid value: -1",
        ),
        (
            "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: w}\nspec:\n  replicas: 100000" + TEMPLATE,
            "asks for 100000 pods",
        ),
        (
            "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: w}\nspec:\n  replicas: 0\n  template: {}\n",
            "spec.template.spec: Required value",
        ),
        (
            "apiVersion: batch/v1\nkind: Job\nmetadata: {name: w}\nspec:\n  suspend: 'yes'" + TEMPLATE,
            "spec.suspend: must be true or false",
        ),
        ("apiVersion: v1\nkind: List\nitems: {a: b}\n", "items: must be a list"),
        ("apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: Pod}]\n", 'items[0]: Pod "" is invalid'),
    ],
)
def test_refused_objects(text: str, expected: str | None) -> None:
    if expected is None:
        assert "not a kind" in notes(text)
    else:
        assert expected in problem(text)


def test_template_paths_name_the_template() -> None:
    text = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: w}\nspec:" + TEMPLATE.replace(": 1}", ": 1m}")
    assert 'Deployment "w" is invalid: spec.template.spec.containers[0].resources.limits' in problem(text)


def test_every_problem_of_every_document_is_told() -> None:
    text = f"{pod('{gpu: 1}')}---\n{pod('{a/b: -1, c/d: 1m}')}"
    first, second = problem(text).splitlines()
    assert first.startswith("f.yaml:1 (document 1): ")
    assert second.startswith("f.yaml:12 (document 2): ")
    assert "limits[a/b]" in second
    assert "limits[c/d]" in second


def test_one_name_is_there_once() -> None:
    assert (
        'f.yaml (document 2): pods "p" already exists in namespace "default": first in f.yaml (document 1)'
        in problem(f"{pod()}---\n{pod()}")
    )
    with pytest.raises(ManifestError, match="already exists"):
        parse_all([("a", pod().encode()), ("b", pod().encode())])
    other = pod().replace("{name: p}", "{name: p, namespace: other}")
    assert len(pods(f"{pod()}---\n{other}")) == 2


# --- what can't be read


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a: [1\nb: 2\n", "f.yaml:2 (document 1): cannot read manifest: not valid YAML"),
        (pod().encode() + b"---\na: b: c\n", "f.yaml:12 (document 2): cannot read manifest: not valid YAML"),
        (b"a: 1\na: 2\n", 'f.yaml:2 (document 1): cannot read manifest: not valid YAML: key "a" is given twice'),
        (b"a: *nothing\n", "f.yaml:1 (document 1): cannot read manifest: not valid YAML"),
        (b"a: !!python/object:os.system {}\n", "cannot read manifest: not valid YAML"),
        (b"a: !custom x\n", "cannot read manifest: not valid YAML"),
        (b"\ta: 1\n", "cannot read manifest: not valid YAML"),
        (b'{"apiVersion": "v1", "kind": \n', "cannot read manifest: not valid YAML"),
        (b'{"a": 1, "a": 2}', "is given twice"),
        (b"[" * 5000, "nest"),
        (b"[" * 70 + b"]" * 70, "nested deeper than 64 levels"),
        (b"a: \xff\n", "f.yaml:1: cannot read manifest: it must be UTF-8"),
        ("a: 1".encode("utf-16"), "it must be UTF-8, this looks like UTF-16"),
        (b"", "cannot read manifest f.yaml: no objects in it"),
        (b"# only a comment\n", "no objects in it"),
        (b"a: \x00\n", "cannot read manifest"),
    ],
)
def test_unreadable(data: bytes, expected: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_manifests(data, "f.yaml")
    assert expected in str(caught.value)


def test_aliases_of_themselves_end() -> None:
    assert "lists in lists" in problem("&l\napiVersion: v1\nkind: List\nitems: [*l]\n")


def test_files(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_bytes(b"\xef\xbb\xbf" + pod().encode())
    bad.write_text("a: [")
    assert len(load_manifests(str(good))) == 1
    with pytest.raises(ManifestError) as caught:
        load_all([str(tmp_path), str(tmp_path / "none"), str(bad), str(good), str(good)])
    first, second, third = caught.value.problems
    assert "it is a directory; name the files in it" in first
    assert "No such file or directory" in second
    assert "bad.yaml" in third
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ManifestError, match="larger than"):
        load_manifests(str(big))


def test_pods_of_one_run_are_bounded() -> None:
    half = (
        f"apiVersion: apps/v1\nkind: StatefulSet\nmetadata: {{name: NAME}}\nspec:\n  replicas: {MAX_PODS // 2 + 1}"
        + TEMPLATE
    )
    with pytest.raises(ManifestError, match=f"more than {MAX_PODS} pods"):
        parse_all([(name, half.replace("NAME", name).encode()) for name in ("a", "b")])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = [
    "metadata",
    "spec",
    "template",
    "containers",
    "initContainers",
    "resources",
    "limits",
    "name",
    "env",
    "replicas",
]
shaped = st.recursive(
    json_values,
    lambda inner: st.dictionaries(st.sampled_from(KEYS), inner, max_size=4) | st.lists(inner, max_size=2),
    max_leaves=12,
)


@given(st.sampled_from(["Pod", "Deployment", "StatefulSet", "Job", "CronJob", "List"]), shaped, shaped)
def test_any_object_is_taken_or_refused(kind: str, metadata: object, spec: object) -> None:
    version = {"Pod": "v1", "List": "v1", "Job": "batch/v1", "CronJob": "batch/v1"}.get(kind, "apps/v1")
    value = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec, "items": spec}
    for data in (json.dumps(value).encode(), yaml.safe_dump(value).encode()):
        with contextlib.suppress(ManifestError):
            parse_manifests(data, "f")


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_taken_or_refused(data: bytes) -> None:
    with contextlib.suppress(ManifestError):
        parse_manifests(data, "f")
