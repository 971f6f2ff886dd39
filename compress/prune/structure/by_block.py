"""A smaller checkpoint, written block by block: what a cut of single layers has in common, whatever it cuts."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.core.files import last_intact, seal
from compress.model.checkpoint_writer import PlainWriter, config_dict
from compress.model.hidden_states import HiddenStates
from compress.model.streamed import Batch
from compress.prune.structure.cutting import Cutting
from runtime.modeling.skeleton import build_skeleton, find_stacks


class OpenBlock(ABC):
    """One block on its way to fewer units; it is in memory.

    Args:
        smaller: the same block of the smaller model, without weights.
        index: its number.
        states: that enter it, of all batches.
        batches: the probe last.
    """

    def __init__(
        self, cutting: Cutting, smaller: nn.Module, index: int, states: HiddenStates, batches: Sequence[Batch]
    ) -> None:
        self.job, self.streamed = cutting.job, cutting.streamed
        self.smaller, self.index, self.states, self.batches = smaller, index, states, batches
        self.prefix = self.streamed.block_prefix(index)
        self.block = self.streamed.blocks[index]

    @abstractmethod
    def cut(self) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]], str]:
        """Its tensors by name, a line for each layer of it that was cut, and a word for people; the states become what it gives then."""

    def module(self, name: str, block: nn.Module | None = None) -> nn.Module:
        """A module of the block (or of another like it) by its name in the model."""
        local = f"{name}.".removeprefix(self.prefix).removesuffix(".")
        return (self.block if block is None else block).get_submodule(local)

    def held(self, name: str) -> torch.Tensor:
        """A parameter or buffer of the block in memory, by its name in the model."""
        parent, _, leaf = name.removeprefix(self.prefix).rpartition(".")
        value = getattr(self.block.get_submodule(parent), leaf)
        assert isinstance(value, torch.Tensor)
        return value.data


def write_by_block(
    cutting: Cutting,
    batches: Sequence[Batch],
    dtype: torch.dtype,
    opened: Callable[[nn.Module, int, HiddenStates], OpenBlock],
) -> tuple[list[dict[str, Any]], torch.Tensor]:
    """Cut every block that is not done, and write the checkpoint.

    Args:
        batches: that go through the model, the probe last.
        dtype: of the smaller model's parameters.
        opened: makes an `OpenBlock` of the smaller model's block, its number, and the states that enter it.

    Returns:
        The lines of all layers, and the state after the last block that the smaller model should give for the probe.
    """
    job, streamed, work, reporter = cutting.job, cutting.streamed, cutting.work, cutting.reporter
    count = len(streamed.blocks)
    skeleton = build_skeleton(job.config, dtype, stored=streamed.checkpoint.names())
    writer = PlainWriter(cutting.output, count + 1, skeleton)
    written = writer.done()
    done = last_intact(min(written, count), lambda index: [_hidden_directory(work, index)], reporter.warn)
    if done < min(written, count):
        writer.forget(range(done, count + 1))
    elif written > count:
        done = written
    reporter.phase(f"structure: {job.describe()}", count + 1, done)
    smaller = [block for _, stack in find_stacks(skeleton) for block in stack]
    streamed.load_outside()
    states = _entering(cutting, batches, min(done, count))
    for index in range(done, count):
        with streamed.loaded_block(index):
            tensors, facts, told = opened(smaller[index], index, states).cut()
        states.persist(_hidden_directory(work, index + 1))
        seal(_hidden_directory(work, index + 1))
        writer.write(index, tensors, {"layers": facts})
        shutil.rmtree(_hidden_directory(work, index - 1), ignore_errors=True)
        reporter.step(f"block {index}: {told}")
    if done <= count:
        outside = {name: streamed.checkpoint.get(name) for name in streamed.outside_names()}
        writer.write(count, outside, {"layers": []})
        reporter.step("embeddings, final norm and head")
    layers = [layer for part in range(count + 1) for layer in writer.facts(part)["layers"]]
    writer.finish(streamed.checkpoint.path, config_dict(streamed.checkpoint, streamed.config, job.config))
    return layers, states.get(len(batches) - 1)


def _entering(cutting: Cutting, batches: Sequence[Batch], done: int) -> HiddenStates:
    """What enters the first block that is still to be done."""
    streamed = cutting.streamed
    cutting.work.mkdir(parents=True, exist_ok=True)
    if done == 0:
        states = cutting.states(len(batches))
        streamed.prelude(list(batches), states)
        return states
    states = HiddenStates.load(_hidden_directory(cutting.work, done), len(batches), cutting.scratch())
    for batch in batches:
        streamed.block_kwargs(batch, min(done, len(streamed.blocks) - 1))
    return states


def _hidden_directory(work: Path, index: int) -> Path:
    """Where what enters a block is kept for an interrupted call."""
    return work / f"hidden-{index:05d}"
