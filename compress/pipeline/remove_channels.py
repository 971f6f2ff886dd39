"""Remove channels or heads, block by block: ranked by what the block sees, their readers refitted; what follows sees the result."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.pipeline.by_block import write_by_block
from compress.pipeline.collect import InputGroup, collect
from compress.pipeline.gradients import sensitivities
from compress.pipeline.hidden import HiddenStates
from compress.pipeline.progress import Reporter
from compress.pipeline.stream import Batch, StreamedModel
from compress.pipeline.structure_job import StructureJob
from compress.prune.structure.couplings import Channels, input_dim, layouts, weights_of
from compress.prune.structure.least_squares import refit
from compress.prune.structure.view import View
from compress.statistics import Statistics
from runtime.errors import CompressError, RequestError
from runtime.skeleton import set_tensor

# What a block of a cut model gives may differ from what the whole one gives without the removed channels: float32 sums in another order.
TOLERANCE = 1e-3


def remove_channels(
    job: StructureJob,
    streamed: StreamedModel,
    batches: Sequence[Batch],
    probe: Batch,
    output: Path,
    work: Path,
    spill: bool,
    reporter: Reporter,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Write the smaller model to `output`.

    Args:
        batches: calibration text. probe: ids that follow the model through, to be compared with what was written.
        work: for what an interrupted call goes on from. spill: hidden states are held on the disk.

    Returns:
        {"layers": a line for each reader of channels}, JSON-able; and the state after the last block that the smaller model should give
        for the probe.

    Raises:
        RequestError: the model computes something else without these channels than with zeros in their place. CompressError: weights or
            inputs with NaN or Inf.
    """
    gradients = _sensitivities(job, streamed, batches, work, reporter) if "gradients" in job.needs else {}
    every = [*batches, probe] if job.needs & {"hessian", "ranges"} else [batches[0], probe]

    def cut(
        smaller: nn.Module, index: int, states: HiddenStates
    ) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]], str]:
        tensors, facts = _Block(job, streamed, smaller, index, states, every).cut(gradients)
        with torch.inference_mode():
            for number, batch in enumerate(every):
                states.put(number, streamed.advance(index, states.get(number), batch))
        worst = max((layer["error"] for layer in facts if layer["error"] is not None), default=None)
        return tensors, facts, "nothing to remove" if worst is None else f"error {worst:.2e}"

    layers, state = write_by_block(job, streamed, every, torch.float32, output, work, spill, reporter, cut)
    return {"layers": layers}, state


class _Block:
    """One block on its way to fewer channels."""

    def __init__(
        self,
        job: StructureJob,
        streamed: StreamedModel,
        smaller: nn.Module,
        index: int,
        states: HiddenStates,
        batches: Sequence[Batch],
    ) -> None:
        self.job, self.streamed, self.smaller, self.index = job, streamed, smaller, index
        self.states, self.batches = states, batches
        self.prefix = streamed.block_prefix(index)
        self.block = streamed.blocks[index]

    def cut(self, gradients: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
        """The block's tensors without the channels, by name; the block in memory gives what they will give."""
        job, source = self.job, self.streamed.checkpoint
        names = self.streamed.block_names(self.index)
        tensors = {name: source.get(name) for name in names}
        check_finite(tensors)
        facts, all_kept = [], {}
        for channels in self._in_order():
            statistics = self._statistics(channels)
            view = self._view(channels, statistics, gradients.get(channels.consumer))
            importance = job.method.rank(view, job.settings)
            if not bool(torch.isfinite(importance).all()):
                raise CompressError(
                    f"{channels.consumer}: the units cannot be ranked: {job.method.name} gives NaN or Inf"
                )
            kept = importance.argsort(descending=True, stable=True)[: job.kept].sort().values
            all_kept[channels.consumer] = kept
            facts.append(self._replace_reader(channels, kept, statistics, view))
        chosen = self._layout(all_kept, tensors)
        result = dict(tensors)
        for channels in chosen:
            for part in channels.slices:
                if part.name == f"{channels.consumer}.weight":
                    held = self.block.get_parameter(part.name.removeprefix(self.prefix)).data
                    result[part.name] = held.to(tensors[part.name].dtype)
                if part.name in result:
                    result[part.name] = part.cut(result[part.name], all_kept[channels.consumer], channels.count)
        return result, facts

    def _in_order(self) -> list[Channels]:
        """The readers in the order in which they run."""
        found = {channels.consumer: channels for channels in self.job.channels[self.index]}
        if len(found) < 2:
            return list(found.values())
        order: list[str] = []

        def remember(consumer: str) -> Any:
            return lambda *_: order.append(consumer)

        handles = [self._module(name).register_forward_pre_hook(remember(name)) for name in found]
        try:
            with torch.no_grad():
                self._run(self.block, None)
        finally:
            for handle in handles:
                handle.remove()
        return [found[name] for name in dict.fromkeys(order)]

    def _statistics(self, channels: Channels) -> Statistics | None:
        needs = self.job.needs
        if not needs & {"hessian", "ranges"}:
            return None
        columns = channels.columns
        group = InputGroup([channels.consumer.removeprefix(self.prefix)], columns.each * channels.count)
        forwards = [
            (lambda n=number: self.streamed.run_block(self.index, self.states.get(n), self.batches[n]), batch[1])
            for number, batch in enumerate(self.batches[:-1])
        ]
        (found,) = collect(self.block, [group], forwards, hessian="hessian" in needs)
        if not found.finite:
            raise CompressError(f"{channels.consumer}: its calibration inputs hold NaN or Inf")
        if found.tokens == 0:
            raise CompressError(f"{channels.consumer}: the calibration data never reached this layer")
        return found

    def _view(self, channels: Channels, statistics: Statistics | None, sensitivity: torch.Tensor | None) -> View:
        held = {
            name: self.block.get_parameter(name.removeprefix(self.prefix)).data.cpu()
            for name in (part.name for part in channels.slices)
        }
        # In whatever order a fused tensor holds the units, their sizes are compared in the likeliest.
        likeliest = next(layouts(channels, self.job.size.members))
        return View(
            count=channels.count,
            kept=self.job.kept,
            generator=torch.Generator().manual_seed(self.job.settings.seed + self.index),
            columns=_as_read(self._module(channels.consumer)).float().cpu(),
            weights=weights_of(likeliest, held),
            statistics=None if statistics is None else statistics.to("cpu"),
            sensitivity=sensitivity,
        )

    def _replace_reader(
        self, channels: Channels, kept: torch.Tensor, statistics: Statistics | None, view: View
    ) -> dict[str, Any]:
        """Zero what the reader makes of removed units, and fit the rest; returns the layer's line."""
        settings, module = self.job.settings, self._module(channels.consumer)
        weight = _as_read(module)
        columns = channels.columns.index(kept, channels.count)
        before = weight.to("cpu", torch.float32, copy=True)
        after = torch.zeros_like(before)
        damping = None
        if settings.reconstruct and statistics is not None and statistics.hessian is not None:
            after[:, columns], damping = refit(before, statistics.hessian.cpu(), columns, settings.damping)
        else:
            after[:, columns] = before[:, columns]
        after = after.to(weight.dtype)
        weight.copy_(after)
        return {
            "name": channels.consumer, "units": channels.count, "kept": len(kept),
            "error": _error(before, after.float(), statistics), "damping": damping,
            **({"notes": view.notes} if view.notes else {}),
        }  # fmt: skip

    def _layout(self, kept: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> list[Channels]:
        """The channels with the order of their slices; a cut block must give what the block in memory gives, whose readers are replaced."""
        found = self.job.channels[self.index]
        if not found:
            return []
        options = [list(layouts(channels, self.job.size.members)) for channels in found]
        whole = copy.deepcopy(self.block).float()
        with torch.no_grad():
            expected = self._run(whole, torch.float32)
        del whole
        worst = float("inf")
        for turn in range(max(map(len, options))):
            chosen = [choices[min(turn, len(choices) - 1)] for choices in options]
            worst = min(worst, self._difference(chosen, kept, tensors, expected))
            if worst < TOLERANCE:
                return chosen
        kind = type(self.streamed.model).__name__
        raise RequestError(
            f"{self.prefix.removesuffix('.')} of a {kind} computes something else when its {self.job.size.unit} are cut out (relative "
            f"difference {worst:.1e}): they depend on each other or on other layers, and cannot be removed"
        )

    def _difference(
        self,
        chosen: list[Channels],
        kept: dict[str, torch.Tensor],
        tensors: dict[str, torch.Tensor],
        expected: torch.Tensor,
    ) -> float:
        trial = copy.deepcopy(self.smaller)
        parts: dict[str, list[Any]] = {}
        for channels in chosen:
            for part in channels.slices:
                parts.setdefault(part.name, []).append((part, kept[channels.consumer], channels.count))
        for name, _ in trial.named_parameters():
            value = self.block.get_parameter(name).data.float().cpu()
            for part, units, count in parts.get(self.prefix + name, ()):
                value = part.cut(value, units, count)
            set_tensor(trial, name, value.to(self.streamed.device))
        for name, _ in trial.named_buffers():
            set_tensor(trial, name, self.block.get_buffer(name).to(self.streamed.device))
        try:
            with torch.no_grad():
                result = self._run(trial, torch.float32)
        except (RuntimeError, ValueError):  # shapes that do not go together
            return float("inf")
        return float((result - expected).norm() / expected.norm().clamp_min(1e-12))

    def _run(self, block: nn.Module, dtype: torch.dtype | None) -> torch.Tensor:
        """A block in the place of this one, over the first row of the text."""
        ids, mask = self.batches[0]
        batch = (ids[:1], mask[:1] if mask is not None else None)
        return self.streamed.run_block(self.index, self.states.get(0)[:1], batch, dtype, block)

    def _module(self, name: str) -> nn.Module:
        return self.block.get_submodule(name.removeprefix(self.prefix))


def _as_read(module: nn.Module) -> torch.Tensor:
    """The weight `[out, in]`, a view."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.data if input_dim(module) == 1 else weight.data.T


def _error(before: torch.Tensor, after: torch.Tensor, statistics: Statistics | None) -> float | None:
    """Relative squared error of the reader's output over the calibration inputs; None where there were none."""
    if statistics is None or statistics.hessian is None:
        return None
    moments, lost = statistics.hessian.cpu(), before - after
    whole = float(((before @ moments) * before).sum())
    return float(((lost @ moments) * lost).sum()) / whole if whole > 0 else 0.0


def check_finite(tensors: dict[str, torch.Tensor]) -> None:
    """CompressError that names the tensor with NaN or Inf."""
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise CompressError(f"{name}: the weight holds NaN or Inf; repair the checkpoint")


def _sensitivities(
    job: StructureJob, streamed: StreamedModel, batches: Sequence[Batch], work: Path, reporter: Reporter
) -> dict[str, torch.Tensor]:
    """What a loss says of each unit, computed once for a run and those that go on from it."""
    from safetensors.torch import load_file, save_file

    from compress.pipeline.files import written_beside

    file = work / "sensitivities.safetensors"
    if file.is_file():
        return load_file(file)
    readers = {c.consumer: c.count for block in job.channels for c in block}
    found = sensitivities(streamed, readers, batches, reporter)
    work.mkdir(parents=True, exist_ok=True)
    with written_beside(file) as temporary:
        save_file(found, temporary)
    return found
