"""Elements of a report page: sections, and tables as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

Cell = str | tuple[str, str] | tuple[str, str, float | None]
"""Text of a table's cell, CSS classes where it has any (`meter 0.3` draws a bar below the text), and the number that it is sorted by."""

MANY = 60
"""Tables with more rows than this start folded."""


def section(title: str, content: str) -> str:
    """A part of the page under a heading; `content` is HTML."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def folded(table: str, rows: int, what: str) -> str:
    """A table of so many `rows`, behind a line that opens it where they are many."""
    return table if rows <= MANY else f"<details><summary>{rows} {what}</summary>{table}</details>"


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], sorts: bool = False) -> str:
    """A table; a column whose name ends in `>` is right-aligned.

    Args:
        sorts: clicking a column header sorts by it, if the browser runs scripts.
    """
    right = [name.endswith(">") for name in columns]
    head = "".join(
        f'<th class="right">{escape(name[:-1])}</th>' if name.endswith(">") else f"<th>{escape(name)}</th>"
        for name in columns
    )
    body = "".join(f"<tr>{''.join(map(_cell, row, right))}</tr>" for row in rows)
    kind = ' class="sorts"' if sorts else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(cell: Cell, right: bool) -> str:
    text, classes, *by = (cell, "") if isinstance(cell, str) else cell
    names = classes.split()
    style = ""
    if "meter" in names:
        share = min(1.0, max(0.0, float(names.pop())))
        style = f' style="--share: {share:.3f}"'
    if right and "right" not in names:
        names.insert(0, "right")
    attribute = f' class="{" ".join(names)}"' if names else ""
    if by:
        attribute += f' data-by="{"" if by[0] is None else repr(float(by[0]))}"'
    return f"<td{attribute}{style}>{escape(text)}</td>"


def error_cell(error: float | None, worst: float) -> Cell:
    """A relative error, with a bar that is full at `worst`; None: there is none."""
    return ("–", "", None) if error is None else (f"{error:.3%}", f"meter {error / worst:.3f}", error)


def note(text: str) -> str:
    """A paragraph in a softer colour."""
    return f'<p class="soft">{escape(text)}</p>'


def pairs(entries: Mapping[str, object]) -> str:
    """Names and what they are, as a list; entries that are None or empty are left out."""
    items = (f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in entries.items() if v is not None and v != "")
    return f"<dl>{''.join(items)}</dl>"


def cards(numbers: Iterable[tuple[str, str, str]]) -> str:
    """Large numbers beside each other, each with its name and a detail."""
    shown = (f"<div><b>{escape(a)}</b>{escape(b)}<small>{escape(c)}</small></div>" for a, b, c in numbers)
    return f'<div class="numbers">{"".join(shown)}</div>'


def document(title: str, heading: str, body: str, footer: str) -> str:
    """The whole page; `body` and `footer` are HTML."""
    css, script = (Path(__file__).with_name(f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    body += f"\n<script>\n{script}</script>" if '<table class="sorts">' in body else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n<h1>{escape(heading)}</h1>\n"
        f"{body}\n<footer>{footer}</footer>\n</main>\n</body>\n</html>\n"
    )
