"""Lists as protocol 3 prints them: a table that cuts wide cells, or CSV. Pure.

Column titles and widths follow captures of 615 where there are any; the rest is guessed, see `switches`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpsd.sim.mps.views import Refused

Column = tuple[str, int]
"""Title and width; a longer cell is cut to end in `...`. 0: never cut."""

SERVERS: tuple[Column, ...] = (
    ("NAME", 15),
    ("UID", 6),
    ("PID", 6),
    ("STATUS", 13),
    ("PIPE DIRECTORY", 40),
    ("ALLOWED DEVICES", 45),
    ("CONTEXT IDS", 0),
)
NAMESPACES: tuple[Column, ...] = (
    ("NAME", 15),
    ("SERVER", 12),
    ("SERVER STATUS", 13),
    ("PINNED MEMORY LIMIT", 20),
    ("ACTIVE THREAD PERCENTAGE", 24),
    ("CLIENT PRIORITY", 15),
    ("PIPE DIRECTORY", 0),
)
CLIENTS: tuple[Column, ...] = (("PID", 6), ("SERVER", 12), ("DEVICE", 45), ("MAWS NS", 24), ("CMD", 0))
DEVICES: tuple[Column, ...] = (
    ("ORDINAL", 7),
    ("SERVER", 12),
    ("PCI ID", 16),
    ("DEVICE UUID", 45),
    ("NAME", 24),
    ("TOTAL SMS", 9),
    ("TOTAL CHUNKS", 12),
    ("ATTRIBUTES", 0),
)
FEATURES: tuple[Column, ...] = (("FEATURE", 15), ("STATE", 18), ("MODULE", 15), ("COVERS", 0))
SETTINGS: tuple[Column, ...] = (("KEY", 15), ("VALUE", 0))


def render(columns: Sequence[Column], rows: Iterable[Sequence[str]], style: str, quote: bool) -> str:
    """Rows under their titles as `style` wants them: `table` or `csv`, with `,noheader` after it. Raises Refused.

    `quote`: whether a cell with a comma is quoted in CSV.
    """
    form, _, header = style.partition(",")
    if form not in ("table", "csv") or header not in ("", "noheader"):
        raise Refused(f"Invalid format '{style}'")
    lines: list[Sequence[str]] = [] if header else [[title for title, _ in columns]]
    lines += rows
    if form == "csv":
        return "\n".join(",".join(_quoted(cell) if quote else cell for cell in line) for line in lines)
    return "\n".join(
        "  ".join(_padded(cell, width) for cell, (_, width) in zip(line, columns, strict=False)).rstrip()
        for line in lines
    )


def _quoted(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"' if any(mark in cell for mark in ',"\n') else cell


def _padded(cell: str, width: int) -> str:
    if not width:
        return cell
    return (cell if len(cell) <= width else cell[: width - 3] + "...").ljust(width)
