"""What a report page is built of: sections, and tables as HTML text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

MANY = 60
"""Tables with more rows than this start folded."""


def section(title: str, content: str) -> str:
    """A part of the page under a heading; `content` is HTML."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def folded(table: str, rows: int, what: str) -> str:
    """A table of so many `rows`, behind a line that opens it where they are many."""
    return table if rows <= MANY else f"<details><summary>{rows} {what}</summary>{table}</details>"


def table(columns: Sequence[str], rows: Iterable[Sequence[tuple[str, str]]]) -> str:
    """A table; a column that ends in `>` is right-aligned; a cell is (text, CSS classes), and `meter 0.3` draws a bar behind it."""
    head = "".join(
        f'<th class="right">{escape(name[:-1])}</th>' if name.endswith(">") else f"<th>{escape(name)}</th>"
        for name in columns
    )
    body = "".join(f"<tr>{''.join(cell(text, classes) for text, classes in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def error_cell(error: float | None, worst: float) -> tuple[str, str]:
    """A relative error, with a bar that is full at `worst`; None: there is none to tell."""
    return ("–", "right") if error is None else (f"{error:.3%}", f"right meter {error / worst:.3f}")


def cell(text: str, classes: str) -> str:
    """A cell of `table`."""
    names = classes.split()
    style = ""
    if "meter" in names:
        share = min(1.0, max(0.0, float(names.pop())))
        style = f' style="--share: {share:.3f}"'
    attribute = f' class="{" ".join(names)}"' if names else ""
    return f"<td{attribute}{style}>{escape(text)}</td>"
