"""Quality of an artifact whose vocabulary was cut, against its source: each reads the same text with its own tokenizer.

Their tokens are not the same, so there is no distribution over tokens to compare: what both say of the text is, a character.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from compress.core.progress import Reporter
from compress.data.spans import Spans
from compress.evaluate.metrics import TokenMetrics
from compress.model.context import OTHER_TOKENS
from compress.model.streamed import Batch, StreamedModel, run_blocks
from runtime.api.pooling import read_pooling

# How far an encoder's embeddings moved: the cosine similarity of every held-out text before and after.


def compare_embeddings(
    source: StreamedModel,
    artifact: StreamedModel,
    windows: torch.Tensor,
    batch_size: int,
    spill: Path | None,
    reporter: Reporter,
    source_windows: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Cosine similarity of the pooled embeddings of each window of `windows` `[n, s]` int64, source against artifact.

    `source_windows`: the same tokens by the source's ids, where they are others.

    Pooled as the checkpoint's sentence-transformers files say, else by the mean.

    Returns {"cosine": {"mean", "min"}, "windows", "tokens"}.
    """
    batches: list[Batch] = [(rows, None) for rows in windows.split(batch_size)]
    pooling = read_pooling(source.checkpoint.path)
    reporter.phase("evaluate", 2 * len(source.blocks))
    given: list[Batch] = (
        batches if source_windows is None else [(ids, None) for ids in source_windows.split(batch_size)]
    )
    before = run_blocks(source, given, spill and spill / "eval-source", lambda i: reporter.step(f"source block {i}"))
    after = run_blocks(
        artifact, batches, spill and spill / "eval-artifact", lambda i: reporter.step(f"artifact block {i}")
    )
    found = []
    with source.outside(), artifact.outside():
        for number in range(len(batches)):
            one, other = (
                pooling(model.outputs(states.get(number).to(model.device)).float(), None).double().cpu()
                for model, states in ((source, before), (artifact, after))
            )
            found.append(torch.nn.functional.cosine_similarity(one, other, dim=1))
    before.drop()
    after.drop()
    cosine = torch.cat(found)
    return {
        "cosine": {"mean": float(cosine.mean()), "min": float(cosine.min())},
        "windows": len(windows),
        "tokens": windows.numel(),
    }


# Quality of an artifact against its source, both streamed block by block, so that evaluation needs no more memory than compression.

# Logits are made for this many positions at a time: vocabulary times this times 4 bytes is what they cost.
LOGIT_ROWS = 512


def compare(
    source: StreamedModel,
    artifact: StreamedModel,
    windows: torch.Tensor,
    batch_size: int,
    spill: Path | None,
    reporter: Reporter,
) -> dict[str, Any]:
    """Perplexity of both models on `windows` `[n, s]` int64 (every token but the first of a window is scored), KL and agreement.

    An encoder-decoder reads the first half of a window and is scored on the rest, given token by token; one that hears is scored on
    transcripts.

    Returns {"before": {...}, "after": {...}, "kl", "top1_agreement", "tokens"}: KL(source || artifact) in nats a token.
    """
    batches: list[Batch] = [(rows, None) for rows in windows.split(batch_size)]
    reporter.phase("evaluate", 2 * len(source.blocks))
    before = run_blocks(source, batches, spill and spill / "eval-source", lambda i: reporter.step(f"source block {i}"))
    after = run_blocks(
        artifact, batches, spill and spill / "eval-artifact", lambda i: reporter.step(f"artifact block {i}")
    )
    base, ours = TokenMetrics(), TokenMetrics()
    with torch.inference_mode(), source.outside(), artifact.outside():
        for number, (ids, _) in enumerate(batches):
            rows = max(1, LOGIT_ROWS // source.rows.length(ids))
            for start in range(0, ids.shape[0], rows):
                part = slice(start, start + rows)
                rows_here = ids[part]
                targets = source.labels(rows_here).reshape(-1)
                reference = source.outputs(before.get(number)[part].to(source.device), rows_here)[:, :-1].flatten(0, 1)
                logits = artifact.outputs(after.get(number)[part].to(artifact.device), rows_here)[:, :-1].flatten(0, 1)
                scored = targets >= 0
                if not bool(scored.all()):
                    targets, reference, logits = (
                        targets[scored],
                        *(part[scored.to(part.device)] for part in (reference, logits)),
                    )
                base.add(reference, targets)
                ours.add(logits, targets, reference_logits=reference)
    before.drop()
    after.drop()
    measured = ours.result()
    return {
        "before": {"perplexity": base.result()["perplexity"]},
        "after": {"perplexity": measured["perplexity"]},
        "kl": measured["kl"],
        "top1_agreement": measured["top1_agreement"],
        "tokens": measured["tokens"],
    }


def compare_texts(
    source: StreamedModel,
    artifact: StreamedModel,
    theirs: Spans,
    ours: Spans,
    batch_size: int,
    spill: Path | None,
    reporter: Reporter,
) -> dict[str, Any]:
    """Perplexity of both models on a text, which each has in its own tokens.

    Args:
        theirs: the text for the source. ours: for the artifact.

    Returns:
        {"before": {...}, "after": {...}} with "perplexity" and "bits_per_character"; "tokens" of the source that were scored;
        "tokens_each": tokens of the artifact's that are as much text as one of the source's, mean; "reason" why there is no KL
        divergence. Perplexity is a token of the source's on both sides: exp of the mean loss of a character times the characters of such
        a token.
    """
    reporter.phase("evaluate", 2 * len(source.blocks))
    nll, characters, tokens = [], [], []
    for name, model, spans in (("source", source, theirs), ("artifact", artifact, ours)):
        own = spill and spill / f"eval-{name}"
        metrics = _scored(name, model, spans.ids, batch_size, own, reporter)
        nll.append(metrics["nll"] * metrics["tokens"])
        tokens.append(metrics["tokens"])
        characters.append(int(model.labels(spans.characters).sum()))
    each = characters[0] / tokens[0]
    before, after = (
        {"perplexity": _exp(loss / count * each), "bits_per_character": loss / count / math.log(2)}
        for loss, count in zip(nll, characters, strict=True)
    )
    tokens_each = tokens[1] / characters[1] * each
    return {"before": before, "after": after, "tokens": tokens[0], "tokens_each": tokens_each, "reason": OTHER_TOKENS}


@torch.inference_mode()
def _scored(
    name: str, model: StreamedModel, windows: torch.Tensor, batch_size: int, spill: Path | None, reporter: Reporter
) -> dict[str, Any]:
    batches: list[Batch] = [(rows, None) for rows in windows.split(batch_size)]
    states = run_blocks(model, batches, spill, lambda i: reporter.step(f"{name} block {i}"))
    metrics = TokenMetrics()
    with model.outside():
        for number, (ids, _) in enumerate(batches):
            at_once = max(1, LOGIT_ROWS // ids.shape[1])
            for start in range(0, len(ids), at_once):
                rows = ids[start : start + at_once]
                state = states.get(number)[start : start + at_once].to(model.device)
                metrics.add(model.outputs(state, rows)[:, :-1].flatten(0, 1), model.labels(rows).reshape(-1))
    states.drop()
    return metrics.result()


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
