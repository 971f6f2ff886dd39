"""Remove channels or heads, block by block: ranked by what the block sees, their readers refitted; what follows sees the result."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from compress.core.statistics import Statistics
from compress.core.tensors import relative
from compress.model.couplings import Channels, input_dim, layouts, weights_of
from compress.model.hidden_states import HiddenStates
from compress.model.input_statistics import InputGroup, collect
from compress.prune.structure.by_block import OpenBlock, write_by_block
from compress.prune.structure.cutting import Cutting, best, check_finite, check_ranks
from compress.prune.structure.gradients import sensitivities
from compress.prune.structure.least_squares import refit
from compress.prune.structure.view import View
from runtime.errors import CompressError, RequestError
from runtime.modeling.skeleton import set_tensor

# What a block of a cut model gives may differ from what the whole one gives without the removed channels: float32 sums in another order.
TOLERANCE = 1e-3


def remove_channels(cutting: Cutting) -> tuple[dict[str, Any], torch.Tensor]:
    """Write the smaller model.

    Returns:
        {"layers": a line for each reader of channels}, JSON-able; and the state after the last block that the smaller model should give
        for the probe.

    Raises:
        RequestError: the model computes something else without these channels than with zeros in their place. CompressError: weights or
            inputs with NaN or Inf.
    """
    needs, batches, probe = cutting.job.needs, cutting.batches, cutting.probe
    gradients = sensitivities_of(cutting)
    every = [*batches, probe] if needs & {"hessian", "ranges"} else [batches[0], probe]

    def opened(smaller: nn.Module, index: int, states: HiddenStates) -> ChannelBlock:
        return ChannelBlock(gradients, cutting, smaller, index, states, every)

    layers, state = write_by_block(cutting, every, torch.float32, opened)
    return {"layers": layers}, state


class ChannelBlock(OpenBlock):
    """One block on its way to fewer channels. `gradients`: what a loss says of each unit, by reader."""

    def __init__(self, gradients: dict[str, torch.Tensor], *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gradients = gradients

    def cut(self) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]], str]:
        """See `OpenBlock`; the block in memory is changed, so that it gives what the cut one will."""
        tensors, facts = self._cut()
        with torch.inference_mode():
            for number, batch in enumerate(self.batches):
                self.states.put(number, self.streamed.advance(self.index, self.states.get(number), batch))
        worst = max((layer["error"] for layer in facts if layer["error"] is not None), default=None)
        return tensors, facts, "cut" if worst is None else f"cut, error {worst:.2e}"

    def _cut(self) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
        job, source = self.job, self.streamed.checkpoint
        names = self.streamed.block_names(self.index)
        tensors = {name: source.get(name) for name in names}
        check_finite(tensors)
        facts, all_kept = [], {}
        for channels in self.in_order():
            statistics = self.statistics(channels)
            rank, notes = self.rank(channels, statistics)
            kept = best(rank, job.width(self.index))
            all_kept[channels.consumer] = kept
            facts.append(self._replace_reader(channels, kept, statistics, notes))
        chosen = self._layout(all_kept, tensors)
        result = dict(tensors)
        for channels in chosen:
            for part in channels.slices:
                if part.name == f"{channels.consumer}.weight":
                    result[part.name] = self.held(part.name).to(tensors[part.name].dtype)
                if part.name in result:
                    result[part.name] = part.cut(result[part.name], all_kept[channels.consumer], channels.count)
        return result, facts

    def in_order(self) -> list[Channels]:
        """The readers in the order in which they run."""
        found = {channels.consumer: channels for channels in self.job.channels[self.index]}
        if len(found) < 2:
            return list(found.values())
        order: list[str] = []

        def remember(consumer: str) -> Any:
            return lambda *_: order.append(consumer)

        handles = [self.module(name).register_forward_pre_hook(remember(name)) for name in found]
        try:
            with torch.no_grad():
                self._run(self.block, None)
        finally:
            for handle in handles:
                handle.remove()
        return [found[name] for name in dict.fromkeys(order)]

    def statistics(self, channels: Channels) -> Statistics | None:
        """Of what a reader is given, over all batches but the probe; None: nothing needs them."""
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

    def rank(
        self, channels: Channels, statistics: Statistics | None, kept: int | None = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Of each unit float32, larger for what matters more; and what the method notes. `kept`: that will stay, if not as the job says."""
        job, name = self.job, channels.consumer
        held = {part.name: self.held(part.name).cpu() for part in channels.slices}
        # In whatever order a fused tensor holds the units, their sizes are compared in the likeliest.
        likeliest = next(layouts(channels, job.size.members))
        view = View(
            count=channels.count,
            kept=job.width(self.index) if kept is None else kept,
            generator=torch.Generator().manual_seed(job.settings.seed + self.index),
            columns=_as_read(self.module(name)).float().cpu(),
            weights=weights_of(likeliest, held),
            statistics=None if statistics is None else statistics.to("cpu"),
            sensitivity=self.gradients.get(name),
        )
        return check_ranks(job.method.rank(view, job.settings), f"the units of {name}", job.method.name), view.notes

    def without(
        self, channels: Channels, kept: torch.Tensor, statistics: Statistics | None
    ) -> tuple[torch.Tensor, torch.Tensor, float | None]:
        """The reader's weight `[out, in]`, float32; the one that takes its place, zero where units are removed and fitted elsewhere; and
        the damping of the fit, None without one."""
        settings = self.job.settings
        columns = channels.columns.index(kept, channels.count)
        before = _as_read(self.module(channels.consumer)).to("cpu", torch.float32, copy=True)
        after, damping = torch.zeros_like(before), None
        if len(kept) == channels.count:
            return before, before.clone(), None
        if settings.reconstruct and statistics is not None and statistics.hessian is not None:
            after[:, columns], damping = refit(before, statistics.hessian.cpu(), columns, settings.damping)
        else:
            after[:, columns] = before[:, columns]
        return before, after, damping

    def _replace_reader(
        self, channels: Channels, kept: torch.Tensor, statistics: Statistics | None, notes: dict[str, Any]
    ) -> dict[str, Any]:
        """Zero what the reader makes of removed units, and fit the rest; returns the layer's line."""
        before, after, damping = self.without(channels, kept, statistics)
        weight = _as_read(self.module(channels.consumer))
        weight.copy_(after.to(weight.dtype))
        return {
            "name": channels.consumer, "units": channels.count, "kept": len(kept),
            "error": _error(before, weight.to("cpu", torch.float32), statistics), "damping": damping,
            **({"notes": notes} if notes else {}),
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
            value = self.held(self.prefix + name).float().cpu()
            for part, units, count in parts.get(self.prefix + name, ()):
                value = part.cut(value, units, count)
            set_tensor(trial, name, value.to(self.streamed.device))
        for name, _ in trial.named_buffers():
            set_tensor(trial, name, self.held(self.prefix + name).to(self.streamed.device))
        try:
            with torch.no_grad():
                result = self._run(trial, torch.float32)
        except (RuntimeError, ValueError):  # shapes that do not go together
            return float("inf")
        return relative(result, expected)

    def _run(self, block: nn.Module, dtype: torch.dtype | None) -> torch.Tensor:
        """A block in the place of this one, over the first row of the text."""
        ids, mask = self.batches[0]
        batch = (ids[:1], mask[:1] if mask is not None else None)
        return self.streamed.run_block(self.index, self.states.get(0)[:1], batch, dtype, block)


def _as_read(module: nn.Module) -> torch.Tensor:
    """The weight `[out, in]`, a view."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.data if input_dim(module) == 1 else weight.data.T


def _error(before: torch.Tensor, after: torch.Tensor, statistics: Statistics | None) -> float | None:
    """Relative squared error of the reader's output over the calibration inputs; None where there were none."""
    if statistics is None or statistics.hessian is None:
        return None
    moments = statistics.hessian.cpu()
    whole = energy(before, moments)
    return energy(before - after, moments) / whole if whole > 0 else 0.0


def energy(weight: torch.Tensor, moments: torch.Tensor) -> float:
    """Mean squared norm of what a weight `[out, in]` makes of inputs of these second moments `[in, in]`."""
    return float(((weight @ moments) * weight).sum())


def sensitivities_of(cutting: Cutting) -> dict[str, torch.Tensor]:
    """What a loss says of each unit, by reader, computed once for a run and those that go on from it; nothing where nothing asks for it."""
    if "gradients" not in cutting.job.needs:
        return {}
    from safetensors.torch import load_file, save_file

    from compress.core.files import intact, seal, written_beside

    file = cutting.work / "sensitivities.safetensors"
    if intact(file):
        return load_file(file)
    readers = {c.consumer: c.count for block in cutting.job.channels for c in block}
    found = sensitivities(cutting.streamed, readers, cutting.batches, cutting.reporter)
    cutting.work.mkdir(parents=True, exist_ok=True)
    with written_beside(file) as temporary:
        save_file(found, temporary)
    seal(file)
    return found
