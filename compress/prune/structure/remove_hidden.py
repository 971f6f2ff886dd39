"""Remove dimensions of the hidden state: the same ones of every tensor that has any, chosen once for the whole model.

Norms are corrected for the smaller root mean square, and linear layers fitted to what they gave before.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from compress.core.files import last_intact, seal
from compress.model.checkpoint_writer import PlainWriter, config_dict
from compress.model.hidden_states import HiddenStates
from compress.model.streamed import Batch, StreamedModel
from compress.prune.structure.cut_model import Cut, cut_model
from compress.prune.structure.cutting import Cutting, best, check_ranks
from compress.prune.structure.hidden_statistics import Measured, find_norms, gain, measured
from compress.prune.structure.job import StructureJob
from compress.prune.structure.null_check import Comparison
from compress.prune.structure.refit_hidden import Refit
from compress.prune.structure.view import View
from runtime.errors import CompressError


def remove_hidden(cutting: Cutting) -> tuple[dict[str, Any], torch.Tensor]:
    """Write the smaller model.

    Returns:
        {"dimensions": those that stay, "gains": by what each norm's output is multiplied, "layers": a line for
        each layer that was fitted, "left_out": tensors that the model has no place for and that are as wide as it was}, JSON-able; and the
        state after the last block that the smaller model should give for the probe.

    Raises:
        RequestError: the model depends on its hidden size in a way that its shapes do not show. CompressError: weights or hidden states
            with NaN or Inf.
    """
    job, streamed = cutting.job, cutting.streamed
    cutting.work.mkdir(parents=True, exist_ok=True)
    norms = find_norms(streamed.model, job.slices)
    seen = measured(cutting, norms)
    kept = best(_rank(job, streamed, seen), job.kept)
    gains = {name: gain(shares, kept) for name, shares in seen.shares.items()}
    cut = Cut(job.slices, kept, job.size.count, norms, gains)
    smaller = cut_model(job, streamed, cut, cutting.work / "outline")
    every = [*cutting.batches, cutting.probe] if job.settings.reconstruct else [cutting.probe]
    sides = _Sides(cutting, smaller, every)
    streamed.load_outside()
    comparison = Comparison(streamed, smaller, cut, cutting.probe)
    comparison.settle_scales()
    lines, left_out = _write(cutting, sides, comparison)
    return {
        "dimensions": kept.tolist(), "gains": dict(sorted(cut.gains.items())), "layers": lines, "left_out": left_out,
    }, sides.ours.get(len(every) - 1)  # fmt: skip


def _rank(job: StructureJob, streamed: StreamedModel, seen: Measured) -> torch.Tensor:
    """Float32 `[dimensions]`, larger for what matters more."""
    if "states" in job.method.needs and seen.states is None:
        raise CompressError(
            f"no linear layer of a {type(streamed.model).__name__} reads the hidden state, so {job.method.name} cannot rank its dimensions"
        )
    view = View(
        count=job.size.count,
        kept=job.kept,
        generator=torch.Generator().manual_seed(job.settings.seed),
        weights=_norms(job, streamed) if job.method.name == "magnitude" else [],
        states=seen.states,
    )
    return check_ranks(job.method.rank(view, job.settings), "the dimensions", job.method.name)


def _norms(job: StructureJob, streamed: StreamedModel) -> list[torch.Tensor]:
    """Of each stored tensor, one after the other, the norm of what each dimension has of it: float32 `[dimensions, 1]`."""
    return [
        part.by_unit(streamed.checkpoint.get(part.name).float(), job.size.count).norm(dim=1, keepdim=True)
        for part in job.slices
        if streamed.checkpoint.has(part.name)
    ]


class _Sides:
    """The states that enter the next block, of the smaller model and, where layers are fitted, of the whole one.

    Args:
        batches: the probe last.
    """

    def __init__(self, cutting: Cutting, smaller: StreamedModel, batches: Sequence[Batch]) -> None:
        self.whole, self.smaller, self.batches = cutting.streamed, smaller, list(batches)
        self.models = {"ours": smaller, **({"theirs": self.whole} if cutting.job.settings.reconstruct else {})}
        self._cutting = cutting
        self._states: dict[str, HiddenStates] = {}

    @property
    def ours(self) -> HiddenStates:
        return self._states["ours"]

    @property
    def theirs(self) -> HiddenStates | None:
        return self._states.get("theirs")

    def enter(self, done: int) -> None:
        """Up to the first block that is still to be done."""
        for name, model in self.models.items():
            if done == 0:
                self._states[name] = self._cutting.states(len(self.batches), name)
                model.prelude(self.batches, self._states[name])
                continue
            scratch = self._cutting.scratch(name)
            self._states[name] = HiddenStates.load(self._directory(name, done), len(self.batches), scratch)
            for batch in self.batches:
                model.block_kwargs(batch, min(done, len(model.blocks) - 1))

    @torch.inference_mode()
    def advance(self, index: int) -> None:
        """Past a block that is loaded in both."""
        for name, model in self.models.items():
            states = self._states[name]
            for number, batch in enumerate(self.batches):
                states.put(number, model.advance(index, states.get(number), batch))

    def persist(self, index: int) -> None:
        """So that an interrupted call can go on at block `index`."""
        for name, states in self._states.items():
            states.persist(self._directory(name, index))
            seal(self._directory(name, index))

    def forget(self, index: int) -> None:
        for name in self.models:
            shutil.rmtree(self._directory(name, index), ignore_errors=True)

    def places(self, index: int) -> list[Path]:
        """What going on at block `index` needs."""
        return [self._directory(name, index) for name in self.models]

    def _directory(self, name: str, index: int) -> Path:
        return self._cutting.work / f"{name}-{index:05d}"


def _write(cutting: Cutting, sides: _Sides, comparison: Comparison) -> tuple[list[dict[str, Any]], list[str]]:
    """Every part of the smaller model: cut, compared, fitted, written. Returns a line for each fitted layer, and what is left out."""
    job, reporter, streamed, smaller = cutting.job, cutting.reporter, sides.whole, sides.smaller
    count = len(smaller.blocks)
    writer = PlainWriter(cutting.output, count + 1, smaller.model)
    written = writer.done()
    done = last_intact(min(written, count), sides.places, reporter.warn)
    if done < min(written, count):
        writer.forget(range(done, count + 1))
    elif written > count:
        done = written
    reporter.phase(f"structure: {job.describe()}", count + 1, done)
    sides.enter(min(done, count))
    refit = Refit(streamed, smaller, comparison.cut, sides.batches[:-1], job.settings.damping)
    for index in range(done, count):
        facts: list[dict[str, Any]] = []
        with streamed.loaded_block(index), smaller.loaded_block(index) as block:
            comparison.check_block(index, sides.ours.get(len(sides.batches) - 1).to(smaller.device))
            if sides.theirs is not None:
                facts = refit.block(index, sides.theirs, sides.ours)
            sides.advance(index)
            prefix = smaller.block_prefix(index)
            fitted = {f"{fact['name']}.weight" for fact in facts}
            tensors = {
                name: block.get_parameter(name.removeprefix(prefix)).data.to(smaller.checkpoint.dtype(name))
                if name in fitted
                else smaller.checkpoint.get(name)
                for name in smaller.block_names(index)
            }
        sides.persist(index + 1)
        writer.write(index, tensors, {"layers": facts})
        sides.forget(index - 1)
        worst = max((fact["error"] for fact in facts), default=None)
        reporter.step(f"block {index}: cut" + ("" if worst is None else f", error {worst:.2e}"))
    extra = [name for name in streamed.extra if name not in streamed.checkpoint.dropped]
    left_out = [name for name in extra if job.size.count in streamed.checkpoint.shape(name)]
    if done <= count:
        facts = [] if sides.theirs is None else refit.head(sides.theirs, sides.ours)
        outside = {name: smaller.checkpoint.get(name) for name in smaller.outside_names()}
        for fact in facts:
            name = f"{fact['name']}.weight"
            outside[name] = smaller.model.get_parameter(name).data.to(smaller.checkpoint.dtype(name))
        outside |= {name: streamed.checkpoint.get(name) for name in extra if name not in left_out}
        writer.write(count, outside, {"layers": facts})
        reporter.step("embeddings, final norm and head")
    lines = [line for part in range(count + 1) for line in writer.facts(part)["layers"]]
    writer.finish(streamed.checkpoint.path, config_dict(streamed.checkpoint, streamed.config, job.config))
    return lines, left_out
