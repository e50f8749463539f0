"""The admission policy on what a container may ask for: its expressions, evaluated on objects as people write them."""

from typing import Any

import cel
import pytest

from tests.unit.deploy.manifests import Object, installed, the

POLICY = the(installed(), "ValidatingAdmissionPolicy", "gpufrac-one-share")["spec"]
ONE, UNIT, OTHER = "gpufrac.dev/gpu-8gi", "gpufrac.dev/memory-gib", "gpufrac.dev/gpu-half"


def container(name: str, **limits: str) -> Object:
    return {"name": name, "resources": {"limits": {**limits}}}


def asked(*containers: Object, init: tuple[Object, ...] = ()) -> Object:
    return {"containers": list(containers), **({"initContainers": list(init)} if init else {})}


def evaluated(expression: str, known: dict[str, Any]) -> Any:
    context = cel.Context()
    context.add_function("join", lambda words, between: between.join(words))
    for name, value in known.items():
        context.add_variable(name, value)
    return cel.evaluate(expression, context)


def said(
    spec: Object, *, resource: str = "pods", before: Object | None = None, ours: tuple[str, ...] = ()
) -> list[str]:
    """What is refused, as the API server evaluates it: conditions, variables in their order, validations."""
    names = {"one": ours or (ONE, OTHER), "ours": (*(ours or (ONE, OTHER)), UNIT)}
    request = {"operation": "CREATE" if before is None else "UPDATE", "resource": {"resource": resource}}
    known: dict[str, Any] = {"object": {"spec": spec}, "request": request, "variables": {}}
    known["oldObject"] = {"spec": before} if before is not None else None
    if not all(evaluated(one["expression"], known) for one in POLICY["matchConditions"]):
        return []
    for variable in POLICY["variables"]:
        name = variable["name"]
        known["variables"][name] = list(names[name]) if name in names else evaluated(variable["expression"], known)
    return [
        evaluated(one["messageExpression"], known)
        for one in POLICY["validations"]
        if not evaluated(one["expression"], known)
    ]


def workload(pod: Object) -> Object:
    return {"replicas": 3, "template": {"spec": pod}}


@pytest.mark.parametrize(
    "pod",
    [
        asked({"name": "web"}),
        asked({"name": "web", "resources": {}}),
        asked(container("web", cpu="2", memory="4Gi")),
        asked(container("web", **{"nvidia.com/gpu": "4"})),
        asked(container("a", **{ONE: "1"}), container("b", **{ONE: "1"})),
        asked(container("a", **{UNIT: "16"}), init=(container("warm-up", **{UNIT: "4"}),)),
        asked(container("a", **{OTHER: "1"}), init=(container("warm-up", **{ONE: "1"}),)),
    ],
)
def test_what_may_be_asked_for(pod: Object) -> None:
    assert said(pod) == []
    assert said(workload(pod), resource="deployments") == []
    assert said({"jobTemplate": {"spec": {"template": {"spec": pod}}}}, resource="cronjobs") == []


@pytest.mark.parametrize(
    ("pod", "message"),
    [
        (asked(container("a", **{ONE: "2"})), f"container a asks for 2 of {ONE}: a container gets exactly 1 share"),
        (asked(container("a", **{ONE: "0"})), f"container a asks for 0 of {ONE}: a container gets exactly 1 share"),
        (
            asked({"name": "web"}, init=(container("warm-up", **{OTHER: "10"}),)),
            f"container warm-up asks for 10 of {OTHER}: a container gets exactly 1 share",
        ),
        (
            asked(container("a", **{ONE: "1", UNIT: "4"})),
            f"container a asks for {ONE} and {UNIT}: a container gets one share of a GPU with one limit",
        ),
    ],
)
@pytest.mark.parametrize(
    ("resource", "around"),
    [
        ("pods", lambda pod: pod),
        ("jobs", workload),
        ("statefulsets", workload),
        ("cronjobs", lambda pod: {"jobTemplate": {"spec": {"template": {"spec": pod}}}}),
    ],
)
def test_what_is_refused_names_the_container_and_what_to_do(
    pod: Object, message: str, resource: str, around: Any
) -> None:
    (text,) = said(around(pod), resource=resource)
    assert text.startswith(message)
    assert "; " in text, "what to do instead"


def test_a_workload_from_before_can_be_scaled_but_not_changed_for_the_worse() -> None:
    bad = asked(container("a", **{ONE: "2"}))
    assert said(workload(bad), resource="deployments", before=workload(bad)) == []
    good = workload(asked(container("a", **{ONE: "1"})))
    assert len(said(workload(bad), resource="deployments", before=good)) == 1


def test_it_is_about_the_resources_of_the_pools() -> None:
    listed = {one["name"]: one["expression"] for one in POLICY["variables"]}
    assert listed["ours"] == listed["one"] == '["gpufrac.dev/gpu-quarter"]'
    assert POLICY["failurePolicy"] == "Ignore", "the plugin refuses it in any case"
