"""The docs as a newcomer reads them: short cells, terms explained where they come first, links that lead somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
RECORDS = sorted((ROOT / "docs" / "adr").glob("*.md"))
GLOSSARY = ROOT / "docs" / "glossary.md"
MAX_CELL_WORDS = 30
TERMS = {
    "CDI": "Container Device Interface",
    "CRI": "Container Runtime Interface",
    "DRA": "Dynamic Resource Allocation",
    "MIG": "Multi-Instance GPU",
    "MPS": "Multi-Process Service",
    "NRI": "Node Resource Interface",
    "NVML": "NVIDIA Management Library",
    "PodResources": "lists which container has which devices",
    "XID": "error of the driver",
    "cgroup": "control group",
    "dmem": "device memory",
    "protocol 2": "drivers before r615",
    "protocol 3": "r615 on",
}
"""A term, and words that explain it."""


def prose(page: Path) -> str:
    """What is read: no blocks and spans of code, no targets of links."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text)


def cells(page: Path) -> Iterator[tuple[int, str]]:
    """Cells of tables, with their lines."""
    code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        code ^= line.startswith("```")
        if line.startswith("|") and not code:
            for cell in re.split(r"(?<!\\)\|", line.strip("| ")):
                yield number, cell.strip()


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [*PAGES, *RECORDS], ids=name)
def test_no_cell_of_a_table_is_long(page: Path) -> None:
    long = [f"line {line}: {cell}" for line, cell in cells(page) if len(cell.split()) > MAX_CELL_WORDS]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("page", [page for page in PAGES if page != GLOSSARY], ids=name)
def test_a_term_is_explained_where_it_comes_first(page: Path) -> None:
    unexplained = []
    text = prose(page)
    for term, words in TERMS.items():
        if first := re.search(rf"\b{term}s?\b(?!-O)", text):
            paragraph = text[: first.start()] + text[first.start() :].partition("\n\n")[0]
            if words not in " ".join(paragraph.split()):
                unexplained.append(f"{term} ({words}): {text[first.start() - 40 : first.end() + 40]!r}")
    assert not unexplained, "\n".join(unexplained)


@pytest.mark.parametrize("term", TERMS)
def test_the_glossary_has_every_term(term: str) -> None:
    assert re.search(rf"^\|[^|]*\b{term}\b[^|]*\|", GLOSSARY.read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", [*PAGES, *RECORDS], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" not in target and (path := target.partition("#")[0]):
            assert (page.parent / path).exists(), target
