"""Tables and lines that fit a width: the least important columns are left out, and lines break between figures.

Pure: called by screen.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

TITLE_WIDTH = 10
Cell = str | Text


def figure(number: str, name: str) -> Text:
    """Return a number and what it counts."""
    return Text(number, style="bold").append(f" {name}", style="not bold dim")


def lines(width: int, title: str, parts: Iterable[Text], joint: str = "  ") -> list[Text]:
    """Return `title` and the parts after it in as many lines as needed; a part longer than a line is cut."""
    found: list[Text] = []
    for part in parts:
        if found and found[-1].cell_len + cell_len(joint) + part.cell_len <= width:
            found[-1].append(joint).append_text(part)
            continue
        if found:
            found[-1].append(joint.rstrip())
        start = Text(f"{'' if found else title:<{TITLE_WIDTH}}", no_wrap=True, overflow="ellipsis")
        start.stylize("dim")
        found.append(start.append_text(part))
    return found


def table(
    width: int,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    left: int = 1,
    gap: int = 2,
    optional: Sequence[str] = (),
    styles: Sequence[str] = (),
) -> Table:
    """Return a table without rules. The first `left` columns are left-aligned. `optional`: columns that may be left out, in
    this order. `styles`: styles of the rows."""
    widths = [max(cell_len(str(row[index])) for row in (columns, *rows)) for index in range(len(columns))]
    shown = list(range(len(columns)))
    for name in optional:
        if sum(widths[index] for index in shown) + gap * (len(shown) - 1) <= width:
            break
        shown = [index for index in shown if columns[index] != name]
    found = Table(box=None, pad_edge=False, header_style="dim", padding=(0, gap, 0, 0))
    for index in shown:
        found.add_column(columns[index], justify="left" if index < left else "right", no_wrap=True, overflow="ellipsis")
    for row, style in zip(rows, styles or [""] * len(rows), strict=True):
        found.add_row(*(row[index] for index in shown), style=style)
    return found
