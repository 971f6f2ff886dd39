"""Removal of dimensions of the hidden state: the same ones of every tensor that has any, chosen once for the whole model.

Norms are corrected for the smaller root mean square, and linear layers fitted to what they gave before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from compress.model.checkpoint_writer import zeros
from compress.model.config_sizes import resized, size_of, with_wider_heads
from compress.model.couplings import changed, changed_shapes
from compress.model.source import SourceCheckpoint
from compress.model.streamed import StreamedModel
from compress.prune.structure.amount import skeleton_of
from compress.prune.structure.hidden_check import Comparison
from compress.prune.structure.hidden_norms import HiddenCut, find_norms, gain, measure
from compress.prune.structure.hidden_refit import Refit
from compress.prune.structure.removal import Lines, Pass, Plan, Removal, Tensors, best, note_of
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import CompressError, RequestError


class CutCheckpoint(SourceCheckpoint):
    """The tensors of the smaller model, cut out of the whole one's as they are read.

    Args:
        form: names, shapes and dtypes. whole: where they are cut out of.
    """

    def __init__(self, form: SourceCheckpoint, whole: Checkpoint, cut: HiddenCut) -> None:
        self.__dict__.update(form.__dict__)
        self._whole, self._cut = whole, cut

    def get(self, name: str) -> torch.Tensor:
        """One tensor; see `HiddenCut`."""
        return self._cut(name, self._whole.get(name))


class HiddenRemoval(Removal):
    """Cuts every part of the model, compares it with the whole one's, and fits its layers; the two are streamed side by side.

    Raises:
        RequestError: the model depends on its hidden size in a way that its shapes do not show. CompressError: weights or hidden states
            with NaN or Inf.
    """

    def __init__(self, run: Pass) -> None:
        job, whole, fitted = run.job, run.streamed, run.job.settings.reconstruct
        norms = find_norms(whole.model, job.slices)
        states, shares = measure(run, norms)
        smaller = StreamedModel(zeros_of(run), whole.device, dtype=whole.dtype)
        followed = {"ours": smaller, **({"theirs": whole} if fitted else {})}
        batches = [*run.batches, run.probe] if fitted else [run.probe]
        super().__init__(run, followed, batches, beside=[] if fitted else [whole])
        kept = best(self._ranked(states), job.kept)
        gains = {name: gain(own, kept) for name, own in shares.items()}
        self.cut = HiddenCut(job.slices, kept, job.size.count, norms, gains)
        smaller.checkpoint = CutCheckpoint(smaller.checkpoint, whole.checkpoint, self.cut)
        smaller.ties = dict(whole.ties)  # zeros are all alike, so the outline cannot say which are tied
        self.model = smaller
        self._refit = Refit(whole, smaller, self.cut, self.batches[:-1], job.settings.damping) if fitted else None
        whole.load_outside()
        self._comparison = Comparison(whole, smaller, self.cut, run.probe)
        self._comparison.settle_scales()
        extra = [name for name in whole.extra if name not in whole.checkpoint.dropped]
        self._left_out = [name for name in extra if job.size.count in whole.checkpoint.shape(name)]
        self._extra = [name for name in extra if name not in self._left_out]

    @classmethod
    def check(cls, streamed: StreamedModel) -> None:
        """RequestError where heads get narrower when the hidden state does: matrices of the layers would change along both sides."""
        whole = streamed.model
        if changed_shapes(whole, skeleton_of(with_wider_heads(streamed.config), streamed)):
            return  # the config says how wide they are
        half = size_of(streamed.config, "hidden").count // 2
        try:
            slices = changed(whole, skeleton_of(resized(streamed.config, "hidden", half), streamed), 2 * half, half)
            inside = [s.name for s in slices if streamed.is_inside(s.name)]
        except RequestError:  # so few dimensions are no whole heads
            inside = [""] * 2
        if len(set(inside)) < len(inside):
            raise RequestError(
                f"the heads of a {type(whole).__name__} are as wide as their share of the hidden size is, and its config cannot say that "
                "they stay as they are: dimensions of the hidden state cannot be removed alone"
            )

    @classmethod
    def complete(cls, plan: Plan, streamed: StreamedModel) -> Plan:
        """See `Removal.complete`; RequestError where something inside of a layer is a multiple as wide as the hidden state (Mamba's inner
        channels): it would be cut as if it were the hidden state."""
        plan = Removal.complete(plan, streamed)
        for part in plan.slices:
            if part.each > 1 and streamed.is_inside(part.name):
                raise RequestError(
                    f"{part.name} of a {type(streamed.model).__name__} has {part.each} values for each dimension of the hidden state, and "
                    "its config cannot say that they stay: dimensions of the hidden state cannot be removed alone"
                )
        return plan

    def block(self, index: int) -> tuple[Tensors, Lines, str]:
        """See `Removal.block`."""
        states = self.states["ours"]
        self._comparison.check_block(index, states.get(len(self.batches) - 1).to(self.model.device))
        lines = self._refit.block(index, self.states["theirs"], states) if self._refit is not None else []
        self.advance(index)
        return self._tensors(self.model.block_names(index), lines), lines, note_of(lines)

    def outside(self) -> tuple[Tensors, Lines]:
        """See `Removal.outside`."""
        lines = [] if self._refit is None else self._refit.head(self.states["theirs"], self.states["ours"])
        return self._tensors(self.model.outside_names(), lines) | self.stored(self._extra), lines

    def finish(self, lines: Lines) -> dict[str, Any]:
        """{"dimensions": those that stay, "gains": by what each norm's output is multiplied, "layers": a line for each layer that was
        fitted, "left_out": tensors that the model has no place for and that are as wide as it was}."""
        gains = dict(sorted(self.cut.gains.items()))
        return {"dimensions": self.cut.kept.tolist(), "gains": gains, "layers": lines, "left_out": self._left_out}

    def _tensors(self, names: Iterable[str], lines: Lines) -> Tensors:
        """Tensors of the smaller model, those that were fitted as they are in memory."""
        found = {name: self.model.checkpoint.get(name) for name in names}
        for name in (f"{line['name']}.weight" for line in lines):
            found[name] = self.model.model.get_parameter(name).data.to(self.model.checkpoint.dtype(name))
        return found

    def _ranked(self, states: torch.Tensor | None) -> torch.Tensor:
        """Float32 `[dimensions]`, larger for what matters more."""
        job, checkpoint = self.job, self.whole.checkpoint
        if "states" in job.method.needs and states is None:
            raise CompressError(
                f"no linear layer of a {type(self.whole.model).__name__} reads the hidden state, so {job.method.name} cannot rank its "
                "dimensions"
            )
        # Of each stored tensor, one after the other, the norm of what each dimension has of it.
        stored = (part for part in job.slices if checkpoint.has(part.name))
        norms = (part.by_unit(checkpoint.get(part.name).float()).norm(dim=1, keepdim=True) for part in stored)
        return self.rank("the dimensions", job.size.count, job.kept, 0, weights=norms, states=states)[0]


def zeros_of(run: Pass) -> Checkpoint:
    """A checkpoint of zeros with the form of the smaller model."""
    directory = run.work / "outline"
    zeros(directory, run.streamed, run.job.config)
    return Checkpoint(directory)
