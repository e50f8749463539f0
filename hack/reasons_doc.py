"""Writes docs/reasons.md: every code, what it means and what to do, from the enums in the code."""

import sys
from pathlib import Path

from deviceplugin.cli.codes import subjects

TARGET = Path(__file__).resolve().parents[1] / "docs" / "reasons.md"
HEAD = """# Reasons

<!-- Written by hack/gen-docs from the enums of codes. -->

Whatever is not as it should be has a reason: a code for programs and a message for people. The code is stable; the
message says what was asked, what is missing and what to do here and now. JSON output and the local APIs have the code
beside its message: `reason` and `reasonCode`, `problems` and `problemCodes` in the same order, and so on (`reason_code`
in what mpsd sends). In `gpufrac status -o json` each line of `attention` has its code in `attentionCodes`.

Texts without a code are no reasons: what is told beside a state (`plan`, `burst`, `drained`, `configRestartNeeded`),
what a self-test `found`, what a cleanup `left`, and errors of a command, which have an exit code. A process of an
earlier version sends no codes: they are `Unknown`.

Words: MPS is NVIDIA's Multi-Process Service, with protocol 2 on drivers before r615 and protocol 3 from r615 on. CDI is
the Container Device Interface, NRI the runtime's Node Resource Interface; a cgroup is a control group of the kernel,
and dmem its controller of device memory; MIG is Multi-Instance GPU; an XID is an error of the driver. More are in the
[glossary](glossary.md).
"""


def render() -> str:
    """The whole page."""
    lines = [HEAD]
    for subject in subjects():
        lines += [f"## {subject.__name__}", "", " ".join((subject.__doc__ or "").split()), ""]
        lines += ["| Code | Meaning | What to do |", "|---|---|---|"]
        lines += [f"| `{code.value}` | {code.meaning} | {code.advice} |" for code in subject]
        lines.append("")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    text = render()
    if "--check" in arguments:
        if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
            return 0
        sys.stderr.write(f"{TARGET.name} is not what the enums of codes say: run hack/gen-docs\n")
        return 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
