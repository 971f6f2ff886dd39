"""How far an encoder's embeddings moved: the cosine similarity of every held-out text before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from compress.pipeline.progress import Reporter
from compress.pipeline.stream import Batch, StreamedModel, run_blocks
from runtime.pooling import read_pooling


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
