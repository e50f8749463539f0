"""Manifests: what pods they lead to, what is a note, and what is refused with which words."""

import contextlib
import json
import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.sim.objects.manifests import (
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
from deviceplugin.sim.objects.pods import FieldRef, PodSpec, Role
from mpsd.common.quantity import quoted

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
  selector: {{matchLabels: {{app: x}}}}
  template:
    metadata: {{labels: {{app: x}}}}
    spec:
      containers: [{{name: main, image: x, resources: {{limits: {{{RESOURCE}: 1}}}}}}]
"""
ONCE = TEMPLATE.replace("  selector: {matchLabels: {app: x}}\n", "") + "      restartPolicy: Never\n"


def workload(head: str) -> str:
    """With what its kind needs: a selector, or pods that end."""
    plain = TEMPLATE.replace("{matchLabels: {app: x}}", "{app: x}")
    return head + (ONCE if "kind: Job" in head else plain if "ReplicationController" in head else TEMPLATE)


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
    found = [item.name for item in pods(workload(head))]
    if isinstance(expected, list):
        assert found == expected
    else:
        assert len(found) == len(set(found)) == expected
        assert all(name.startswith("web-") for name in found)
    assert found == [item.name for item in pods(workload(head))], "names are the same each time"
    if not found:
        assert "0 pods" in notes(workload(head)) or "suspended" in notes(workload(head))


def test_names_look_as_controllers_give_them() -> None:
    (found,) = pods("apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\nspec:" + TEMPLATE)
    base, template_hash, suffix = found.name.split("-")
    assert (base, len(template_hash), len(suffix)) == ("web", 10, 5)
    job = "apiVersion: batch/v1\nkind: Job\nmetadata: {name: j}\nspec:\n  completionMode: Indexed\n  parallelism: 2"
    assert [name.split("-")[:2] for name in (p.name for p in pods(workload(job)))] == [["j", "0"], ["j", "1"]]


def test_a_cron_job_runs_once() -> None:
    head = "apiVersion: batch/v1\nkind: CronJob\nmetadata: {name: c}\nspec:\n  jobTemplate:\n    spec:"
    text = head + textwrap.indent(ONCE, "    ")
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
        (pod(spec="schedulerName: volcano"), "schedulerName volcano: placed here as the cluster's own scheduler does"),
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


@pytest.mark.parametrize("name", ["default-scheduler", "kai-scheduler", '""'])
def test_schedulers_that_are_here_are_not_noted(name: str) -> None:
    assert notes(pod(spec=f"schedulerName: {name}")) == ""


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
        (
            "apiVersion: extensions/v1beta1\nkind: Deployment\n",
            'no matches for kind "Deployment" in version "extensions/v1beta1": it is served in apps/v1: write that',
        ),
        ("apiVersion: apps/v1\nkind: Pod\n", 'no matches for kind "Pod" in version "apps/v1"'),
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
def test_refused_objects(text: str, expected: str) -> None:
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


# --- what a cluster refuses, by kind of mistake

UNKNOWN = "strict decoding error: unknown field "
IMAGES = "{containers: [{name: c, image: x}]}"


def spec_of(text: str) -> str:
    """A pod with this spec in flow style."""
    return f"apiVersion: v1\nkind: Pod\nmetadata: {{name: p}}\nspec: {text}\n"


def container_of(text: str) -> str:
    return spec_of(f"{{containers: [{{name: c, image: x, {text}}}]}}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (container_of("limits: {r/a: 1}"), f'{UNKNOWN}"spec.containers[0].limits": it belongs under resources'),
        (container_of("resource: {limits: {r/a: 1}}"), '"spec.containers[0].resource"; did you mean "resources"?'),
        (container_of("r/a: 1"), "it belongs under resources.limits of a container"),
        (container_of("resources: {limit: {r/a: 1}}"), 'resources.limit"; did you mean "limits"?'),
        (container_of("resources: {r/a: 1}"), 'resources.r/a": it belongs under limits'),
        (container_of("resources: {gpu: 1}"), 'resources.gpu"; known here: limits, requests, claims'),
        (container_of("nodeSelector: {a: b}"), "it belongs under the pod's spec"),
        (spec_of("{limits: {r/a: 1}, containers: [{name: c, image: x}]}"), "it belongs under resources of a container"),
        (spec_of("{container: [{name: c, image: x}]}"), 'unknown field "spec.container"; did you mean "containers"?'),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\ncontainers: [{name: c, image: x}]\n",
            '"containers": it belongs under spec',
        ),
        (
            "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: w}\nspec:\n  containers: []" + TEMPLATE,
            f'{UNKNOWN}"spec.containers": it belongs under spec.template.spec',
        ),
        (
            spec_of("{resources: {limits: {r/a: 1}}, containers: [{name: c, image: x}]}"),
            'spec.resources.limits[r/a]: Unsupported value: "r/a": supported values: "cpu", "hugepages-", "memory"; d',
        ),
        (
            container_of("resources: {claims: [{name: gpu}]}"),
            'spec.containers[0].resources.claims[0].name: Not found: "gpu"',
        ),
        (container_of("").replace("image: x, ", ""), "spec.containers[0].image: Required value"),
        (container_of("").replace("image: x", "image: ' x'"), "must not have leading or trailing whitespace"),
    ],
)
def test_what_asks_for_devices_in_the_wrong_place(text: str, expected: str) -> None:
    assert expected in problem(text)


def test_a_field_that_nobody_knows_is_noted() -> None:
    assert 'unknown field "spec.shiny": kubectl has the API server refuse it' in notes(pod(spec="shiny: true"))


@pytest.mark.parametrize("policy", ["", "      restartPolicy: Always\n"])
def test_a_job_without_pods_that_end(policy: str) -> None:
    text = "apiVersion: batch/v1\nkind: Job\nmetadata: {name: j}\nspec:" + ONCE
    assert 'spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"' in problem(
        text.replace("      restartPolicy: Never\n", policy)
    )


def test_workloads_whose_pods_end() -> None:
    text = (
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: w}\nspec:" + TEMPLATE + "      restartPolicy: Never\n"
    )
    assert 'restartPolicy: Unsupported value: "Never": supported values: "Always"' in problem(text)


@pytest.mark.parametrize(
    ("kind", "selector", "expected"),
    [
        ("Deployment", "null", "spec.selector: Required value"),
        ("DaemonSet", "{}", "empty selector is invalid"),
        (
            "StatefulSet",
            "{matchLabels: {app: y}}",
            'spec.template.metadata.labels: Invalid value: {"app":"x"}: `selector` does not match template `labels`',
        ),
        ("ReplicaSet", "{matchLabels: {app: x, tier: web}}", "does not match"),
        ("Deployment", "{matchExpressions: [{key: app, operator: NotIn, values: [x]}]}", "does not match"),
        ("Deployment", "{matchExpressions: [{key: app, operator: DoesNotExist}]}", "does not match"),
        ("Deployment", "{matchExpressions: [{key: app, operator: Is}]}", "not a valid selector operator"),
        ("ReplicationController", "{app: y}", "does not match"),
    ],
)
def test_a_selector_that_does_not_match(kind: str, selector: str, expected: str) -> None:
    version = "v1" if kind == "ReplicationController" else "apps/v1"
    text = f"apiVersion: {version}\nkind: {kind}\nmetadata: {{name: w}}\nspec:" + TEMPLATE
    assert expected in problem(text.replace("{matchLabels: {app: x}}", selector))


@pytest.mark.parametrize(
    "selector",
    [
        "{matchExpressions: [{key: app, operator: In, values: [x]}]}",
        "{matchExpressions: [{key: app, operator: Exists}]}",
    ],
)
def test_a_selector_that_matches(selector: str) -> None:
    text = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: w}\nspec:" + TEMPLATE
    assert len(pods(text.replace("{matchLabels: {app: x}}", selector))) == 1


def test_what_a_typed_list_leaves_out_of_its_items() -> None:
    item = {"metadata": {"name": "a"}, "spec": yaml.safe_load(pod())["spec"]}
    assert [p.name for p in pods(json.dumps({"apiVersion": "v1", "kind": "PodList", "items": [item]}))] == ["a"]
    assert "items[0]: apiVersion not set, kind not set" in problem(
        json.dumps({"apiVersion": "v1", "kind": "List", "items": [item]})
    )


def test_resource_claims_are_a_pods() -> None:
    text = pod("{}", spec="resourceClaims: [{name: gpu, resourceClaimTemplateName: t}]")
    (found,) = pods(text.replace("requests: {}", "claims: [{name: gpu}]"))
    assert found.claims == ("gpu",)


def test_annotations_that_stand_on_the_workload() -> None:
    head = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: w, annotations: {gpu-fraction: '0.5'}}\nspec:"
    assert "annotation gpu-fraction stands on the Deployment and not on its pods" in notes(head + TEMPLATE)


# --- what is no manifest yet


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "kind: Pod\nmetadata:\n  name: {{ .Release.Name }}\n",
            "f.yaml:3 (document 1): cannot read manifest: it is a temp",
        ),
        ("{{- if .Values.on }}\nkind: Pod\n{{- end }}\n", "it is a template, with {{- if .Values.on }} where a value"),
        (
            "{% if x %}\nkind: Pod\n{% endif %}\n",
            "render it first, such as with: helm template CHART | gpufrac sim run -",
        ),
        (pod().replace("{name: p}", '{name: "{{ .Release.Name }}"}'), "; it is a template, with {{ .Release.Name }}"),
        (pod().replace("{name: p}", "{name: $POD_NAME}"), "$POD_NAME is a placeholder: put a value in its place"),
        (pod().replace("{name: p}", "{name: <your name>}"), "<your name> is a placeholder"),
        (
            "replicaCount: 2\nimage: {repository: a}\n",
            "apiVersion not set, kind not set: if these are the values of a Hel",
        ),
        ("apiVersion: v2\nname: chart\nversion: 1.0.0\n", "this is the Chart.yaml of a Helm chart: render it first"),
        ("resources: [a.yaml]\nnamespace: x\n", "it looks like a kustomization: build it first: kubectl kustomize"),
        (
            "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n",
            "a kustomization is no object of a clust",
        ),
        ("services: {a: {image: x}}\n", "a Compose file is no manifest"),
    ],
)
def test_what_is_no_manifest_yet_is_told_by_what_makes_one_of_it(text: str, expected: str) -> None:
    assert expected in problem(text)


@pytest.mark.parametrize(
    "text",
    [pod(container="args: ['--format', '{{.Names}}']"), pod(container="command: [sh, -c, 'echo ${HOME} <in $PATH']")],
)
def test_braces_and_dollars_of_a_containers_own_are_no_template(text: str) -> None:
    assert len(pods(text)) == 1
    assert "template" not in problem(text.replace("name: main", "name: Main"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"apiVersion: x.io/v1\nkind: TrainJob\nspec: {{replicas: {{Master: {{template: {{spec: {IMAGES}}}}}}}}}",
            "its own controller makes them: to try one here, make a Pod of spec.replicas.Master.template",
        ),
        (
            "apiVersion: x.io/v1\nkind: Service\nspec: {predict: {model: {resources: {limits: {nvidia.com/gpu: 1}}}}}",
            "to try spec.predict.model.resources.limits (nvidia.com/gpu) here, write a Pod that asks for it",
        ),
        (
            "apiVersion: v1\nkind: Service\nmetadata: {name: x}\n",
            "v1 Service: not a kind whose pods this command makes; skip",
        ),
        ("apiVersion: gpufrac.dev/v1\nkind: NodeConfig\n", "it is gpufrac's own config: give it with --config"),
    ],
)
def test_how_to_try_the_pods_of_other_kinds(text: str, expected: str) -> None:
    assert expected in notes(text)


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
        load_all([str(tmp_path / "none"), str(bad), str(good), str(good)])
    first, second = caught.value.problems
    assert "No such file or directory" in first
    assert "bad.yaml" in second
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ManifestError, match="larger than"):
        load_manifests(str(big))


def test_a_directory_is_read_as_kubectl_reads_it(tmp_path: Path) -> None:
    (tmp_path / "below.yaml").mkdir()
    (tmp_path / "notes.txt").write_text("no manifest")
    with pytest.raises(ManifestError, match=r"it has no \.yaml, \.yml, \.json file"):
        load_manifests(str(tmp_path))
    for name in ("b.yml", "a.yaml", "c.json"):
        text = pod().replace("{name: p}", f"{{name: {name[0]}}}")
        (tmp_path / name).write_text(json.dumps(yaml.safe_load(text)) if name == "c.json" else text)
    (tmp_path / "below.yaml" / "d.yaml").write_text(pod())
    found = [item.pod.name for item in load_all([str(tmp_path)]) if isinstance(item, LoadedPod)]
    assert found == ["a", "b", "c"]
    (tmp_path / "kustomization.yaml").touch()
    with pytest.raises(ManifestError, match="it is a kustomization: build it first: kubectl kustomize"):
        load_manifests(str(tmp_path))
    (tmp_path / "Chart.yaml").touch()
    with pytest.raises(ManifestError, match="it is a Helm chart: render it first"):
        load_manifests(str(tmp_path))


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
