"""Files that are no manifests yet: templates, values of a chart, kustomizations, ... What they are, and what makes
manifests of them (pure)."""

import re
from collections.abc import Collection, Mapping

_HERE = "gpufrac sim run -"
RENDER = f"render it first, such as with: helm template CHART | {_HERE}"
BUILD = f"build it first: kubectl kustomize DIRECTORY | {_HERE}"

_ACTION = re.compile(r"\{\{-?\s*[^{}]{0,80}\}\}|\{%-?[^{}%]{0,80}%\}")
_HELM = re.compile(
    r"\{\{-?[^{}]{0,200}(?:\.(?:Values|Release|Chart|Capabilities|Files)\b|\b(?:include|template|tpl)\s)"
)
_PLACEHOLDER = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}|\$[A-Z_][A-Z0-9_]{2,}|<[A-Za-z][A-Za-z0-9_. -]*>")
_KUSTOMIZATION_KEYS = frozenset(
    [
        "resources",
        "bases",
        "components",
        "patches",
        "patchesStrategicMerge",
        "patchesJson6902",
        "configMapGenerator",
        "secretGenerator",
        "namePrefix",
        "nameSuffix",
        "commonLabels",
        "images",
        "helmCharts",
        "generators",
        "transformers",
        "replacements",
    ]
)
_CONFIG = ("gpufrac.dev/v1", "NodeConfig")


def template(text: str, line: int | None = None) -> str:
    """Why a text that can't be read as YAML is no manifest, where a template's actions are the cause.

    Args:
        line: where the reader gave up, counted from 1; None where that is not known.
    """
    lines = text.splitlines()
    near = [lines[i] for i in (line - 1, line - 2) if 0 <= i < len(lines)] if line is not None else []
    for candidate in (*near, *lines):
        # A string may hold braces; what stands where YAML wants a value or a line of its own is an action.
        action = _ACTION.search(candidate)
        if action and (candidate in near or re.search(r"(?:^|[:-])\s*$", candidate[: action.start()])):
            return f"it is a template, with {_shown(action[0])} where a value has to be: {RENDER}"
    return ""


def hint(value: object, refusal: str) -> str:
    """What an object that was refused is before somebody fills it in; empty where it looks finished."""
    if action := _helm_action(value, 0):
        return f"; it is a template, with {_shown(action)}: {RENDER}"
    if match := _PLACEHOLDER.search(refusal):
        return f"; {match[0]} is a placeholder: put a value in its place first, such as with envsubst"
    return ""


def no_object(value: Mapping[object, object]) -> str:
    """What a mapping is that lacks apiVersion or kind, and what to do; empty where that can't be told."""
    keys = {str(key) for key in value}
    if isinstance(value.get("services"), Mapping) and "metadata" not in keys:
        return "a Compose file is no manifest"
    if "kind" in keys:
        return ""
    if {"name", "version", "apiVersion"} <= keys and str(value["apiVersion"]) in ("v1", "v2"):
        return f"this is the Chart.yaml of a Helm chart: {RENDER}"
    if "apiVersion" in keys:
        return ""
    if keys & _KUSTOMIZATION_KEYS and all(isinstance(value[key], list | str | Mapping) for key in value):
        lists = [key for key in keys & _KUSTOMIZATION_KEYS if isinstance(value[key], list)]
        if lists or not keys - _KUSTOMIZATION_KEYS - {"namespace"}:
            return f"it looks like a kustomization: {BUILD}"
    if {"metadata", "spec"} & keys:
        return ""
    return f"if these are the values of a Helm chart: helm template CHART --values FILE | {_HERE}"


def no_manifest(version: str, kind: str) -> str:
    """What an object is that no API server has as such; empty where it may have it."""
    if kind == "Kustomization" and version.startswith("kustomize.config.k8s.io/"):
        return f"{version} {kind}: a kustomization is no object of a cluster: {BUILD}"
    return ""


def no_workload(version: str, kind: str) -> str:
    """What an object is that leads to no pod, where that is not what its name says."""
    return "; it is gpufrac's own config: give it with --config" if (version, kind) == _CONFIG else ""


def directory(names: Collection[str]) -> str:
    """What a directory with these files is, where they are no manifests as they are."""
    if "Chart.yaml" in names:
        return f"it is a Helm chart: {RENDER}"
    if {"kustomization.yaml", "kustomization.yml", "Kustomization"} & set(names):
        return f"it is a kustomization: {BUILD}"
    return ""


def _helm_action(value: object, depth: int) -> str:
    """The first action of a Helm template in any text of an object."""
    if isinstance(value, str):
        match = _HELM.search(value)
        whole = _ACTION.search(value, match.start()) if match else None
        return whole[0] if whole else ""
    if depth > 64 or not isinstance(value, Mapping | list):
        return ""
    parts = [*value, *value.values()] if isinstance(value, Mapping) else value
    return next(filter(None, (_helm_action(part, depth + 1) for part in parts)), "")


def _shown(action: str) -> str:
    return " ".join(action.split())
