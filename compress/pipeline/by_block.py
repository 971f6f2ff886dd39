"""A smaller checkpoint, written block by block: what a cut of single layers has in common, whatever it cuts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.pipeline.hidden import HiddenStates
from compress.pipeline.plain import PlainWriter, config_dict
from compress.pipeline.progress import Reporter
from compress.pipeline.stream import Batch, StreamedModel
from compress.pipeline.structure_job import StructureJob
from runtime.skeleton import build_skeleton, find_stacks

#: (block of the smaller model without weights, its number, states of all batches) -> its tensors by name, a line for each layer of it that
#: was cut, and a word for people. The block is in memory; the states enter it, and become what the cut block gives.
CutBlock = Callable[[nn.Module, int, HiddenStates], tuple[dict[str, torch.Tensor], list[dict[str, Any]], str]]


def write_by_block(
    job: StructureJob,
    streamed: StreamedModel,
    batches: Sequence[Batch],
    dtype: torch.dtype,
    output: Path,
    work: Path,
    spill: bool,
    reporter: Reporter,
    cut: CutBlock,
) -> tuple[list[dict[str, Any]], torch.Tensor]:
    """Cut every block that is not done, and write the checkpoint.

    Args:
        batches: that go through the model, the probe last.
        dtype: of the smaller model's parameters.
        output, work, spill: as of `remove_channels`.

    Returns:
        The lines of all layers, and the state after the last block that the smaller model should give for the probe.
    """
    count = len(streamed.blocks)
    writer = PlainWriter(output, count + 1)
    done = writer.done()
    reporter.phase(f"structure: {job.describe()}", count + 1, done)
    skeleton = build_skeleton(job.config, dtype, stored=streamed.checkpoint.names())
    smaller = [block for _, stack in find_stacks(skeleton) for block in stack]
    streamed.load_outside()
    states = _entering(streamed, batches, min(done, count), work, spill)
    for index in range(done, count):
        with streamed.loaded_block(index):
            tensors, facts, told = cut(smaller[index], index, states)
        states.persist(_hidden_directory(work, index + 1))
        writer.write(index, tensors, {"layers": facts})
        shutil.rmtree(_hidden_directory(work, index), ignore_errors=True)
        reporter.step(f"block {index}: {told}")
    if done <= count:
        outside = {name: streamed.checkpoint.get(name) for name in streamed.outside_names()}
        writer.write(count, outside, {"layers": []})
        reporter.step("embeddings, final norm and head")
    layers = [layer for part in range(count + 1) for layer in writer.facts(part)["layers"]]
    writer.finish(streamed.checkpoint.path, config_dict(streamed.checkpoint, streamed.config, job.config))
    return layers, states.get(len(batches) - 1)


def _entering(streamed: StreamedModel, batches: Sequence[Batch], done: int, work: Path, spill: bool) -> HiddenStates:
    """What enters the first block that is still to be done."""
    work.mkdir(parents=True, exist_ok=True)
    scratch = work / "hidden-next" if spill else None
    if done == 0:
        states = HiddenStates(len(batches), scratch)
        streamed.prelude(list(batches), states)
        return states
    states = HiddenStates.load(_hidden_directory(work, done), len(batches), scratch)
    for batch in batches:
        streamed.block_kwargs(batch, min(done, len(streamed.blocks) - 1))
    return states


def _hidden_directory(work: Path, index: int) -> Path:
    """Where what enters a block is kept for an interrupted call."""
    return work / f"hidden-{index:05d}"
