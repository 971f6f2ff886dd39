"""Stage `permute`: channels of feed-forward networks in the order of what their readers see, offline (TP-Aware Dequantization).

GPTQ rounds best where columns of much activation energy come first, and share scales with their like ("act-order"). Columns that are
sorted for one layer alone are scattered over its groups, so that engines gather inputs, and ranks of tensor parallelism exchange them.
Here the channels between two layers are renumbered instead: the columns of the reader, and the rows and biases of all that makes the
channels. The model computes what it did; groups of the reader are of alike channels and lie one after another, so any engine can
cut them among ranks. (Hoque et al., TP-Aware Dequantization, 2024, arXiv 2402.04925.)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from compress.core.memory_bounds import Bounds
from compress.core.method import Method
from compress.core.progress import Reporter
from compress.core.tensors import relative
from compress.model.check_model import check_streams
from compress.model.config_sizes import resized, size_of
from compress.model.context import Context
from compress.model.couplings import Channels, changed, channels_of, layouts
from compress.model.footprint import Footprint, ModelSize, Rows, Speed, tokens
from compress.model.input_statistics import InputGroup, collect, forwards
from compress.model.rewrite import Lines, Pass, Rewrite, Tensors
from compress.model.stage import Job, StageRoom, Store
from compress.prune.structure.amount import skeleton_of
from compress.recipe.stages import Stage
from compress.report.elements import section, table
from runtime.errors import CompressError, RequestError
from runtime.modeling.skeleton import set_tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Relative difference of a block's output, in float64, beyond which its channels are not those that were renumbered.
TOLERANCE = 1e-9


class PermuteConfig(BaseModel):
    """Renumber the channels of feed-forward networks, largest activation energy first: the same function, alike columns in a group."""

    model_config = ConfigDict(extra="forbid")

    method: Literal["activation"] = Field(
        "activation", description="By mean square of the channels over calibration text."
    )


METHOD = Method(
    "activation",
    PermuteConfig,
    "renumbers the channels of feed-forward networks by activation energy",
    "Hoque et al., TP-Aware Dequantization, 2024, arXiv 2402.04925",
    needs=frozenset({"ranges"}),
)


@dataclass(frozen=True)
class PermuteJob(Job):
    """A permutation that has been checked against its model.

    Attributes:
        config: of the model, which stays. whole: the model, in numbers. units: channels of each block.
    """

    config: PretrainedConfig
    whole: ModelSize
    units: tuple[tuple[Channels, ...], ...]

    @property
    def needs(self) -> set[str]:
        """Ranges of what the readers are given."""
        return {"ranges"}

    @property
    def stored(self) -> int:
        """See `Job.stored`."""
        return self.whole.stored

    def footprint(self, context: Context, rows: Rows, bounds: Bounds, speed: Speed) -> Footprint:
        """A block, two copies of it in float64, and the hidden states of the calibration text."""
        whole, states = self.whole, self.whole.states(rows)
        needed = whole.itemsize * (whole.outside + whole.block) + 16 * whole.block + whole.forward(rows)
        on_cpu = context.streamed.device.type == "cpu"
        return Footprint(
            memory=needed if on_cpu else 0, device=0 if on_cpu else needed, states=states, disk=3 * states,
            seconds=4.0 * whole.inside * tokens(rows) / speed.single,
            advice="its largest block needs that much; use a machine with more",
        )  # fmt: skip

    def run(self, context: Context, store: Store, reporter: Reporter) -> dict[str, Any]:
        """Write the permuted checkpoint.

        Returns:
            "permute" (the method), "channels" of a block, and "orders": {reader: the former number of each of its columns}.

        Raises:
            RequestError: a block computes something else when its channels are renumbered.
        """
        job = prepare(context, self.stage)  # how wide an earlier stage would leave the layers was not known before
        streamed, probe = context.streamed, (context.probe, None)
        run = Pass(job, streamed, context.batches, probe, store.output, store.work, store.spill, reporter)
        with context.recipe.origin.located(self.stage.path):
            return {"permute": self.stage.method, **PermutedCheckpoint(run).write()}


class PermutedCheckpoint(Rewrite[PermuteJob]):
    """Writer of the same model with other numbers for its channels: bit for bit the same weights, in another order."""

    def __init__(self, run: Pass[PermuteJob]) -> None:
        super().__init__(run, {"hidden": run.streamed}, [*run.batches, run.probe])

    def block(self, index: int) -> tuple[Tensors, Lines, str]:
        """See `Rewrite.block`."""
        tensors = self.stored(self.whole.block_names(index))
        lines: Lines = []
        for channels in self.job.units[index]:
            order = self._energies(index, channels).argsort(descending=True, stable=True).cpu()
            chosen = self._layout(index, channels, order)
            for part in chosen.slices:
                tensors[part.name] = part.cut(tensors[part.name], order)
            lines.append({"name": channels.consumer, "order": order.tolist()})
        self.advance(index)
        return tensors, lines, f"{len(lines)} readers of channels"

    def finish(self, lines: Lines) -> dict[str, Any]:
        """See `PermuteJob.run`."""
        return {
            "channels": max((len(line["order"]) for line in lines), default=0),
            "orders": {line["name"]: line["order"] for line in lines},
        }

    def _energies(self, index: int, channels: Channels) -> torch.Tensor:
        """Mean square of each channel over the calibration text."""
        name, block = channels.consumer, self.whole.blocks[index]
        group = InputGroup([name.removeprefix(self.whole.block_prefix(index))], channels.count)
        runs = forwards(self.whole, index, self.states["hidden"], self.batches[:-1])
        (found,) = collect(block, [group], runs, needs=())
        if not found.finite or not found.tokens:
            raise CompressError(f"{name}: its calibration inputs hold NaN or Inf, or there are none")
        return found.square_mean

    def _layout(self, index: int, channels: Channels, order: torch.Tensor) -> Channels:
        """The channels with the layout of fused tensors in which the block computes what it did."""
        whole, prefix = self.whole, self.whole.block_prefix(index)
        ids, state = self.run.probe[0], self.states["hidden"].get(len(self.batches) - 1).to(whole.device)
        compute = partial(whole.run_block, index, state, (ids, None), torch.float64)
        expected, worst = compute(copy.deepcopy(whole.blocks[index]).double()), float("inf")
        for chosen in layouts(channels, 1):
            made = copy.deepcopy(whole.blocks[index]).double()
            for part in chosen.slices:
                set_tensor(made, part.name.removeprefix(prefix), part.cut(self.loaded(part.name).double(), order))
            worst = min(worst, relative(compute(made), expected))
            if worst < TOLERANCE:
                return chosen
        raise RequestError(
            f"{channels.consumer} of a {type(whole.model).__name__} computes something else when its channels are renumbered (relative "
            f"difference {worst:.1e})"
        )


def prepare(context: Context, stage: Stage) -> PermuteJob:
    """The stage, checked.

    Raises:
        RequestError: with file and line, where the model has no channels that can be renumbered.
    """
    streamed = context.streamed
    with context.recipe.origin.located(stage.path):
        check_streams(streamed)
        size = size_of(streamed.config, "ffn")
        fewer = resized(streamed.config, "ffn", max(size.count // 2, size.least))
        kept = size_of(fewer, "ffn").count
        slices = changed(streamed.model, skeleton_of(fewer, streamed), size.count, kept)
        prefixes = map(streamed.block_prefix, range(len(streamed.blocks)))
        try:
            units = tuple(channels_of(streamed.model, slices, prefix, size.count) for prefix in prefixes)
        except RequestError as error:  # routed experts in one tensor
            kind = type(streamed.model).__name__
            raise RequestError(f"the channels of a {kind} cannot be renumbered: {error}") from None
    return PermuteJob(stage, streamed.config, ModelSize.of(streamed), units)


class Permute(StageRoom):
    """The stage `permute`."""

    name = "permute"
    summary = "renumber channels: the same function, alike columns in a group, no gather between ranks"

    def methods(self) -> Mapping[str, Any]:
        """The one there is."""
        return {METHOD.name: METHOD}

    def changes(self, stage: Stage) -> bool:
        """The function stays."""
        return False

    def check(self, context: Context, stage: Stage) -> PermuteJob:
        """See `prepare`."""
        return prepare(context, stage)

    def row(self, record: Mapping[str, Any]) -> tuple[str, str, str, str]:
        """How many layers, and by what."""
        return _what(record), "", "", f"{record['channels']:,} channels each"

    def report(self, manifest: Mapping[str, Any]) -> str:
        """What was renumbered."""
        passes = [made for made in manifest.get("passes") or [] if self.name in made]
        if not passes:
            return ""
        rows = [[_what(made), f"{made['channels']:,}"] for made in passes]
        return section("What was renumbered", table(("channels", "of each layer>"), rows))


def _what(record: Mapping[str, Any]) -> str:
    """ "channels of 4 layers by activation"."""
    return f"channels of {len(record['orders'])} layers by {record['permute']}"


STAGE = Permute()
