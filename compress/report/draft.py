"""What a report page says of the draft: how often its tokens are accepted, what they cost, and how its training went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from compress.commands.output import size
from compress.report.canvas import FAINT, color, figure, svg
from compress.report.elements import section, table
from compress.report.facts import Facts

_KINDS = {"held_out": "held-out rows", "text": "prose", "code": "code", "chat": "conversation"}


def draft_section(facts: Facts) -> str:
    """The draft that came with the artifact; empty without one."""
    draft = facts.manifest.get("draft")
    if not draft:
        return ""
    known = draft["facts"]
    content = f"<p>{escape(_sentence(draft))}</p>"
    if "before" in known and "after" in known:
        content += _acceptance(known["before"], known["after"], known.get("worth") or {})
    curve = (known.get("training") or {}).get("curve")
    if curve and curve.get("held_out"):
        content += f"<figure>{training_chart(curve)}</figure>"
        training = known["training"]
        text = f"Trained for {training['steps']} updates; the best weights are those after {training['best_step']}"
        text += ", since nothing was gained after them." if training["ended"] == "patience" else "."
        content += f'<p class="soft">{escape(text)}</p>'
    return section("Draft", content)


def _sentence(draft: Mapping[str, Any]) -> str:
    known = draft["facts"]
    parts = [f"Made by {draft['method']}"]
    if "layers" in known:
        parts.append(f"layers {', '.join(map(str, known['layers']))} of the artifact")
    if "vocabulary" in known:
        kept = known["vocabulary"]
        parts.append(
            f"proposes {kept['tokens']:,} of {kept['of']:,} tokens, {kept['coverage']:.1%} of what the artifact writes"
        )
    if "cost" in known:
        parts.append(
            f"reads {size(known['cost']['bytes'])} for a token, {known['cost']['of_target']:.1%} of what the artifact reads"
        )
    return "; ".join(parts) + "."


def _acceptance(before: Mapping[str, Any], after: Mapping[str, Any], worth: Mapping[str, Any]) -> str:
    """Rates by position, of what the artifact itself writes, before and after training."""
    rows = []
    for kind, name in _KINDS.items():
        if kind not in after:
            continue
        for way in ("greedy", "sampling"):
            old, new = (_run(each[kind], way) for each in (before, after))
            rates = "  ".join("–" if rate is None else f"{rate:.0%}" for rate in new["by_position"])
            gain = worth.get(kind, {}).get(way)
            promise = "" if gain is None else f"{gain['speedup']:.2f}× with {gain['length']}"
            rows.append([
                (f"{name}, {way}", ""), (f"{old['acceptance']:.1%}", "right"), (f"{new['acceptance']:.1%}", "right"), (rates, "right"),
                (f"{new['accepted']:.2f}", "right"), (promise, "right"),
            ])  # fmt: skip
    length = after["held_out"]["length"]
    columns = ("", "before>", "after>", "by position>", f"accepted of {length}>", "promises>")
    note = (
        "Share of the draft's first tokens that the artifact accepts, and of each position those whose predecessors were accepted, on what "
        "the artifact itself writes. What it promises is the speedup of a model whose time is that of reading its weights."
    )
    return table(columns, rows) + f'<p class="soft">{escape(note)}</p>'


def _run(measured: Mapping[str, Any], way: str) -> Mapping[str, Any]:
    run: Mapping[str, Any] = (measured["continuations"] or measured["text"])[way]
    return run


def training_chart(curve: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """SVG: held-out acceptance and the training loss by updates."""
    with figure(9.0, 3.0) as (drawn, axes):
        looks = curve["held_out"]
        steps = [look["step"] for look in looks]
        for number, (name, label) in enumerate(
            (("acceptance", "acceptance when sampling"), ("agreement", "same token when greedy"))
        ):
            axes.plot(
                steps, [100 * look[name] for look in looks], marker="o", markersize=4, color=color(number), label=label
            )
        axes.set_xlabel("updates")
        axes.set_ylabel("held-out rows, %")
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        if curve.get("train"):
            loss = axes.twinx()
            loss.plot(
                [each["step"] for each in curve["train"]],
                [each["loss"] for each in curve["train"]],
                color="#94a3b8",
                label="loss",
            )
            loss.set_ylabel("loss")
            lines = [*axes.get_lines(), *loss.get_lines()]
            axes.legend(lines, [str(line.get_label()) for line in lines], frameon=False, loc="lower right")
        else:
            axes.legend(frameon=False, loc="lower right")
        return svg(drawn, "training")
