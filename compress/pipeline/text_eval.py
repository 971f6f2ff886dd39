"""Quality of an artifact whose vocabulary was cut, against its source: each reads the same text with its own tokenizer.

Their tokens are not the same, so there is no distribution over tokens to compare: what both say of the text is, a character.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from compress.calibration.spans import Spans
from compress.evaluate.metrics import TokenMetrics
from compress.pipeline.progress import Reporter
from compress.pipeline.stream import Batch, StreamedModel, run_blocks
from compress.pipeline.streamed_eval import LOGIT_ROWS

REASON = (
    "the vocabulary was cut, so that source and artifact split texts into other tokens: perplexity is that of the text, a token of the "
    "source's, and KL divergence and agreement, which compare token by token, are not measured"
)


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
    return {"before": before, "after": after, "tokens": tokens[0], "tokens_each": tokens_each, "reason": REASON}


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
