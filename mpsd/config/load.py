"""The config file -> NodeConfig: strict, every problem at once, each with its line, path, value and rule.

It works on YAML's node tree, not on decoded values. What only the node can tell (no such GPU index, a share too large
for every GPU) is no problem here.
"""

import os

import msgspec
import yaml

from mpsd.config.annotations import read_annotations
from mpsd.config.document import checked_text, compose, read_config
from mpsd.config.model import API_VERSION, KIND, NodeConfig
from mpsd.config.problems import ConfigErrors, ConfigProblem
from mpsd.config.resources import read_resources
from mpsd.config.roots import overlaps
from mpsd.config.sections import plain_sections
from mpsd.config.selection import read_gpus
from mpsd.config.value import Value

__all__ = ["API_VERSION", "KIND", "ConfigErrors", "ConfigProblem", "load_config", "parse_config", "read_config"]

_TOP = (
    "apiVersion",
    "kind",
    "resources",
    "gpus",
    "memory",
    "enforcement",
    "mps",
    "cdi",
    "kubelet",
    "stateRoot",
    "backend",
    "simulated",
    "annotations",
    "nri",
    "kubernetes",
    "metrics",
)


def load_config(path: str | os.PathLike[str]) -> NodeConfig:
    """Reads and checks a config file.

    Raises:
        ConfigErrors: the file can't be read or breaks a rule.
    """
    source = os.fspath(path)
    return parse_config(read_config(source), source)


def parse_config(content: str | bytes, source: str) -> NodeConfig:
    """Checks the content of a config file; `source` is what error texts call it.

    Raises:
        ConfigErrors: with every problem found.
    """
    problems: list[ConfigProblem] = []
    root = compose(checked_text(content, source), source)
    config = _node_config(Value(root, "", problems))
    if problems or config is None:
        raise ConfigErrors(source, problems)
    return config


def _something_else(root: Value) -> str:
    """What a file is that was never meant to be a config of ours; empty for one that was, however wrong it is."""
    if not isinstance(root.node, yaml.MappingNode):
        return ""
    texts = {
        key.value: value.value if isinstance(value, yaml.ScalarNode) else None
        for key, value in root.node.value
        if isinstance(key, yaml.ScalarNode)
    }
    version, kind = texts.get("apiVersion"), texts.get("kind")
    if version and kind and not version.startswith("gpufrac.dev/") and kind.lower() != KIND.lower():
        data = ": the config is a text in its data" if kind == "ConfigMap" else ""
        return f"is a {kind} of {version}, and no {KIND} of {API_VERSION}{data}"
    if "version" in texts and "apiVersion" not in texts and texts.keys() & {"sharing", "flags"}:
        return f"is a config of NVIDIA's device plugin, and no {KIND}: `gpufrac config import nvidia` makes one of it"
    return ""


def _node_config(root: Value) -> NodeConfig | None:
    if what := _something_else(root):
        root.note(what, show=False)
        return None
    entries = root.mapping(_TOP, like="{apiVersion: gpufrac.dev/v1, kind: NodeConfig, resources: [...]}")
    if entries is None:
        return None
    for key, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        if key in entries:
            entries[key].one_of((expected,))
        else:
            root.missing(key, expected)
    selection, groups, shared = read_gpus(entries.get("gpus"))
    config = NodeConfig(resources=(), gpus=selection, groups=groups, shared_groups=shared)
    config = plain_sections(entries, config)
    annotated = "annotations" in entries
    if annotated:
        annotations = read_annotations(entries["annotations"], config.enforcement_minimum, selection)
        config = msgspec.structs.replace(config, annotations=annotations)
    if "resources" in entries:
        names = [name for name, _ in groups]
        resources = read_resources(entries["resources"], config.enforcement_minimum, names, none_allowed=annotated)
        config = msgspec.structs.replace(config, resources=resources)
    elif not annotated:
        root.missing("resources", "a list with at least one resource")
    for key, owner, rule in overlaps(config):
        section = entries.get(key.partition(".")[0]) or entries.get(owner.partition(".")[0])
        if section is not None:
            section.note(rule if section.path == key else f"{key} {rule}", show=False)
    if "simulated" in entries and config.backend != "simulated":
        entries["simulated"].note("is only possible with backend: simulated")
    return config
