"""The stage `structure` of a run: a smaller checkpoint out of a whole one, and proof that it computes what it should."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from compress.pipeline.hidden import HiddenStates
from compress.pipeline.progress import Reporter
from compress.pipeline.remove_channels import remove_channels
from compress.pipeline.remove_layers import remove_layers
from compress.pipeline.stream import Batch, StreamedModel
from compress.pipeline.structure_job import StructureJob
from runtime.checkpoint import Checkpoint
from runtime.errors import CompressError

# What was written, in the model's dtype, against what was computed block by block.
TOLERANCE = 3e-2


def remove_structure(
    job: StructureJob,
    streamed: StreamedModel,
    batches: Sequence[Batch],
    probe: Batch,
    output: Path,
    work: Path,
    spill: bool,
    reporter: Reporter,
) -> dict[str, Any]:
    """Write the smaller model to `output`; arguments and errors as of `remove_channels`.

    Returns:
        What was done, JSON-able: "remove", "method", "before" and "after" (units), "parameters_before", "parameters_after", and what the
        removal says.
    """
    if job.settings.remove == "layers":
        found = remove_layers(job, streamed, batches, output, work, spill, reporter)
        expected = _without(streamed, found["kept"], probe)
    else:
        found, expected = remove_channels(job, streamed, batches, probe, output, work, spill, reporter)
    smaller = StreamedModel(Checkpoint(output), streamed.device, dtype=streamed.dtype)
    check_equal(output, run(smaller, probe), expected.float().cpu())
    return {
        "remove": job.settings.remove, "method": job.stage.method, "before": job.size.count, "after": job.kept, "unit": job.size.unit,
        "parameters_before": _parameters(streamed), "parameters_after": _parameters(smaller), **found,
    }  # fmt: skip


def _parameters(streamed: StreamedModel) -> int:
    return sum(p.numel() for p in streamed.model.parameters())


def _without(whole: StreamedModel, kept: Sequence[Sequence[int]], probe: Batch) -> torch.Tensor:
    """What the model gives when its layers that are not kept are passed by."""
    skipped = {
        stack.first + index
        for stack, own in zip(whole.stacks, kept, strict=True)
        for index in range(len(stack.blocks))
        if index not in own
    }
    return run(whole, probe, skipped)


@torch.inference_mode()
def run(streamed: StreamedModel, batch: Batch, skipped: set[int] | None = None) -> torch.Tensor:
    """The state after the last block, float32, with some blocks passed by."""
    states = HiddenStates(1)
    streamed.load_outside()
    streamed.prelude([batch], states)
    state = states.get(0)
    for index in range(len(streamed.blocks)):
        if index in (skipped or ()):
            state = streamed.hand_over(index, state, batch)
            continue
        with streamed.loaded_block(index):
            state = streamed.advance(index, state, batch)
    return state.float().cpu()


def check_equal(path: Path, found: torch.Tensor, expected: torch.Tensor) -> None:
    """CompressError where a checkpoint computes something else than it should."""
    difference = float((found - expected).norm() / expected.norm().clamp_min(1e-12))
    if not difference <= TOLERANCE:
        raise CompressError(
            f"{path} computes something else than it was made to (relative {difference:.2e}); this is a bug"
        )
