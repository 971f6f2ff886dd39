"""Least-squares refit of the linear layers of a model with fewer dimensions to the whole model's outputs; nothing is trained.

Each layer that reads or writes the hidden state has its weight replaced by the one whose outputs, over the inputs that the smaller model
gives it, come nearest to the whole model's outputs over its own inputs. The two models are streamed side by side, a block at a time, so
that layers also make up for what those before them have lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from compress.model.hidden_states import HiddenStates
from compress.model.input_statistics import find_groups
from compress.model.module_hooks import hooks
from compress.model.streamed import Batch, StreamedModel
from compress.prune.structure.hidden_norms import HiddenCut
from compress.prune.structure.least_squares import energy, nearest
from compress.prune.structure.removal import Lines
from runtime.errors import CompressError


class Moments:
    """Second moments of what a layer reads in the two models, mean over tokens, float32.

    Attributes:
        own: `[in', in']`, of the smaller model's. cross: `[in, in']`. theirs: `[in, in]`, of the whole model's.
        tokens: that were seen.
    """

    def __init__(self, whole: int, smaller: int, device: torch.device) -> None:
        self.own = torch.zeros(smaller, smaller, device=device)
        self.cross = torch.zeros(whole, smaller, device=device)
        self.theirs = torch.zeros(whole, whole, device=device)
        self.tokens = 0

    def add(self, whole: torch.Tensor, smaller: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Inputs of the same tokens `[..., in]` and `[..., in']`."""
        one, other = (x.reshape(-1, x.shape[-1]).float() for x in (whole, smaller))
        if mask is not None and mask.numel() == len(one):
            one, other = (x[mask.reshape(-1).to(x.device)] for x in (one, other))
        self.own.addmm_(other.T, other)
        self.cross.addmm_(one.T, other)
        self.theirs.addmm_(one.T, one)
        self.tokens += len(one)

    def finish(self, name: str) -> None:
        """Sums become means; CompressError where one is NaN or Inf."""
        for value in (self.own, self.cross, self.theirs):
            value /= max(self.tokens, 1)
            if not bool(torch.isfinite(value).all()):
                raise CompressError(f"{name}: its calibration inputs hold NaN or Inf")


class Refit:
    """Refit of the smaller model's layers over the calibration sequences.

    Args:
        whole, smaller: with everything outside of the blocks loaded. cut: that makes the smaller one.
        damping: of the least squares, see `nearest`.
    """

    def __init__(
        self, whole: StreamedModel, smaller: StreamedModel, cut: HiddenCut, batches: Sequence[Batch], damping: float
    ) -> None:
        self.whole, self.smaller, self.cut, self.batches, self.damping = whole, smaller, cut, batches, damping

    def block(self, index: int, theirs: HiddenStates, ours: HiddenStates) -> Lines:
        """Fit the layers of a block, loaded in both models, given the states that enter it; returns a line for each."""
        prefix, small = self.smaller.block_prefix(index), self.smaller.blocks[index]
        names = [name for name, module in small.named_modules() if self._is_cut(prefix + name, module)]

        def run(model: StreamedModel, states: HiddenStates, number: int) -> Any:
            return model.run_block(index, states.get(number), self.batches[number])

        groups = find_groups(small, lambda: run(self.smaller, ours, 0), names)
        return [
            line for group in groups for line in self._fit([prefix + name for name in group.members], run, theirs, ours)
        ]

    def head(self, theirs: HiddenStates, ours: HiddenStates) -> Lines:
        """Fit the head, where it is a layer of its own, given the states after the last block."""
        if self.smaller.kind == "encoder":
            return []
        head: Any = self.smaller.model.get_output_embeddings()
        name = next((n for n, module in self.smaller.model.named_modules() if module is head), "")
        shared = {n for pair in self.smaller.ties.items() for n in pair}
        if not self._is_cut(name, head) or f"{name}.weight" in shared:
            return []

        def run(model: StreamedModel, states: HiddenStates, number: int) -> Any:
            return model.outputs(states.get(number).to(model.device), self.batches[number][0])

        return self._fit([name], run, theirs, ours)

    def _is_cut(self, name: str, module: Any) -> bool:
        return isinstance(module, nn.Linear) and bool(self.cut.slices(f"{name}.weight"))

    def _fit(self, names: list[str], run: Callable[..., Any], theirs: HiddenStates, ours: HiddenStates) -> Lines:
        """Fit layers that share an input; none where the two models may send them different tokens (experts)."""
        moments: Moments | None = None
        for number, (ids, mask) in enumerate(self.batches):
            one, other = (
                _input(model.model.get_submodule(names[0]), partial(run, model, states, number))
                for model, states in ((self.whole, theirs), (self.smaller, ours))
            )
            # An expert reads only the tokens that are sent to it, and the two models may send it different ones.
            if one is None or other is None or one.shape[:-1] != other.shape[:-1]:
                return []
            if other.dim() == 2 and len(other) != ids.numel():
                return []
            moments = moments or Moments(one.shape[-1], other.shape[-1], other.device)
            moments.add(one, other, mask)
        if moments is None:
            return []
        moments.finish(names[0])
        return [self._replace(name, moments) for name in names]

    def _replace(self, name: str, moments: Moments) -> dict[str, Any]:
        small, whole = (model.model.get_parameter(f"{name}.weight").data for model in (self.smaller, self.whole))
        whole = whole.float()
        for part in self.cut.slices(f"{name}.weight"):
            if part.dim == 0:
                whole = part.cut(whole, self.cut.kept)
        target = whole @ moments.cross
        weight, damping = nearest(small.float().cpu(), moments.own.cpu(), target.cpu(), self.damping)
        small.copy_(weight)
        # Squared error of the outputs as a share of their squares: E |W x - W' x'|^2 / E |W x|^2.
        fitted, size = small.float(), energy(whole, moments.theirs)
        lost = size - 2 * float((fitted * target).sum()) + energy(fitted, moments.own)
        error = max(lost, 0.0) / size if size > 0 else 0.0
        return {"name": name, "units": self.cut.count, "kept": len(self.cut.kept), "error": error, "damping": damping}


class _SeenError(Exception):
    """Ends a forward pass once the wanted input has been seen."""


def _input(module: nn.Module, run: Callable[[], Any]) -> torch.Tensor | None:
    """The input of a layer; None: it is not called."""
    seen: list[torch.Tensor] = []

    def look(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen.append(args[0])
        raise _SeenError

    with hooks({module: look}, before=True), suppress(_SeenError):
        run()
    return seen[0] if seen else None
