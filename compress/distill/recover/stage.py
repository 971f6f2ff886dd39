"""Stage `recover` and its sections of the report: the model as earlier stages have left it is trained towards the recipe's model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from compress.model.stage import StageRoom
from compress.recipe.stages import Stage
from compress.report.charts import (
    COLORS,
    INK,
    TRAINED,
    Entries,
    by_updates,
    color,
    error_chart,
    legend_above,
    line,
    log_where_wide,
    mark,
    number,
    span,
    svg,
    values,
)
from compress.report.elements import section, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from compress.core.processes import Team
    from compress.distill.recover.job import RecoverJob
    from compress.model.context import Context
    from compress.recipe import Recipe


class Recover(StageRoom):
    """The stage `recover`."""

    name = "recover"
    summary = "win quality back by training on the original model's outputs"
    settles_layers = True

    def methods(self) -> Mapping[str, Any]:
        """See `compress.distill.recover`."""
        from compress.distill.recover import METHODS

        return METHODS

    def changes(self, stage: Stage) -> bool:
        """False: the changes of a recovery stage are not themselves recovered by a later one."""
        return False

    def check(self, context: Context, stage: Stage) -> RecoverJob:
        """See `compress.distill.recover.job.prepare`."""
        from compress.distill.recover.job import prepare

        return prepare(context, stage)

    def assist(self, recipe: Recipe, task: Mapping[str, Any], device: str, team: Team) -> None:
        """The share of another process in `RecoverJob.run`."""
        from compress.distill.recover.recovery import assist

        assist(recipe, task, device, team)

    def row(self, record: Mapping[str, Any]) -> tuple[str, str, str, str]:
        """Perplexity of held-out rows before and after, or the steps."""
        label = f"recovery by {record['recover']}"
        if "perplexity_before" not in record or "perplexity_after" not in record:
            return label, "", "", f"{record['steps']:,} steps"
        before, after = (f"{record[f'perplexity_{when}']:.4g}" for when in ("before", "after"))
        return f"{label}, perplexity of held-out rows", before, after, ""

    def report(self, manifest: Mapping[str, Any]) -> str:
        """Losses, perplexity and what was won back."""
        return recovery_sections(manifest)


STAGE = Recover()


# The charts of a recovery: its losses by updates, and the perplexity of held-out rows.

_LARGEST = 700.0  # nats of a cross-entropy; the exponential of more is no number


def loss_chart(made: Mapping[str, Any], name: str) -> str:
    """SVG: the loss of rows in training and of held-out rows. Empty where no number of them is known.

    Args:
        made: facts of a pass `recover`.
        name: what ids begin with, different for each chart of a page.
    """
    trained, looks = made["curve"].get("train") or [], made["curve"].get("held_out") or []
    lines = [("training", trained, values(trained, "loss"), TRAINED)]
    lines += [(label, looks, found, ink) for label, found, ink in _chart_widths(looks, "loss", 0)]
    return _chart(made, lines, "loss", 2.9, f"{name}-loss")


def perplexity_chart(made: Mapping[str, Any], name: str) -> str:
    """SVG: the perplexity of held-out rows; arguments as of `loss_chart`. Empty where the model says no next token."""
    looks = made["curve"].get("held_out") or []
    lines = [
        (label, looks, [perplexity(value) for value in found], ink)
        for label, found, ink in _chart_widths(looks, "cross_entropy", 1)
    ]
    return _chart(made, lines, "perplexity", 2.5, f"{name}-perplexity")


def perplexity(cross_entropy: Any) -> float:
    """Of a cross-entropy as recorded; NaN where that is none, or so large that it cannot be drawn."""
    value = number(cross_entropy)
    return math.nan if math.isnan(value) else number(math.exp(min(value, _LARGEST)))


def _chart_widths(looks: Entries, key: str, first: int) -> list[tuple[str, list[float], str]]:
    """Label, numbers and colour: of what is measured as a whole, and of each width of a model with nested ones."""
    matches = {match for look in looks for name in look if (match := re.fullmatch(rf"{key}_(\d+)", name)) is not None}
    widths = sorted({int(match[1]) for match in matches})
    label = "held-out rows, mean of the widths" if widths else "held-out rows"
    found = [(label, values(looks, key), color(first))]
    for place, width in enumerate(widths):
        found.append((f"{width:,} channels", values(looks, f"{key}_{width}"), color(4 + place)))
    return found


def _chart(
    made: Mapping[str, Any], lines: list[tuple[str, Entries, list[float], str]], what: str, height: float, name: str
) -> str:
    known = [value for _, _, numbers, _ in lines for value in numbers if math.isfinite(value)]
    if not known:
        return ""
    told = []
    with by_updates(height, what) as (drawn, axes):
        for label, entries, numbers, ink in lines:
            text = span(entries, numbers)
            if text:
                told.append(f"{label} {text}")
                line(axes, entries, numbers, label, ink)
        told += _marks(axes, made)
        log_where_wide(axes, known)
        legend_above(axes)
        return svg(drawn, name, f"{what} by updates: {'; '.join(told)}")


def _marks(axes: Axes, made: Mapping[str, Any]) -> list[str]:
    """Where the weights that are kept were taken, and where a training diverged; the same in words."""
    found = []
    best = number(made.get("best_step"))
    if math.isfinite(best):
        found.append(f"best weights after {best:.0f}")
        mark(axes, best, found[-1], INK, ":")
    steps = number(made.get("steps"))
    if made.get("ended") == "diverged" and math.isfinite(steps):
        found.append(f"diverged after {steps:.0f}")
        mark(axes, steps, found[-1], COLORS[3], "--")
    return found


_ENDED = {
    "steps": "it went on to the last update",
    "patience": "it ended early, since nothing was gained any more",
    "diverged": "it ended as the loss diverged",
}
_NAMES = {
    "loss": "held-out loss", "kl": "divergence from the original", "squarehead": "distance from the original's hidden states",
    "cross_entropy": "cross-entropy",
}  # fmt: skip
_NOTE = (
    "Held-out rows are of the calibration text, and the weights measured are those in training; the quality above is of the artifact as it "
    "is stored, on the text of the evaluation."
)
_BEFORE = "How far each layer's output had been moved by what was compressed before this training, relative to the output itself."


def recovery_sections(manifest: Mapping[str, Any]) -> str:
    """HTML: a section for each recovery; empty where there was none."""
    passes = [made for made in manifest.get("passes") or [] if "recover" in made]
    parts = []
    for place, made in enumerate(passes):
        which = f" {place + 1} of {len(passes)}" if len(passes) > 1 else ""
        content = f"<p>{escape(_sentence(made))}</p>"
        if before := error_chart(made.get("compressed") or [], f"before{place}"):
            content += f'<p class="soft">{_BEFORE}</p>{before}'
        if made.get("curve"):
            content += loss_chart(made, f"recovery{place}") + perplexity_chart(made, f"recovery{place}")
            content += f'<p class="soft">{_NOTE}</p>{_numbers(made["curve"])}'
        parts.append(section(f"Recovery{which} by {made['recover']}", content))
    return "\n".join(parts)


def _sentence(made: Mapping[str, Any]) -> str:
    steps, best, most, batch, rows = (made[key] for key in ("steps", "best_step", "most_steps", "batch_size", "rows"))
    of = f" of at most {most:,}" if steps < most else ""
    ended = _ENDED.get(made["ended"], f"it ended by {made['ended']}")
    kept = f"the weights kept are those after {best:,}" if best else "nothing was better than the weights it began with"
    parts = [f"Trained by {made['recover']} for {steps:,}{of} updates: {ended}, and {kept}"]
    parts.append(
        f"Each update read {batch:,} of {rows['trained']:,} rows of {rows['length']:,} tokens; {rows['held_out']:,} more were held out"
    )
    if "perplexity_before" in made and "perplexity_after" in made:
        change = _change(made["perplexity_before"], made["perplexity_after"], ".5g")
        parts.append(f"Perplexity of held-out rows{_widths(made)}: {change}")
    parts += _won_back(made)
    return ". ".join(parts) + "."


def _won_back(made: Mapping[str, Any]) -> list[str]:
    """How much of the way back to the original was gone, as far as that is known.

    Of a perplexity it is not: the original's on these rows is not recorded. A distance from the original is 0 for the original itself.
    """
    before, after = made.get("before") or {}, made.get("after") or {}
    name = next((name for name in ("kl", "squarehead") if name in before and name in after), None)
    if name is None or (name == "kl" and made["divergence"] == "cross_entropy"):
        return []
    one, other = number(before[name]), number(after[name])
    text = f"{_NAMES[name].capitalize()} of held-out rows{_widths(made)}: {_change(one, other)}"
    if _widths(made) or not one > 0 or math.isnan(other):  # what narrow widths gain was never lost
        return [text]
    share = 1 - other / one
    return [f"{text}, so that {f'{share:.1%}' if share > 0 else 'none'} of it was won back"]


def _widths(made: Mapping[str, Any]) -> str:
    """Whether a measure is of several models at once."""
    nested = any(re.fullmatch(r"loss_\d+", name) for name in made.get("before") or {})
    return ", mean of the widths" if nested else ""


def _change(before: Any, after: Any, digits: str = ".4g") -> str:
    return " → ".join(_shown(value, digits) for value in (before, after))


def _shown(value: Any, digits: str = ".4g") -> str:
    found = number(value)
    return "–" if math.isnan(found) else f"{found:{digits}}"


def _numbers(curve: Mapping[str, Entries]) -> str:
    """What the charts show, as a table."""
    trained = {entry["step"]: entry for entry in curve.get("train") or []}
    looks = {entry["step"]: entry for entry in curve.get("held_out") or []}
    measured = list(dict.fromkeys(name for look in looks.values() for name in look if name != "step"))
    measured.sort(key=lambda name: (name != "loss", "cross_entropy" in name))
    columns = ["updates>", "training loss>", "learning rate>", *(f"{_name(name)}>" for name in measured)]
    columns += ["perplexity>"] * ("cross_entropy" in measured)
    rows = []
    for step in sorted(trained.keys() | looks.keys()):
        update, look = trained.get(step, {}), looks.get(step, {})
        numbers = [update.get("loss"), update.get("learning_rate"), *(look.get(name) for name in measured)]
        texts = [f"{step:,}", *map(_shown, numbers)]
        if "cross_entropy" in measured:
            texts.append(_shown(perplexity(look.get("cross_entropy")), ".5g"))
        rows.append([(text, "right") for text in texts])
    return f"<details><summary>The curves as numbers</summary>{table(columns, rows)}</details>"


def _name(measured: str) -> str:
    """What is measured in words: "held-out loss", "cross-entropy, 192 channels"."""
    if measured in _NAMES:
        return _NAMES[measured]
    known, _, width = measured.rpartition("_")
    return f"{_NAMES[known]}, {width} channels" if known in _NAMES else measured.replace("_", " ")
