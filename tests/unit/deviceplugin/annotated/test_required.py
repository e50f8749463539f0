"""Whether the runtime waits for us, as its version and its files tell."""

from pathlib import Path

import pytest

from deviceplugin.annotated.required import runtime_configs, unguarded
from deviceplugin.nri.model import Runtime

CONTAINERD = '[plugins."io.containerd.nri.v1.nri".default_validator]\nenable = {on}\nrequired_plugins = [{names}]\n'
CRIO = "[crio.nri.default_validator]\nnri_enable_default_validator = {on}\nnri_validator_required_plugins = [{names}]\n"


@pytest.mark.parametrize(
    ("name", "version", "file", "text", "words"),
    [
        ("containerd", "2.2.1", "containerd/config.toml", CONTAINERD.format(on="true", names='"x", "gpufrac"'), ""),
        ("containerd", "v2.3.0+x", "containerd/conf.d/9.toml", CONTAINERD.format(on="true", names='"gpufrac"'), ""),
        ("cri-o", "1.34.0", "crio/crio.conf.d/10", CRIO.format(on="true", names='"gpufrac"'), ""),
        ("containerd", "2.2.1", "containerd/config.toml", CONTAINERD.format(on="false", names='"gpufrac"'), "require"),
        ("containerd", "2.2.1", "containerd/config.toml", CONTAINERD.format(on="true", names='"other"'), "require"),
        ("containerd", "2.2.1", "containerd/config.toml", "version = 3\n", 'required_plugins = ["gpufrac"]'),
        ("containerd", "2.2.1", "containerd/config.toml", "no toml at all", "can't be read"),
        ("containerd", "2.2.1", "containerd/config.toml", "plugins = 3\n", "does not require"),
        ("containerd", "2.2.1", "elsewhere", "", "can't be read"),
        ("containerd", "2.1.9", "containerd/config.toml", CONTAINERD.format(on="true", names='"gpufrac"'), "use 2.2"),
        ("cri-o", "1.33.9", "crio/crio.conf", CRIO.format(on="true", names='"gpufrac"'), "use 1.34"),
        ("another", "9.9", "containerd/config.toml", "", "is not known"),
        ("containerd", "built by hand", "containerd/config.toml", "", "use 2.2"),
    ],
)
def test_what_is_required(tmp_path: Path, name: str, version: str, file: str, text: str, words: str) -> None:
    path = tmp_path / "etc" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    runtime = Runtime(name=name, version=version)
    told = unguarded(runtime, "gpufrac", runtime_configs(runtime, str(tmp_path)))
    assert words in told
    assert bool(told) is bool(words)


def test_later_files_win(tmp_path: Path) -> None:
    runtime = Runtime(name="containerd", version="2.2.0")
    (tmp_path / "etc/containerd/conf.d").mkdir(parents=True)
    (tmp_path / "etc/containerd/config.toml").write_text(CONTAINERD.format(on="true", names='"gpufrac"'))
    off = '[plugins."io.containerd.nri.v1.nri".default_validator]\nenable = false\n'
    (tmp_path / "etc/containerd/conf.d/a.toml").write_text(off)
    assert unguarded(runtime, "gpufrac", runtime_configs(runtime, str(tmp_path)))
