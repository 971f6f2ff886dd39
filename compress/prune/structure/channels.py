"""Removal of channels of feed-forward networks, and of groups of heads: their readers are refitted, and what follows sees the result."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import nn

from compress.core.statistics import Statistics
from compress.core.tensors import relative
from compress.model.couplings import Channels, channels_of, layouts, weights_of
from compress.model.hidden_states import HiddenStates
from compress.model.input_statistics import InputGroup, collect, find_groups, forwards
from compress.model.streamed import StreamedModel
from compress.prune.structure.gradients import sensitivities
from compress.prune.structure.least_squares import energy, refit
from compress.prune.structure.removal import (
    Cut,
    Lines,
    Pass,
    Plan,
    Removal,
    Tensors,
    best,
    check_finite,
    note_of,
)
from compress.prune.structure.width_allocation import candidates, spread
from runtime.errors import CompressError, RequestError

#: A block of a cut model may differ by so much (relative) from the whole one without the channels: float32 sums in another order.
TOLERANCE = 1e-3


class ChannelRemoval(Removal):
    """Removes channels or heads block by block. A reader of channels is the linear layer whose inputs they are."""

    def __init__(self, run: Pass) -> None:
        measured = run.job.needs & {"hessian", "ranges"}
        batches = run.batches if measured else run.batches[:1]
        super().__init__(run, {"hidden": run.streamed}, [*batches, run.probe])
        self._measured = bool(measured)
        self._gradients: dict[str, torch.Tensor] = {}
        if "gradients" in self.job.needs:
            readers = {channels.consumer: channels.count for block in self.job.units for channels in block}
            self._gradients = run.tensors_once(
                "sensitivities.safetensors", lambda: sensitivities(run.streamed, readers, run.batches, run.reporter)
            )

    @classmethod
    def complete(cls, plan: Plan, streamed: StreamedModel) -> Plan:
        """See `Removal.complete`."""
        plan = cls.complete_by_block(plan, streamed, partial(channels_of, count=plan.size.count))
        if not any(plan.units):
            raise RequestError(f"no layer of a {type(streamed.model).__name__} has such {plan.size.unit}")
        return plan

    def block(self, index: int) -> tuple[Tensors, Lines, str]:
        """See `Removal.block`; the block in memory is changed, so that it gives what the cut one will."""
        tensors, lines, kept = self.stored(self.whole.block_names(index)), Lines(), dict[str, torch.Tensor]()
        check_finite(tensors)
        width = self.job.width(index)
        for channels in self._in_order(index):
            name = channels.consumer
            statistics = self._statistics(index, channels)
            rank, notes = self._rank(index, channels, width, statistics)
            kept[name] = best(rank, width)
            weight = self._reader(channels)
            before, after, damping = self._without(channels, kept[name], statistics)
            weight.copy_(after.to(weight.dtype))
            lines.append(
                {
                    "name": name, "units": channels.count, "kept": width,
                    "error": _error(before, weight.to("cpu", torch.float32), statistics), "damping": damping,
                    **({"notes": notes} if notes else {}),
                }
            )  # fmt: skip
            tensors[f"{name}.weight"] = self.loaded(f"{name}.weight").to(tensors[f"{name}.weight"].dtype)
        cut = self._cut(index, kept)
        self.advance(index)
        return cut.all(tensors), lines, note_of(lines)

    def widths(self) -> list[int]:
        """As many channels in all as the job keeps, of each layer so many that the errors that layers make without the rest add up to the
        least.

        The error of a width is what the readers' outputs lose over the calibration sequences, as a share of the hidden state that they are
        added to: mean squared norms. It is measured once for a run and those that resume it.
        """
        return self.run.once("widths.json", self._choose_widths)

    # ---------------------------------------------------------------- one reader
    def _in_order(self, index: int) -> list[Channels]:
        """The readers in the order in which they run."""
        prefix = self.whole.block_prefix(index)
        found = {channels.consumer.removeprefix(prefix): channels for channels in self.job.units[index]}
        if len(found) < 2:
            return list(found.values())
        groups = find_groups(self.whole.blocks[index], lambda: self._run_row(index), found)
        return [found[name] for group in groups for name in group.members]

    def _reader(self, channels: Channels) -> torch.Tensor:
        """The reader's weight `[out, in]`, a view."""
        weight = self.loaded(f"{channels.consumer}.weight")
        return weight if channels.columns.dim == 1 else weight.T

    def _statistics(self, index: int, channels: Channels) -> Statistics | None:
        """Of what a reader is given, over all batches but the probe; None: nothing needs them."""
        if not self._measured:
            return None
        name, columns = channels.consumer, channels.columns.each * channels.count
        runs = forwards(self.whole, index, self.states["hidden"], self.batches[:-1])
        group = InputGroup([name.removeprefix(self.whole.block_prefix(index))], columns)
        (found,) = collect(self.whole.blocks[index], [group], runs, needs=self.job.needs)
        if not found.finite:
            raise CompressError(f"{name}: its calibration inputs hold NaN or Inf")
        if found.tokens == 0:
            raise CompressError(f"{name}: the calibration data never reached this layer")
        return found

    def _rank(
        self, index: int, channels: Channels, kept: int, statistics: Statistics | None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        # In whatever order a fused tensor holds the units, their sizes are compared in the likeliest.
        likeliest = next(layouts(channels, self.job.size.members))
        name = channels.consumer
        return self.rank(
            f"the units of {name}", channels.count, kept, index,
            columns=self._reader(channels).float().cpu(),
            weights=weights_of(likeliest, {part.name: self.loaded(part.name).cpu() for part in channels.slices}),
            statistics=None if statistics is None else statistics.to("cpu"), sensitivity=self._gradients.get(name),
        )  # fmt: skip

    def _without(
        self, channels: Channels, kept: torch.Tensor, statistics: Statistics | None
    ) -> tuple[torch.Tensor, torch.Tensor, float | None]:
        """The reader's weight `[out, in]`, float32; the one that takes its place, zero where units are removed and fitted elsewhere; and
        the damping of the fit, None without one."""
        settings = self.job.settings
        columns = channels.columns.index(kept, channels.count)
        before = self._reader(channels).to("cpu", torch.float32, copy=True)
        after, damping = torch.zeros_like(before), None
        if len(kept) == channels.count:
            return before, before.clone(), None
        if settings.reconstruct and statistics is not None and statistics.hessian is not None:
            after[:, columns], damping = refit(before, statistics.hessian.cpu(), columns, settings.damping)
        else:
            after[:, columns] = before[:, columns]
        return before, after, damping

    # ---------------------------------------------------------------- how fused tensors hold their units
    def _cut(self, index: int, kept: dict[str, torch.Tensor]) -> Cut:
        """The cut with the slices in that order in which the cut block gives what the block in memory does, whose readers are replaced."""
        found = self.job.units[index]
        if not found:
            return Cut()
        expected = self._run_row(index, copy.deepcopy(self.whole.blocks[index]).float())
        worst = float("inf")
        for chosen in ([next(layouts(channels, self.job.size.members)) for channels in found], found):
            cut = Cut((part, kept[channels.consumer]) for channels in chosen for part in channels.slices)
            try:
                given = self._run_row(index, self.cut_block(index, cut).float())
            except (RuntimeError, ValueError):  # shapes that do not go together
                continue
            worst = min(worst, relative(given, expected))
            if worst < TOLERANCE:
                return cut
        raise RequestError(
            f"{self.whole.block_prefix(index).removesuffix('.')} of a {type(self.whole.model).__name__} computes something else when its "
            f"{self.job.size.unit} are cut out (relative difference {worst:.1e}): they depend on each other or on other layers, and cannot "
            "be removed"
        )

    def _run_row(self, index: int, block: nn.Module | None = None) -> torch.Tensor:
        """A block over the first row of the calibration sequences; one that stands in for it, in float32."""
        return self.whole.run_block(index, *self.first_row(), None if block is None else torch.float32, block)

    # ---------------------------------------------------------------- widths that are found
    def _choose_widths(self) -> list[int]:
        job, depth = self.job, len(self.whole.blocks)
        choices = job.choices()
        asked, errors = candidates(choices, job.size.count), list[dict[int, float]]()

        def measure(index: int, states: HiddenStates) -> str:
            self.states["hidden"] = states
            lost = self._lost(index, asked)
            self.advance(index)
            squares = tokens = 0.0
            for number, (_, mask) in enumerate(self.batches):
                state = states.get(number)
                own = state if mask is None else state[mask.to(state.device)]
                squares += float(own.float().square().sum())
                tokens += own.numel() / own.shape[-1]
            errors.append({width: error * tokens / max(squares, 1e-30) for width, error in lost.items()})
            return f": {errors[-1][asked[0]]:.2e} with {asked[0]} {job.size.unit}"

        self.run.visit("errors by width", self.batches, measure)
        cut = [index for index in range(depth) if job.units[index]]  # others are as they are (experts)
        found = spread([errors[index] for index in cut], [*choices, job.size.count], job.kept * len(cut))
        chosen = dict(zip(cut, found, strict=True))
        return [chosen.get(index, job.size.count) for index in range(depth)]

    def _lost(self, index: int, widths: list[int]) -> dict[int, float]:
        """Of each width, mean squared norm of what the block's readers of channels lose; a block without such has none to lose."""
        lost = dict.fromkeys(widths, 0.0)
        for channels in self._in_order(index):
            statistics = self._statistics(index, channels)
            assert statistics is not None
            assert statistics.hessian is not None
            rank, _ = self._rank(index, channels, widths[0], statistics)  # those that go first, and then the next
            for width in widths:
                if width < channels.count:
                    before, after, _ = self._without(channels, best(rank, width), statistics)
                    lost[width] += energy(before - after, statistics.hessian.cpu())
        return lost


def _error(before: torch.Tensor, after: torch.Tensor, statistics: Statistics | None) -> float | None:
    """Relative squared error of the reader's output over the calibration inputs; None where there were none."""
    if statistics is None or statistics.hessian is None:
        return None
    moments = statistics.hessian.cpu()
    whole = energy(before, moments)
    return energy(before - after, moments) / whole if whole > 0 else 0.0
