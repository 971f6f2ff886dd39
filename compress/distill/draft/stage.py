"""Stage `draft` and its section of the report: a model or head that proposes what the finished artifact writes, made last."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from compress.core.processes import launched
from compress.core.run_directory import DRAFT
from compress.core.units import size
from compress.model.stage import Job, StageRoom
from compress.recipe.stages import Phase, Stage
from compress.report.charts import TRAINED, Entries, by_updates, color, legend_above, line, span, svg, values
from compress.report.elements import section, table
from runtime.errors import RequestError

if TYPE_CHECKING:
    from compress.distill.draft.job import DraftJob
    from compress.model.context import Context


class Draft(StageRoom):
    """The stage `draft`. It has an identity of its own: one that failed is corrected without compressing again."""

    name = "draft"
    summary = "train a draft for speculative decoding"
    phase: Phase = "artifact"
    once = "an artifact has one draft, and stage {first} says how it is made"
    own_identity = True

    def methods(self) -> Mapping[str, Any]:
        """See `compress.distill.draft`."""
        from compress.distill.draft import METHODS

        return METHODS

    def check(self, context: Context, stage: Stage) -> DraftJob:
        """See `compress.distill.draft.job.prepare`."""
        from compress.distill.draft.job import prepare

        recipe = context.recipe
        if launched() > 1:
            text = "several processes cannot share a draft stage; leave it out, then run `compress draft` with the launcher"
            raise RequestError(recipe.origin.at(stage.path, text))
        compressed = any(other.phase == "layers" for other in recipe.stages)
        return prepare(recipe, stage, context.checkpoint, context.streamed.model, context.tokenizer, compressed)

    def report(self, manifest: Mapping[str, Any]) -> str:
        """Acceptance, cost and training of the draft."""
        return draft_section(manifest)

    def forget(self, output: Path) -> None:
        """Remove a draft that the recipe no longer asks for."""
        shutil.rmtree(output / DRAFT, ignore_errors=True)

    def check_finished(self, job: Job | None, manifest: Mapping[str, Any], path: Path) -> None:
        """RequestError where a finished artifact's draft is not the one that the recipe asks for."""
        wanted = None if job is None else cast("DraftJob", job).identity
        if wanted == (manifest.get("draft") or {}).get("identity"):
            return
        if wanted is None:
            raise RequestError(f"output {path} is a finished artifact with a draft, which this recipe does not ask for")
        what = "another draft" if manifest.get("draft") else "no draft"
        todo = f"`compress draft {path} RECIPE` makes the one of this recipe without compressing again"
        raise RequestError(f"output {path} is a finished artifact with {what}; {todo}")


STAGE = Draft()


_KINDS = {"held_out": "held-out rows", "text": "prose", "code": "code", "chat": "conversation"}


def draft_section(manifest: Mapping[str, Any]) -> str:
    """HTML: the draft that came with the artifact; empty without one."""
    draft = manifest.get("draft")
    if not draft:
        return ""
    known = draft["facts"]
    content = f"<p>{escape(_sentence(draft))}</p>"
    if "evenly" in known.get("search", {}):
        content += f"<p>{escape(_search(known['search']))}</p>"
    if "before" in known and "after" in known:
        content += _acceptance(known)
    curve = (known.get("training") or {}).get("curve")
    if curve and curve.get("held_out"):
        content += f"<figure>{training_chart(curve)}</figure>"
        training = known["training"]
        text = f"Trained for {training['steps']} updates; the best weights are those after {training['best_step']}"
        text += ", since nothing was gained after them." if training["ended"] == "patience" else "."
        text += " The curve is of the weights in training; the table, after training, of the draft as it is stored."
        content += f'<p class="soft">{escape(text)}</p>'
    return section("Draft", content)


def _sentence(draft: Mapping[str, Any]) -> str:
    known = draft["facts"]
    parts = [f"Made by {draft['method']}"]
    if "model" in known:
        parts.append(f"begun as {known['model']['name']}")
    if "layers" in known:
        parts.append(f"layers {', '.join(map(str, known['layers']))} of the artifact")
    if "skip_attention" in known:
        parts.append(f"leaves out the {_halves(known)}")
    if "vocabulary" in known:
        kept = known["vocabulary"]
        parts.append(
            f"proposes {kept['tokens']:,} of {kept['of']:,} tokens, {kept['coverage']:.1%} of what the artifact writes"
        )
    if "cost" in known:
        cost, count = known["cost"], known["cost"].get("tokens", 1)
        for_what = "a token" if count == 1 else f"{count} tokens at once"
        parts.append(
            f"reads {size(cost['bytes'])} for {for_what}, {cost['of_target']:.1%} of what the artifact reads for one"
        )
    return "; ".join(parts) + "."


def _halves(known: Mapping[str, Any]) -> str:
    """What a skipping draft leaves out, in words."""
    parts = [
        f"{name} of layer{'s' * (len(known[key]) > 1)} {', '.join(map(str, known[key]))}"
        for key, name in (("skip_attention", "attention"), ("skip_mlp", "feed-forward half"))
        if known[key]
    ]
    return " and the ".join(parts)


def _search(search: Mapping[str, Any]) -> str:
    return (
        f"Found among {len(search['curve'])} sets of halves, the one that promises most on the rows of the search: "
        f"{_promised(search)}, accepted by position {_rates(search['rates'])}. The table is of other rows; before is as many halves left "
        f"out evenly: the {_halves(search['evenly'])}."
    )


def _acceptance(known: Mapping[str, Any]) -> str:
    """What becomes of drafts of what the artifact itself writes, before and after: every kind of text, greedy and sampling."""
    rows = []
    for kind, name in _KINDS.items():
        if kind not in known["after"]:
            continue
        for way in ("greedy", "sampling"):
            for when in ("before", "after"):
                measured = known[when][kind]
                runs = measured["continuations"] or measured["text"]
                if way in runs:
                    promise = known.get("worth", {}).get(when, {}).get(kind, {}).get(way)
                    rows.append(_row(f"{name}, {way}", when, runs[way], measured["length"], promise))
    columns = ("", "", "first>", "by position>", "accepted>", "steps>", "a draft costs>", "promises>")
    note = (
        "Of what the artifact itself writes: the share of the draft's first tokens that it accepts, of each position the share of those "
        "whose predecessors were accepted, and the mean number of accepted tokens in a step, over so many steps. A drafted token (where "
        "one pass proposes them all, that pass) costs a share of the artifact's own step; the speedup, and how many tokens to draft for "
        "it, are those of a machine whose time is that of reading weights."
    )
    return table(columns, rows) + f'<p class="soft">{escape(note)}</p>'


def _row(
    name: str, when: str, run: Mapping[str, Any] | None, length: int, promise: Mapping[str, Any] | None
) -> list[tuple[str, str]]:
    """A line of the table; dashes where the artifact ended its texts before a whole draft."""
    cells = [(name if when == "before" else "", ""), (when, "")]
    if run is None:
        return cells + [("–", "right")] * 6
    texts = [
        f"{run['acceptance']:.1%}",
        _rates(run["by_position"]),
        f"{run['accepted']:.2f} of {length}",
        f"{run['steps']:,.0f}",
    ]
    texts += ["–", "–"] if promise is None else [f"{promise['cost']:.1%}", _promised(promise)]
    return cells + [(text, "right") for text in texts]


def _promised(promise: Mapping[str, Any]) -> str:
    return f"{promise['speedup']:.2f}× with {promise['length']}" if promise["length"] else "no gain"


def _rates(rates: Sequence[float | None]) -> str:
    return "  ".join("–" if rate is None else f"{rate:.0%}" for rate in rates)


def training_chart(curve: Mapping[str, Entries]) -> str:
    """SVG: held-out acceptance and the training loss by updates."""
    looks, trained = curve["held_out"], curve.get("train") or []
    told = []
    with by_updates(3.0, "held-out rows, %") as (drawn, axes):
        for number, (name, label) in enumerate(
            (("acceptance", "acceptance when sampling"), ("agreement", "same token when greedy"))
        ):
            shares = [100 * value for value in values(looks, name)]
            line(axes, looks, shares, label, color(number))
            told.append(f"{label}, in percent, {span(looks, shares)}")
        lines = list(axes.get_lines())
        if trained:
            loss, losses = axes.twinx(), values(trained, "loss")
            line(loss, trained, losses, "loss", TRAINED)
            loss.set_ylabel("loss")
            lines += loss.get_lines()
            told.append(f"loss {span(trained, losses)}")
        legend_above(axes, lines)
        return svg(drawn, "training", f"training by updates: {'; '.join(told)}")
