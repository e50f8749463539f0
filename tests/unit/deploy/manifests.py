"""The manifests that people apply, as objects."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
DEPLOY = Path(__file__).parents[3] / "deploy"


def objects_of(text: str) -> list[Object]:
    """All objects of a stream of YAML documents."""
    return [found for found in yaml.safe_load_all(text) if found]


def installed() -> list[Object]:
    """What the plain manifest installs."""
    return objects_of((DEPLOY / "gpufrac.yaml").read_text())


def the(objects: list[Object], kind: str, name: str) -> Object:
    """The one of that kind and name."""
    (found,) = (one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def pods_of(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Component and pod spec of each DaemonSet."""
    for one in objects:
        if one["kind"] == "DaemonSet":
            template = one["spec"]["template"]
            yield template["metadata"]["labels"]["app.kubernetes.io/component"], template["spec"]
