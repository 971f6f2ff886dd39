"""Elements of a report page: sections, and tables as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

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
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n<h1>{escape(heading)}</h1>\n"
        f"{body}\n<footer>{footer}</footer>\n</main>\n</body>\n</html>\n"
    )


# The look of a report: one style sheet, no fonts or files from elsewhere.

CSS = """
:root {
  color-scheme: light dark;
  --ground: #f8fafc; --card: #ffffff; --ink: #0f172a; --soft: #475569; --line: #e2e8f0; --accent: #2563eb;
  --good: #15803d; --bad: #b91c1c; --warn-ground: #fffbeb; --warn-line: #fcd34d;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #0b1120; --card: #131c2f; --ink: #e2e8f0; --soft: #94a3b8; --line: #26334d; --accent: #60a5fa;
    --good: #4ade80; --bad: #f87171; --warn-ground: #2a2310; --warn-line: #a16207;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", Arial, sans-serif;
}
main { max-width: 1160px; margin: 0 auto; padding: 2.2rem 1.2rem 4rem; }
h1 { font-size: 1.7rem; margin: 0; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0 0 0.7rem; }
p { margin: 0.3rem 0 0.8rem; }
.soft { color: var(--soft); }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 0.9rem; margin: 1.4rem 0; }
.numbers > div, section {
  background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 1rem 1.15rem;
}
.numbers b { display: block; font-size: 1.65rem; line-height: 1.25; font-weight: 650; font-variant-numeric: tabular-nums; }
.numbers small { color: var(--soft); display: block; }
section { margin: 1rem 0; }
section.warnings { background: var(--warn-ground); border-color: var(--warn-line); }
section.warnings ul { margin: 0; padding-left: 1.2rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.87rem; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 600; border-bottom: 1px solid var(--line); white-space: nowrap; }
th, td { padding: 0.34rem 0.7rem 0.34rem 0; vertical-align: top; }
tbody tr + tr td { border-top: 1px solid var(--line); }
.right { text-align: right; white-space: nowrap; }
td.name {
  font: 0.8rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; min-width: 17rem;
}
td.notes { color: var(--soft); font-size: 0.8rem; min-width: 9rem; }
.meter {
  background: linear-gradient(var(--accent), var(--accent)) no-repeat right 0.7rem top 1.85em / calc(var(--share, 0) * 4rem) 3px;
  min-width: 5rem; padding-bottom: 0.6rem;
}
.ok { color: var(--good); font-weight: 600; }
.failed { color: var(--bad); font-weight: 600; }
pre {
  margin: 0; overflow-x: auto; font: 0.82rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  background: var(--ground); border: 1px solid var(--line); border-radius: 8px; padding: 0.8rem 1rem;
}
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.25rem 1.1rem; margin: 0; font-size: 0.9rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
details > summary { cursor: pointer; color: var(--accent); margin-bottom: 0.5rem; }
.chart { display: block; width: 100%; height: auto; margin-top: 0.5rem; color: var(--soft); font-family: inherit; }
.chart * { stroke-linejoin: round; stroke-linecap: butt; }
footer { color: var(--soft); font-size: 0.85rem; margin-top: 1.5rem; }
"""
