"""`report.html`: one self-contained page, made from an artifact's manifest, headers and run record; equal inputs give equal bytes."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from compress.core.files import write_text
from compress.core.units import decoding_speed, duration, size
from compress.evaluate.metrics import Quality
from compress.model.stage import row_of
from compress.recipe.stages import KINDS
from compress.report import charts
from compress.report.elements import Cell, cards, document, error_cell, folded, note, pairs, section, table
from compress.report.facts import PARTS, Facts, gather, notes_text
from runtime.checkpoint.artifact import shown
from runtime.errors import RequestError
from runtime.system.self_hash import sealed_page

FILE = "report.html"
_LIMIT_NAMES = {
    "max_perplexity": "perplexity at most",
    "max_perplexity_increase": "increase of the perplexity at most",
    "max_perplexity_overall": "perplexity with weights and cache at most",
    "max_perplexity_increase_overall": "increase of the perplexity by weights and cache at most",
    "max_kl": "KL divergence at most",
    "max_kl_cache": "KL divergence by the cache at most",
    "min_agreement_cache": "same most likely token with the cache at least",
    "min_agreement": "same most likely token at least",
    "min_cosine": "mean cosine similarity at least",
}

_MORE_BYTES = {
    "draft": "draft", "cache_files": "calibrated cache files", "tokenizer": "tokenizer", "total": "all that is loaded",
}  # fmt: skip


def write_report(artifact: str | Path, output: str | Path | None = None) -> Path:
    """Write the report of an artifact and return its file: `report.html` in the artifact, or `output`.

    Raises:
        ArtifactError: not an artifact. RequestError: the file cannot be written.
    """
    path = Path(output) if output is not None else Path(artifact) / FILE
    text = sealed_page(page(artifact))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise RequestError(f"the report cannot be written to {path}: {error.strerror or error}") from None
    return path


def page(artifact: str | Path) -> str:
    """The page of an artifact as text; ArtifactError where its manifest cannot be shown."""
    with shown(Path(artifact)):
        return render(gather(artifact))


def render(facts: Facts) -> str:
    """The page as text."""
    # The recipe's name, not the directory's: the same run into two directories is the same artifact.
    title = _recipe_name(facts) or "compressed model"
    stages = {kind.name: kind.report(facts.manifest) for kind in KINDS.values()}
    model, layers, made_last = (
        [stages[kind.name] for kind in KINDS.values() if kind.phase == phase]
        for phase in ("model", "layers", "artifact")
    )
    sections = [
        _headline(facts), _warnings(facts), _quality(facts), _samples(facts.record), _readable_by(facts.manifest), *model,
        _other_stages(facts, stages), *layers, _layers_chart(facts), _bytes(facts), *made_last, _layers_table(facts), _kept(facts),
        _runs(facts.record), _recipe(facts), _origin(facts),
    ]  # fmt: skip
    footer = (
        f"Written by compress {escape(str(facts.manifest.get('compress_version', '')))} from compress.json. "
        "Check the files with <code>compress inspect --verify</code>."
    )
    return document(f"{title}: what compression did", title, "\n".join(part for part in sections if part), footer)


def _recipe_name(facts: Facts) -> str:
    for line in facts.recipe.splitlines():
        if line.startswith("name:"):
            return line.removeprefix("name:").strip().strip("'\"")
    return ""


def _headline(facts: Facts) -> str:
    before, after = facts.bytes_before, facts.bytes_after
    numbers = [(f"{before / max(after, 1):.2f}×", "smaller", f"{size(before)} → {size(after)}")]
    metrics = facts.metrics
    if "after" in metrics:
        old, new = metrics["before"]["perplexity"], metrics["after"]["perplexity"]
        numbers.append((f"{new / old - 1:+.1%}", "perplexity", f"{old:.4g} → {new:.4g}{_on(facts.texts[1])}"))
    if "top1_agreement" in metrics:
        agreement = f"{metrics['top1_agreement']:.1%}"
        numbers.append(
            (agreement, "same most likely token", f"KL {metrics['kl']:.4g} nats per token{_on(facts.texts[1])}")
        )
    if "cosine" in metrics:
        worst = f"worst text {metrics['cosine']['min']:.4f}"
        numbers.append((f"{metrics['cosine']['mean']:.4f}", "cosine similarity to the original's embeddings", worst))
    if "perplexity_with_cache" in metrics:
        change = f"{metrics['perplexity_increase_with_cache']:+.1%}"
        values = f"{metrics['kv_cache']['plain_perplexity']:.4g} → {metrics['perplexity_with_cache']:.4g}"
        numbers.append((change, "perplexity by the compressed cache", f"{values}, tokens after a prompt"))
    if facts.layer_bits is not None:
        layers = f"in {len(facts.layers)} compressed layers, with scales and indices"
        numbers.append((f"{facts.layer_bits:.2f}", "bits per weight", layers))
    if facts.layer_sparsity:
        numbers.append((f"{facts.layer_sparsity:.1%}", "of these weights are zero", ""))
    source = str((facts.manifest.get("source") or {}).get("path_or_id", ""))
    return (note(f"made from {source}") if source else "") + cards(numbers)


def _on(text: str) -> str:
    """Suffix that names the text of a metric; empty if the manifest does not name one."""
    return f", on {text}" if text else ""


def _other_stages(facts: Facts, sections: Mapping[str, str]) -> str:
    """Effects on the model of stages without a section of their own; empty where there are none."""
    passes = facts.manifest.get("passes") or []
    shown = {kind.record_key for kind in KINDS.values() if kind.phase == "model" and sections[kind.name]}
    rows = [row_of(record) for record in passes if not shown & record.keys()]
    return section("Other stages", table(("what was done", "before", "after", ""), rows)) if rows else ""


def _warnings(facts: Facts) -> str:
    if not facts.warnings:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in facts.warnings)
    return f'<section class="warnings"><h2>Warnings</h2><ul>{items}</ul></section>'


def _quality(facts: Facts) -> str:
    metrics, on = facts.metrics, _on(facts.texts[1])
    quality = Quality.of(metrics)
    if not quality.rows():
        return section("Quality", note("Quality was not evaluated."))
    content = table(("", "before>", "after>", "change>"), quality.rows()) + _limits(metrics)
    if quality.before is None or quality.after is None:
        texts = f"{metrics['windows']:,} held-out texts of {metrics['sequence_length']} tokens"
        text = f"Measured on {texts}{on}: the artifact's embedding of a text, against the original's."
        return section("Quality", content + note(text))
    content += charts.quality_chart(quality.before, quality.after)
    tokens = f"{metrics['tokens']:,} tokens" if "tokens" in metrics else "the held-out text"
    length = f", windows of {metrics['sequence_length']} tokens" if "sequence_length" in metrics else ""
    content += note(f"Measured on {tokens}{length}{on}; every token but the first of a window is scored.")
    return section("Quality", content + "".join(kind.quality(metrics) for kind in KINDS.values()))


def _limits(metrics: dict[str, Any]) -> str:
    rows = [_limit_row(limit) for limit in metrics.get("limits") or []]
    return "<p></p>" + table(("limit of the recipe", "allowed>", "found>", ""), rows) if rows else ""


def _limit_row(limit: dict[str, Any]) -> list[Cell]:
    share = limit["name"].startswith(("max_perplexity_increase", "min_agreement"))
    allowed, found = (
        "not measured" if value is None else f"{value:.2%}" if share else f"{value:.5g}"
        for value in (limit["limit"], limit["value"])
    )  # fmt: skip
    verdict = ("kept", "ok") if limit["ok"] else ("exceeded", "failed")
    return [_LIMIT_NAMES.get(limit["name"], limit["name"]), allowed, found, verdict]


def _layers_chart(facts: Facts) -> str:
    text = "Change of each layer's output on the calibration text, relative to the output (squared norms)"
    chart, named = charts.error_chart(facts.layers), facts.texts[0]
    shown = section("Error of every layer", note(f"{text}{': ' if named else ''}{named}.") + chart) if chart else ""
    bits = [layer["bits"] for layer in facts.layers]
    if not bits or max(bits) <= 1.1 * min(bits):  # scales of narrow layers alone
        return shown
    text = "Bits per weight, with scales and indices."
    return shown + section("Bits of every layer", note(text) + charts.bits_chart(facts.layers))


def _bytes(facts: Facts) -> str:
    total = max(facts.bytes_after, 1)
    rows = []
    for part in PARTS:
        before, after = facts.before[part], facts.after[part]
        if before or after:
            ratio = f"{before / after:.2f}×" if before and after else ""
            rows.append((part, size(before) if before else "", size(after), ratio, f"{after / total:.1%}"))
    ratio = f"{facts.bytes_before / total:.2f}×"
    rows.append(("all tensors", size(facts.bytes_before), size(facts.bytes_after), ratio, ""))
    more = {label: facts.manifest["bytes"].get(key) for key, label in _MORE_BYTES.items()}
    rows += [(label, "", size(found), "", "") for label, found in more.items() if found]
    shown = table(("part", "before>", "after>", "smaller>", "share of the tensors>"), rows)
    loaded = {part: more.get(part) or 0 for part in charts.LOADED}
    return section("Where the bytes are", charts.bytes_chart(facts.before, facts.after | loaded) + shown)


def _layers_table(facts: Facts) -> str:
    layers = facts.layers
    if not layers:
        return ""
    worst = max((layer["error"] for layer in layers if layer["error"] is not None), default=0.0) or 1.0
    widest = max(layer["bits"] for layer in layers) or 1.0
    rows = [
        [
            (layer["name"], "name"), layer["method"], layer["format"], error_cell(layer["error"], worst),
            (f"{layer['bits']:.3g}", f"meter {layer['bits'] / widest:.3f}", layer["bits"]),
            (f"{layer['sparsity']:.1%}", f"meter {layer['sparsity']:.3f}", layer["sparsity"]),
            _bytes_cell(layer["bytes_before"]), _bytes_cell(layer["bytes_after"]), (notes_text(layer.get("notes") or {}), "notes"),
        ]
        for layer in layers
    ]  # fmt: skip
    columns = ("layer", "method", "format", "error>", "bits>", "zeros>", "before>", "after>", "notes")
    return section("Layers", folded(table(columns, rows, sorts=True), len(rows), "layers"))


def _bytes_cell(count: int) -> Cell:
    return size(count), "", count


def _kept(facts: Facts) -> str:
    """Tensors that were not compressed, and why, as far as the manifest says."""
    rows = [
        [(name, "name"), account["action"], _bytes_cell(account["bytes_after"]), (account.get("reason", ""), "notes")]
        for name, account in facts.manifest["tensors"].items()
        if account["action"] != "compressed"
    ]
    shown = table(("tensor", "what happened", "bytes>", "reason"), rows, sorts=True)
    content = f"<details><summary>{len(rows)} tensors</summary>{shown}</details>"
    return section("Tensors that were not compressed", content) if rows else ""


def _recipe(facts: Facts) -> str:
    return section("Recipe, as resolved", f"<pre>{escape(facts.recipe)}</pre>") if facts.recipe else ""


def _samples(record: dict[str, Any]) -> str:
    """Continuations of each prompt by source and artifact, side by side."""
    samples = record.get("samples")
    if not samples:
        return ""
    shown = ""
    for number, prompt in enumerate(samples["prompts"]):
        texts = (samples[name][number] if samples[name] is not None else None for name in ("source", "artifact"))
        told = "".join(
            f"<div><small>{name}</small><pre>\n{escape(text)}</pre></div>"
            for name, text in zip(("before", "after"), texts, strict=True)
            if text is not None
        )
        shown += f'<div class="samples"><div><small>prompt</small><pre>\n{escape(prompt)}</pre></div>{told}</div>'
    missing = "".join(note(f"The {name} was left out: {reason}") for name, reason in samples["left_out"].items())
    text = f"Greedy continuations of at most {samples['tokens']} tokens by the source and by the artifact."
    return section("Sample outputs", note(text) + shown + missing)


def _readable_by(manifest: dict[str, Any]) -> str:
    rows = [(one["name"], one["how"], one.get("note") or "") for one in manifest.get("readable_by") or []]
    return section("Readable by", table(("", "reads it", ""), rows)) if rows else ""


def _runs(record: dict[str, Any]) -> str:
    """When, how and on what machine the artifact was made, and how long each phase took."""
    shown = "".join(map(_run, record.get("runs") or []))
    speed = decoding_speed((record.get("samples") or {}).get("speed"))
    return section("How it was made", shown + (note(speed) if speed else "")) if shown else ""


def _run(run: dict[str, Any]) -> str:
    machine, peak = run["machine"], run.get("peak_memory")
    entries = {
        "date": run["date"], "command": run["command"] or "called from Python", "CPU": machine["cpu"],
        "instruction sets": ", ".join(machine["instruction_sets"]), "C kernels": machine.get("kernels"),
        "cores": machine["cores"], "threads": machine["threads"], "GPU": ", ".join(machine["gpus"]),
        "processes": run["processes"] if run["processes"] > 1 else None,
        "memory of the machine": size(machine["memory"]), "system": machine["system"],
        "most memory taken": None if peak is None else size(peak),
    }  # fmt: skip
    whole = sum(run["seconds"].values())
    times = [
        (phase, duration(seconds), f"{seconds / max(whole, 1e-9):.0%}") for phase, seconds in run["seconds"].items()
    ]
    return pairs(entries) + table(("phase", "time>", "share>"), [*times, ("all phases", duration(whole), "")])


def _origin(facts: Facts) -> str:
    manifest = facts.manifest
    source = manifest.get("source") or {}
    entries = {
        "source": source.get("path_or_id"), "source fingerprint": source.get("fingerprint"), "calibrated on": facts.texts[0],
        "evaluated on": facts.texts[1], "recipe SHA-256": manifest.get("recipe_sha256"), **(manifest.get("toolchain") or {}),
    }  # fmt: skip
    return section("Where it comes from", pairs(entries))
