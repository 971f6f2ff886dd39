"""Linear layers of a model with fewer dimensions are fitted to what the whole model's give, in the order they run; nothing is trained.

Each layer that reads or writes the hidden state has its weight replaced by the one whose outputs, over the inputs that the smaller model
gives it, come nearest to the whole model's outputs over its own inputs. The two models are streamed side by side, a block at a time, so
that layers also make up for what those before them have lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from compress.model.couplings import Slices
from compress.model.hidden_states import HiddenStates
from compress.model.input_statistics import InputGroup, find_groups
from compress.model.streamed import Batch, StreamedModel
from compress.prune.structure.cut_model import Cut
from compress.prune.structure.least_squares import nearest
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
        """Sums become means; CompressError where one is no number."""
        for value in (self.own, self.cross, self.theirs):
            value /= max(self.tokens, 1)
            if not bool(torch.isfinite(value).all()):
                raise CompressError(f"{name}: its calibration inputs hold NaN or Inf")


class Refit:
    """The two models and the text.

    Args:
        whole, smaller: with all that is in no block loaded. cut: how the one came of the other.
        damping: of the least squares, see `nearest`.
    """

    def __init__(
        self, whole: StreamedModel, smaller: StreamedModel, cut: Cut, batches: Sequence[Batch], damping: float
    ) -> None:
        self.whole, self.smaller, self.cut, self.batches, self.damping = whole, smaller, cut, batches, damping
        self._slices: dict[str, list[Slices]] = {}
        for part in cut.slices:
            self._slices.setdefault(part.name, []).append(part)

    @torch.inference_mode()
    def block(self, index: int, theirs: HiddenStates, ours: HiddenStates) -> list[dict[str, Any]]:
        """Fit the layers of a block, loaded in both models, given the states that enter it; returns a line for each."""
        prefix = self.smaller.block_prefix(index)
        small, big = self.smaller.blocks[index], self.whole.blocks[index]
        names = [
            name for name, module in small.named_modules() if isinstance(module, nn.Linear) and self._cut(prefix + name)
        ]

        def run(model: StreamedModel, states: HiddenStates, number: int) -> Callable[[], Any]:
            return lambda: model.run_block(index, states.get(number), self.batches[number])

        facts = []
        for group in find_groups(small, run(self.smaller, ours, 0), names):
            pairs = (
                (run(self.whole, theirs, number), run(self.smaller, ours, number), batch)
                for number, batch in enumerate(self.batches)
            )
            moments = self._moments(group, small, big, pairs, prefix)
            if moments is not None:
                facts += [
                    self._fit(small.get_submodule(name), big.get_submodule(name), prefix + name, moments)
                    for name in group.members
                ]
        return facts

    @torch.inference_mode()
    def head(self, theirs: HiddenStates, ours: HiddenStates) -> list[dict[str, Any]]:
        """Fit the head, where it is a layer of its own, given the states after the last block."""
        if self.smaller.kind == "encoder":
            return []
        head: Any = self.smaller.model.get_output_embeddings()
        name = next((n for n, module in self.smaller.model.named_modules() if module is head), "")
        shared = {n for pair in self.smaller.ties.items() for n in pair}
        if not isinstance(head, nn.Linear) or not self._cut(name) or f"{name}.weight" in shared:
            return []
        whole: Any = self.whole.model.get_output_embeddings()
        moments = Moments(whole.in_features, head.in_features, self.smaller.device)
        for number, (ids, mask) in enumerate(self.batches):
            one = self.whole.head_input(theirs.get(number).to(self.whole.device), ids)
            other = self.smaller.head_input(ours.get(number).to(self.smaller.device), ids)
            moments.add(one, other, mask)
        moments.finish(name)
        return [self._fit(head, whole, name, moments)]

    def _cut(self, name: str) -> bool:
        return f"{name}.weight" in self._slices

    def _moments(
        self,
        group: InputGroup,
        small: nn.Module,
        big: nn.Module,
        pairs: Iterator[tuple[Callable[[], Any], Callable[[], Any], Batch]],
        prefix: str,
    ) -> Moments | None:
        """Of what the layers of a group share; None: the two models send them different tokens (experts)."""
        name = group.members[0]
        moments: Moments | None = None
        for whole, smaller, (ids, mask) in pairs:
            one, other = _input(big, name, whole), _input(small, name, smaller)
            # Experts are handed those tokens alone that are sent to them, of which nobody knows here which they are.
            if one is None or other is None or one.shape[:-1] != other.shape[:-1]:
                return None
            if other.dim() == 2 and len(other) != ids.numel():
                return None
            moments = moments or Moments(one.shape[-1], other.shape[-1], other.device)
            moments.add(one, other, mask)
        if moments is not None:
            moments.finish(prefix + name)
        return moments

    def _fit(self, small: nn.Module, big: nn.Module, name: str, moments: Moments) -> dict[str, Any]:
        assert isinstance(small, nn.Linear)
        assert isinstance(big, nn.Linear)
        whole = big.weight.data.float()
        for part in self._slices[f"{name}.weight"]:
            if part.dim == 0:
                whole = part.cut(whole, self.cut.kept, self.cut.count)
        target = whole @ moments.cross
        weight, damping = nearest(small.weight.data.float().cpu(), moments.own.cpu(), target.cpu(), self.damping)
        weight = weight.to(small.weight)
        small.weight.data.copy_(weight)
        error = _error(weight.float(), whole, target, moments)
        return {"name": name, "units": self.cut.count, "kept": len(self.cut.kept), "error": error, "damping": damping}


def _error(weight: torch.Tensor, whole: torch.Tensor, target: torch.Tensor, moments: Moments) -> float:
    """Squared error of the outputs as a share of their squares: E |W x - W' x'|^2 / E |W x|^2."""
    size = float(((whole @ moments.theirs) * whole).sum())
    lost = size - 2 * float((weight * target).sum()) + float(((weight @ moments.own) * weight).sum())
    return max(lost, 0.0) / size if size > 0 else 0.0


class _SeenError(Exception):
    """Ends a forward pass once the input that was wanted has been seen."""


def _input(block: nn.Module, name: str, run: Callable[[], Any]) -> torch.Tensor | None:
    """What a layer of a block is given; None: it is not called."""
    with _listening(block.get_submodule(name)) as seen, suppress(_SeenError):
        run()
    return seen[0] if seen else None


@contextmanager
def _listening(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    seen: list[torch.Tensor] = []

    def hook(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen.append(args[0])
        raise _SeenError

    handle = module.register_forward_pre_hook(hook)
    try:
        yield seen
    finally:
        handle.remove()
