"""`report.html`: one page that stands alone, made from an artifact's manifest and headers. The same artifact gives the same bytes."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from compress.core.files import write_text
from compress.core.units import size
from compress.model.stage import row_of
from compress.report import charts
from compress.report.cache import cache_quality, cache_section
from compress.report.draft import draft_section
from compress.report.elements import CSS, error_cell, folded, section, table
from compress.report.facts import PARTS, Facts, gather, notes_text
from compress.report.recovery import recovery_sections
from compress.report.structure import structure_section
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
    "min_top1_agreement": "same most likely token at least",
    "min_cosine": "mean cosine similarity at least",
}


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
    sections = [
        _headline(facts), _warnings(facts), _quality(facts), structure_section(facts), recovery_sections(facts), _other_stages(facts),
        _layers_chart(facts), _bytes(facts), cache_section(facts), draft_section(facts), _layers_table(facts), _kept(facts), _recipe(facts),
        _origin(facts),
    ]  # fmt: skip
    body = "\n".join(part for part in sections if part)
    version = escape(str(facts.manifest.get("compress_version", "")))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}: what compression did</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n"
        f"<footer>Written by compress {version} from compress.json. "
        "Check the files with <code>compress inspect --verify</code>.</footer>\n"
        "</main>\n</body>\n</html>\n"
    )


def _recipe_name(facts: Facts) -> str:
    for line in facts.recipe.splitlines():
        if line.startswith("name:"):
            return line.removeprefix("name:").strip().strip("'\"")
    return ""


# -------------------------------------------------------------------- sections
def _headline(facts: Facts) -> str:
    before, after = facts.bytes_before, facts.bytes_after
    numbers = [(f"{before / max(after, 1):.2f}×", "smaller", f"{size(before)} → {size(after)}")]
    metrics = facts.metrics
    if "after" in metrics:
        change = metrics["after"]["perplexity"] / metrics["before"]["perplexity"] - 1
        span = f"{metrics['before']['perplexity']:.4g} → {metrics['after']['perplexity']:.4g}"
        numbers.append((f"{change:+.1%}", "perplexity", span))
    if "top1_agreement" in metrics:
        agreement = f"{metrics['top1_agreement']:.1%}"
        numbers.append((agreement, "same most likely token", f"KL {metrics['kl']:.4g} nats a token"))
    if "cosine" in metrics:
        worst = f"worst text {metrics['cosine']['min']:.4f}"
        numbers.append((f"{metrics['cosine']['mean']:.4f}", "cosine similarity to the original's embeddings", worst))
    if "perplexity_with_cache" in metrics:
        span = f"{metrics['kv_cache']['plain_perplexity']:.4g} → {metrics['perplexity_with_cache']:.4g}, what follows a prompt"
        numbers.append(
            (f"{metrics['perplexity_increase_with_cache']:+.1%}", "perplexity by the compressed cache", span)
        )
    if facts.layer_bits is not None:
        numbers.append(
            (f"{facts.layer_bits:.2f}", "bits a weight", f"in {len(facts.layers)} compressed layers, all included")
        )
    if facts.layer_sparsity:
        numbers.append((f"{facts.layer_sparsity:.1%}", "of these weights are zero", ""))
    cards = "".join(
        f"<div><b>{escape(value)}</b>{escape(what)}<small>{escape(detail)}</small></div>"
        for value, what, detail in numbers
    )
    source = escape(str((facts.manifest.get("source") or {}).get("path_or_id", "")))
    origin = f'<p class="soft">made from {source}</p>' if source else ""
    return f'{origin}<div class="numbers">{cards}</div>'


def _other_stages(facts: Facts) -> str:
    """What stages have done to the model that have no section of their own; empty where there are none."""
    made = [record for record in facts.manifest.get("passes") or [] if not {"remove", "recover"} & record.keys()]
    rows = [[(text, "") for text in row_of(record)] for record in made]
    return section("Other stages", table(("what was done", "before", "after", ""), rows)) if rows else ""


def _warnings(facts: Facts) -> str:
    if not facts.warnings:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in facts.warnings)
    return f'<section class="warnings"><h2>Warnings</h2><ul>{items}</ul></section>'


def _quality(facts: Facts) -> str:
    metrics = facts.metrics
    if "cosine" in metrics:
        return section("Quality", _embeddings(metrics))
    if "after" not in metrics:
        return section("Quality", '<p class="soft">The recipe asked for no evaluation.</p>')
    before, after = metrics["before"]["perplexity"], metrics["after"]["perplexity"]
    rows: list[list[tuple[str, str]]] = [
        [
            ("Perplexity", ""),
            (f"{before:.5g}", "right"),
            (f"{after:.5g}", "right"),
            (f"{after / before - 1:+.2%}", "right"),
        ]
    ]
    if "kl" in metrics:
        rows.append([("KL to the original, nats a token", ""), ("", ""), (f"{metrics['kl']:.5g}", "right"), ("", "")])
    if "top1_agreement" in metrics:
        rows.append([("Same most likely token", ""), ("", ""), (f"{metrics['top1_agreement']:.2%}", "right"), ("", "")])
    content = table(("", "before>", "after>", "change>"), rows)
    content += _limits(metrics)
    content += charts.quality_chart(before, after)
    tokens = f"{metrics['tokens']:,} tokens" if "tokens" in metrics else "the held-out text"
    length = f", windows of {metrics['sequence_length']} tokens" if "sequence_length" in metrics else ""
    content += f'<p class="soft">Measured on {tokens}{length}; every token but the first of a window is scored.</p>'
    return section("Quality", content + cache_quality(metrics))


def _embeddings(metrics: dict[str, Any]) -> str:
    """An encoder's quality: how far its embeddings moved."""
    cosine = metrics["cosine"]
    rows = [[(what, ""), (f"{cosine[key]:.5f}", "right")] for what, key in (("mean", "mean"), ("worst text", "min"))]
    text = (
        f"Measured on {metrics['windows']:,} held-out texts of {metrics['sequence_length']} tokens: the embedding that the artifact "
        "gives a text, against the original's."
    )
    shown = table(("cosine similarity to the original", "value>"), rows)
    return f'{shown}{_limits(metrics)}<p class="soft">{text}</p>'


def _limits(metrics: dict[str, Any]) -> str:
    limits = metrics.get("limits") or []
    if not limits:
        return ""
    return "<p></p>" + table(("limit of the recipe", "allowed>", "found>", ""), [_limit_row(x) for x in limits])


def _limit_row(limit: dict[str, Any]) -> list[tuple[str, str]]:
    share = limit["name"].startswith(("max_perplexity_increase", "min_top1_agreement"))
    allowed, found = (
        "not measured" if value is None else f"{value:.2%}" if share else f"{value:.5g}"
        for value in (limit["limit"], limit["value"])
    )  # fmt: skip
    verdict = ("kept", "ok") if limit["ok"] else ("exceeded", "failed")
    return [(_LIMIT_NAMES.get(limit["name"], limit["name"]), ""), (allowed, "right"), (found, "right"), verdict]


def _layers_chart(facts: Facts) -> str:
    chart = charts.error_chart(facts.layers)
    if not chart:
        return ""
    text = "How far each layer's output moved on the calibration text, relative to the output itself (squared norms)."
    return section("Error of every layer", f'<p class="soft">{text}</p>{chart}')


def _bytes(facts: Facts) -> str:
    rows = []
    for part in PARTS:
        before, after = facts.before[part], facts.after[part]
        if before or after:
            ratio = f"{before / after:.2f}×" if before and after else ""
            share = f"{after / max(facts.bytes_after, 1):.1%}"
            rows.append(
                [(part, ""), *((text, "right") for text in (size(before) if before else "", size(after), ratio, share))]
            )
    total = [("all tensors", ""), *((size(n), "right") for n in (facts.bytes_before, facts.bytes_after))]
    total += [(f"{facts.bytes_before / max(facts.bytes_after, 1):.2f}×", "right"), ("", "right")]
    shown = table(("part", "before>", "after>", "smaller>", "share of the artifact>"), [*rows, total])
    return section("Where the bytes are", charts.bytes_chart(facts.before, facts.after) + shown)


def _layers_table(facts: Facts) -> str:
    layers = facts.layers
    if not layers:
        return ""
    worst = max((layer["error"] for layer in layers if layer["error"] is not None), default=0.0) or 1.0
    widest = max(layer["bits"] for layer in layers) or 1.0
    rows = []
    for layer in layers:
        before, after = layer["bytes_before"], layer["bytes_after"]
        rows.append(
            [
                (layer["name"], "name"), (layer["method"], ""), (layer["format"], ""),
                error_cell(layer["error"], worst),
                (f"{layer['bits']:.3g}", f"right meter {layer['bits'] / widest:.3f}"),
                (f"{layer['sparsity']:.1%}", f"right meter {layer['sparsity']:.3f}"),
                (size(before), "right"), (size(after), "right"), (notes_text(layer.get("notes") or {}), "notes"),
            ]
        )  # fmt: skip
    columns = ("layer", "method", "format", "error>", "bits>", "zeros>", "before>", "after>", "notes")
    return section("Layers", folded(table(columns, rows), len(rows), "layers"))


def _kept(facts: Facts) -> str:
    """Tensors that were not compressed, and why, as far as the manifest says."""
    rows = [
        [
            (name, "name"),
            (account["action"], ""),
            (size(account["bytes_after"]), "right"),
            (account.get("reason", ""), "notes"),
        ]
        for name, account in facts.manifest["tensors"].items()
        if account["action"] != "compressed"
    ]
    if not rows:
        return ""
    shown = table(("tensor", "what happened", "bytes>", "reason"), rows)
    return section(
        "Tensors that were not compressed", f"<details><summary>{len(rows)} tensors</summary>{shown}</details>"
    )


def _recipe(facts: Facts) -> str:
    if not facts.recipe:
        return ""
    return section("Recipe, as resolved", f"<pre>{escape(facts.recipe)}</pre>")


def _origin(facts: Facts) -> str:
    manifest = facts.manifest
    source, calibration = manifest.get("source") or {}, manifest.get("calibration") or {}
    entries: list[tuple[str, Any]] = [
        ("source", source.get("path_or_id")),
        ("source fingerprint", source.get("fingerprint")),
    ]
    entries += [("calibration", calibration.get("description")), ("recipe SHA-256", manifest.get("recipe_sha256"))]
    entries += list((manifest.get("toolchain") or {}).items())
    items = "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in entries if v is not None)
    return section("Where it comes from", f"<dl>{items}</dl>")
