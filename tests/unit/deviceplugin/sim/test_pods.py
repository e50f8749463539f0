"""Pod values: env as the kubelet builds it, names of extended resources."""

import pytest

from deviceplugin.sim.objects.pods import ContainerSpec, FieldRef, PodSpec, environment, expand, is_extended_resource


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("$(A)/x", "1/x"),
        ("$$(A)", "$(A)"),
        ("$(UNKNOWN)", "$(UNKNOWN)"),
        ("$(A", "$(A"),
        ("a$b $", "a$b $"),
        ("$(A)$(A)", "11"),
        ("$$$(A)", "$1"),
    ],
)
def test_references_expand_as_in_kubernetes(text: str, expected: str) -> None:
    assert expand(text, {"A": "1"}) == expected


def test_environment_resolves_fields_and_earlier_entries_only() -> None:
    container = ContainerSpec(
        "c",
        env=(
            ("EARLY", "$(LATE)"),
            ("LATE", "x"),
            ("NAME", FieldRef("metadata.name")),
            ("UID", FieldRef("metadata.uid")),
            ("TEAM", FieldRef("metadata.labels['team']")),
            ("NONE", FieldRef("metadata.annotations['none']")),
            ("ODD", FieldRef("spec.odd")),
            ("BOTH", "$(NAME)-$(LATE)"),
        ),
    )
    pod = PodSpec("p", (container,), labels={"team": "red"})
    assert environment(pod, container, "u-1") == {
        "EARLY": "$(LATE)",
        "LATE": "x",
        "NAME": "p",
        "UID": "u-1",
        "TEAM": "red",
        "NONE": "",
        "BOTH": "p-x",
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvidia.com/gpu", True),
        ("gpufrac.dev/gpu-8gi", True),
        ("cpu", False),
        ("hugepages-2Mi", False),
        ("kubernetes.io/gpu", False),
        ("node.kubernetes.io/gpu", False),
        ("requests.nvidia.com/gpu", False),
        ("/gpu", False),
        ("nvidia.com/", False),
    ],
)
def test_extended_resources(name: str, expected: bool) -> None:
    assert is_extended_resource(name) is expected
