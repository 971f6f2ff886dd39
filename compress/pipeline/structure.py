"""The stage `structure` of a run: a smaller checkpoint out of a whole one, and proof that it computes what it should."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compress.pipeline.files import write_json
from compress.pipeline.hidden import HiddenStates
from compress.pipeline.progress import Reporter
from compress.pipeline.remove_channels import remove_channels
from compress.pipeline.remove_experts import remove_experts
from compress.pipeline.remove_hidden import remove_hidden
from compress.pipeline.remove_layers import remove_layers
from compress.pipeline.remove_vocabulary import remove_vocabulary
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
        What was done, JSON-able: "remove", "method", "before" and "after" (units), "parameters_before", "parameters_after", "measured"
        (where time was), and what the removal says.
    """
    _check_begun(job, streamed, work)
    # Which layers an earlier stage would keep was not known when the job was made, nor what lists with an entry for each say.
    job = replace(job, config=job.smaller(streamed.config))
    if job.settings.remove == "layers":
        found = remove_layers(job, streamed, batches, output, work, spill, reporter)
        expected = _without(streamed, found["kept"], probe)
    elif job.settings.remove == "experts":
        found, expected = remove_experts(job, streamed, batches, probe, output, work, spill, reporter)
    elif job.settings.remove == "hidden":
        found, expected = remove_hidden(job, streamed, batches, probe, output, work, spill, reporter)
    elif job.settings.remove == "vocabulary":
        found, probe, expected = remove_vocabulary(job, streamed, probe, output, reporter)
    else:
        found, expected = remove_channels(job, streamed, batches, probe, output, work, spill, reporter)
    smaller = StreamedModel(Checkpoint(output), streamed.device, dtype=streamed.dtype)
    check_equal(output, run(smaller, probe), expected.float().cpu())
    return {
        "remove": job.settings.remove, "method": job.stage.method, "before": job.size.count, "after": job.kept, "unit": job.size.unit,
        "parameters_before": _parameters(streamed), "parameters_after": _parameters(smaller),
        **({"measured": job.measured} if job.measured else {}), **found,
    }  # fmt: skip


def _check_begun(job: StructureJob, streamed: StreamedModel, work: Path) -> None:
    """The model is the one that the job was made for, and a pass that goes on goes on to as many units.

    Times are kept, so that a budget of latency gives the same number again; where they are lost it may not.
    """
    file = work / "job.json"
    plan = {"before": job.size.count, "after": job.kept}
    begun = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else plan
    wanted, found = (_told(c) for c in (job.config, job.smaller(streamed.config)))
    if begun != plan or wanted != found:
        raise CompressError(
            f"this run was begun with another number of units than {job.describe()}, since times were measured anew; run it again with "
            "--overwrite"
        )
    work.mkdir(parents=True, exist_ok=True)
    write_json(file, plan)


def _told(config: Any) -> dict[str, Any]:
    """A config without where it was read, and without its lists."""
    kept = config.to_dict().items()
    return {key: value for key, value in kept if key != "_name_or_path" and not isinstance(value, (list, tuple))}


def _parameters(streamed: StreamedModel) -> int:
    """Of a model, tied ones once: those that are read become tensors of their own."""
    named = streamed.model.named_parameters(remove_duplicate=False)
    return sum(value.numel() for name, value in named if name not in streamed.ties)


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
