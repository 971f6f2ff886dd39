"""Quality of an artifact against its source, both streamed block by block, so that evaluation needs no more memory than compression."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from compress.evaluate.metrics import TokenMetrics
from compress.pipeline.progress import Reporter
from compress.pipeline.stream import Batch, StreamedModel, run_blocks

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
