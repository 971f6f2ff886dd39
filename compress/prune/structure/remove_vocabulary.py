"""Remove tokens: rows of the embeddings and of the head, and the tokenizer's entries. Nothing else of the model changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from compress.model.checkpoint_writer import PlainWriter, config_dict
from compress.model.streamed import Batch, StreamedModel, run_blocks
from compress.prune.structure.cutting import Cutting, check_finite
from compress.prune.structure.job import StructureJob
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import CompressError


def remove_vocabulary(cutting: Cutting) -> tuple[dict[str, Any], Batch, torch.Tensor]:
    """Write the smaller model.

    Returns:
        {"special": tokens that always stay, "padding": rows without a token that stay}, JSON-able; a probe in the new ids; and the state
        after the last block that the smaller model should give for it.

    Raises:
        CompressError: weights with NaN or Inf.
    """
    job, streamed, output, reporter = cutting.job, cutting.streamed, cutting.output, cutting.reporter
    assert job.tokens is not None
    kept, count = job.tokens.kept, len(streamed.blocks)
    writer = PlainWriter(output, count + 1, streamed.model)
    done = writer.done()
    reporter.phase(f"structure: {job.describe()}", count + 1, done)
    for index in range(done, count):
        writer.write(index, {name: streamed.checkpoint.get(name) for name in streamed.block_names(index)}, {})
        reporter.step(f"block {index}: copied")
    if done <= count:
        writer.write(count, _outside(job, streamed), {})
        reporter.step("embeddings, final norm and head")
    writer.finish(streamed.checkpoint.path, config_dict(streamed.checkpoint, streamed.config, job.config))
    job.tokens.write(output)
    vocabulary = job.tokens.vocabulary
    facts = {"special": len(vocabulary.special), "padding": len(set(kept.tolist()) - vocabulary.ids)}
    ids = cutting.probe[0] % job.kept
    states = run_blocks(streamed, [(kept[ids], None)], None).get(0)
    _check_head(job, streamed, (ids, None), states, output)
    return facts, (ids, None), states


def _outside(job: StructureJob, streamed: StreamedModel) -> dict[str, torch.Tensor]:
    """All that is in no block, rows of tokens cut: the tensors whose shapes the size of the vocabulary decides."""
    assert job.tokens is not None
    tensors = {name: streamed.checkpoint.get(name) for name in streamed.outside_names()}
    check_finite(tensors)
    for part in job.slices:
        if part.name in tensors:
            tensors[part.name] = part.cut(tensors[part.name], job.tokens.kept, job.size.count)
    return tensors


@torch.inference_mode()
def _check_head(job: StructureJob, streamed: StreamedModel, batch: Batch, state: torch.Tensor, output: Path) -> None:
    """The smaller model's logits are the whole one's of the tokens that stay."""
    if streamed.kind == "encoder":
        return
    assert job.tokens is not None
    kept = job.tokens.kept
    smaller = StreamedModel(Checkpoint(output), streamed.device, dtype=streamed.dtype)
    run_blocks(smaller, [batch], None)  # an encoder-decoder learns here how its decoder is called
    state = state.to(streamed.device)
    found = smaller.outputs(state, batch[0])
    expected = streamed.outputs(state, kept[batch[0]])[..., kept.to(state.device)]
    if not torch.allclose(found.float(), expected.float(), rtol=1e-2, atol=1e-2):
        raise CompressError(f"{output} gives other logits than the whole model for the tokens that stay; this is a bug")
