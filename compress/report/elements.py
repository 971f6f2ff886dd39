"""Elements of a report page: sections, and tables as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

Cell = str | tuple[str, str]
"""Text of a table's cell, with CSS classes where it has any; `meter 0.3` draws a bar below the text."""

MANY = 60
"""Tables with more rows than this start folded."""


def section(title: str, content: str) -> str:
    """A part of the page under a heading; `content` is HTML."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def folded(table: str, rows: int, what: str) -> str:
    """A table of so many `rows`, behind a line that opens it where they are many."""
    return table if rows <= MANY else f"<details><summary>{rows} {what}</summary>{table}</details>"


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A table; a column whose name ends in `>` is right-aligned."""
    right = [name.endswith(">") for name in columns]
    head = "".join(
        f'<th class="right">{escape(name[:-1])}</th>' if name.endswith(">") else f"<th>{escape(name)}</th>"
        for name in columns
    )
    body = "".join(f"<tr>{''.join(map(_cell, row, right))}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(cell: Cell, right: bool) -> str:
    text, classes = (cell, "") if isinstance(cell, str) else cell
    names = classes.split()
    style = ""
    if "meter" in names:
        share = min(1.0, max(0.0, float(names.pop())))
        style = f' style="--share: {share:.3f}"'
    if right and "right" not in names:
        names.insert(0, "right")
    attribute = f' class="{" ".join(names)}"' if names else ""
    return f"<td{attribute}{style}>{escape(text)}</td>"


def error_cell(error: float | None, worst: float) -> Cell:
    """A relative error, with a bar that is full at `worst`; None: there is none."""
    return "–" if error is None else (f"{error:.3%}", f"meter {error / worst:.3f}")


def note(text: str) -> str:
    """A paragraph in a softer colour."""
    return f'<p class="soft">{escape(text)}</p>'


def cards(numbers: Iterable[tuple[str, str, str]]) -> str:
    """Large numbers beside each other, each with its name and a detail."""
    shown = (f"<div><b>{escape(a)}</b>{escape(b)}<small>{escape(c)}</small></div>" for a, b, c in numbers)
    return f'<div class="numbers">{"".join(shown)}</div>'


def document(title: str, heading: str, body: str, footer: str) -> str:
    """The whole page; `body` and `footer` are HTML."""
    css = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n<h1>{escape(heading)}</h1>\n"
        f"{body}\n<footer>{footer}</footer>\n</main>\n</body>\n</html>\n"
    )
