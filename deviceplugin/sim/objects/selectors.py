"""Selectors of workloads against the labels of their template, as the API server judges them (pure)."""

import json
from collections.abc import Mapping

from deviceplugin.sim.objects.fields import Field
from mpsd.common.quantity import quoted

_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")


def problems(selector: Field, labels: Mapping[str, str], labels_path: str) -> list[str]:
    """What is wrong with a selector that a workload must have."""
    terms = selector.get("matchLabels").texts()
    expressions = selector.get("matchExpressions").items()
    if selector.absent:
        return [f"{selector.path}: Required value: write selector: {{matchLabels: ...}} with labels of the template"]
    if not terms and not expressions:
        return [f"{selector.path}: Invalid value: {{}}: empty selector is invalid for a workload"]
    found = []
    matches = all(labels.get(key) == value for key, value in terms.items())
    for expression in expressions:
        key, operator = expression.get("key").text(), expression.get("operator").text()
        values = [value.text() for value in expression.get("values").items()]
        if operator not in _OPERATORS:
            found.append(
                f"{expression.path}.operator: Invalid value: {quoted(operator)}: not a valid selector operator"
            )
        elif operator in ("In", "NotIn"):
            matches &= (labels.get(key) in values) is (operator == "In")
        else:
            matches &= (key in labels) is (operator == "Exists")
    if not found and not matches:
        text = json.dumps(dict(labels), separators=(",", ":"))
        found.append(f"{labels_path}: Invalid value: {text}: `selector` does not match template `labels`")
    return found


def plain_problems(selector: Field, labels: Mapping[str, str], labels_path: str) -> list[str]:
    """As `problems`, of a ReplicationController: plain labels, those of the template where there are none."""
    terms = selector.texts()
    if all(labels.get(key) == value for key, value in terms.items()):
        return []
    text = json.dumps(dict(labels), separators=(",", ":"))
    return [f"{labels_path}: Invalid value: {text}: `selector` does not match template `labels`"]
