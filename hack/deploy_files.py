"""The manifests that are rendered from the chart, for whoever has no Helm.

Each says in its first lines which inputs it was rendered from. So that they are fresh can be told without helm, and
with it they are rendered once more and compared.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "chart" / "gpufrac"
IMAGE = "registry.example/gpufrac"
"""A name that no registry has (RFC 2606): whoever applies the manifest puts theirs."""
KUBERNETES = "1.36"
VALUES = ("--set", f"image.repository={IMAGE}", "--set", "namespace.create=true")
WHOLE = f"""\
Everything, with the chart's own values, for Kubernetes 1.32 and newer (the chart itself from 1.29 on).
# Put your image in place of the name that is there:
#   sed 's|{IMAGE}|your.registry/gpufrac|' deploy/gpufrac.yaml | kubectl apply -f -"""
FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "gpufrac.yaml": (WHOLE, ()),
    "rbac.yaml": ("The rights of the plugin, for a set-up of your own.", ("templates/rbac.yaml",)),
    "own-node-policy.yaml": (
        "Narrows these rights to the node that a plugin runs on. For Kubernetes 1.32 and newer.",
        ("templates/own-node-policy.yaml",),
    ),
}
"""What is rendered: what it is, and the templates of it; of all where none is named."""


def digest() -> str:
    """Of the chart, of what is set here, and of this file."""
    found = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(
        path for path in CHART.rglob("*") if path.suffix != ".md" and path.is_file() and "ci" not in path.parts
    ):
        found.update(path.relative_to(CHART).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def head(name: str) -> str:
    """The first lines of a rendered file."""
    return f"# {FILES[name][0]}\n# Rendered by hack/gen-deploy from deploy/chart/gpufrac; inputs: {digest()}\n"


def helm() -> str | None:
    """The program, None where there is none."""
    return os.environ.get("GPUFRAC_HELM") or shutil.which("helm")


def rendered(program: str, name: str) -> str:
    """A file as it should be. Raises CalledProcessError where helm refuses the chart."""
    only = [word for template in FILES[name][1] for word in ("--show-only", template)]
    command = [program, "template", "gpufrac", str(CHART), "--namespace", "gpufrac", "--kube-version", KUBERNETES]
    done = subprocess.run([*command, *VALUES, *only], check=True, capture_output=True, text=True)
    lines = (line.rstrip() for line in done.stdout.splitlines() if not line.startswith("# Source: "))
    body = "\n".join(line for line in lines if line)
    return head(name) + body.removeprefix("---\n") + "\n"


def main(arguments: list[str]) -> int:
    check, program = arguments == ["--check"], helm()
    if arguments and not check:
        print("usage: hack/gen-deploy [--check]", file=sys.stderr)
        return 2
    if program is None and not check:
        print("hack/gen-deploy: helm is not on PATH: install it, or name it in GPUFRAC_HELM", file=sys.stderr)
        return 2
    stale = []
    for name in FILES:
        path = ROOT / "deploy" / name
        if not check and program is not None:
            path.write_text(rendered(program, name))
        elif not path.read_text().startswith(head(name)) or (program and path.read_text() != rendered(program, name)):
            stale.append(f"deploy/{name}")
    if stale:
        print(f"{', '.join(stale)}: not what the chart renders to: run hack/gen-deploy", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
