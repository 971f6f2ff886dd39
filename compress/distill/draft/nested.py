"""Nested drafts: the first d layers, with the final norm and the head that all share, are a draft for each d of some depths.

S2D: Sorted Speculative Decoding (arXiv 2407.01955): trained with the sum of the losses of all depths, so that one set of weights serves
targets, and moments, that want drafts of different cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.distill.draft.student import Student, Sums, overlaps
from compress.distill.train.data import Batch
from compress.distill.train.losses import Objective, Targets
from runtime.errors import RequestError
from runtime.modeling.skeleton import find_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class NestedStudent(Student):
    """A draft that is trained at several depths at once.

    Args:
        draft: as of `Student`; its logits must be its head of its final norm.
        depths: ascending, the last is the draft's own number of layers.
        weights: of the depths' losses; None: 1 each.

    Raises:
        RequestError: depths that it does not have, or a model whose final norm cannot be told.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        depths: Sequence[int],
        objective: Objective | None = None,
        kept: torch.Tensor | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__(draft, objective, kept)
        layers = len(find_blocks(draft)[1])
        self.depths = list(depths)
        if not depths or self.depths != sorted(set(self.depths)) or self.depths[0] < 1 or self.depths[-1] != layers:
            raise RequestError(
                f"depths of a nested draft: ascending, from 1, the last {layers} (all its layers), not {list(depths)}"
            )
        self.shares = [1.0] * len(self.depths) if weights is None else [float(weight) for weight in weights]
        if len(self.shares) != len(self.depths) or min(self.shares) <= 0:
            raise RequestError(
                f"a nested draft of {len(self.depths)} depths needs as many weights above 0, not {weights}"
            )
        _check_norm(self)

    def forward(self, batch: Batch, targets: Targets | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Student.forward`, the losses of the depths weighted and summed."""
        losses = [self._loss(logits, batch, targets) for logits in self.by_depth(batch.ids).values()]
        total = torch.stack([share * loss for share, (loss, _) in zip(self.shares, losses, strict=True)]).sum()
        return total, losses[0][1]

    def by_depth(self, ids: torch.Tensor) -> dict[int, torch.Tensor]:
        """{depth: what the draft of so many layers would propose, `[b, s, width]`}, in one pass."""
        states = _states(self.draft, self.depths, ids)
        head: Any = self.draft.get_output_embeddings()
        norm = final_norm(self.draft)
        return {depth: self._own(head(norm(state))) for depth, state in states.items()}

    @torch.no_grad()
    def measure(self, batch: Batch, teacher: torch.Tensor) -> Sums:
        """As `Student.measure`; "acceptance" and "agreement" are means over the depths, "acceptance_depth_2", ... those of each."""
        result: dict[str, tuple[float, float]] = {}
        for depth, logits in self.by_depth(batch.ids).items():
            for name, (value, count) in overlaps(logits, teacher, batch.trained, self.kept).items():
                before = result.get(name, (0.0, 0.0))
                result[name] = (before[0] + value, before[1] + count)
                result[f"{name}_depth_{depth}"] = (value, count)
        return result

    def at(self, depth: int) -> DepthStudent:
        """The draft of so many layers by itself, to be measured."""
        return DepthStudent(self, depth)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "depths": self.depths, "weights": self.shares}


class DepthStudent(Student):
    """One depth of a nested draft."""

    def __init__(self, nested: NestedStudent, depth: int) -> None:
        super().__init__(nested.draft, nested.objective, nested.kept)
        if depth not in nested.depths:
            raise RequestError(f"the nested draft has the depths {nested.depths}, not {depth}")
        self.depth = depth

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        state = _states(self.draft, [self.depth], ids)[self.depth]
        head: Any = self.draft.get_output_embeddings()
        return self._own(head(final_norm(self.draft)(state)))


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm between the last layer and the head; RequestError where there is not just one that could be it."""
    decoder = _decoder(model)
    norms = [child for child in decoder.children() if "norm" in type(child).__name__.lower()]
    if len(norms) != 1:
        raise RequestError(f"a {type(model).__name__} has {len(norms)} final norms; a nested draft needs one")
    return norms[0]


def _decoder(model: PreTrainedModel) -> nn.Module:
    """The module whose child the list of layers is."""
    return model.get_submodule(find_blocks(model)[0].rpartition(".")[0])


def _states(model: PreTrainedModel, depths: Sequence[int], ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """{depth: hidden states after so many layers, before the final norm}, `[b, s, hidden]`."""
    states: dict[int, torch.Tensor] = {}
    blocks = find_blocks(model)[1]

    def keep(depth: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            states[depth] = output[0] if isinstance(output, (tuple, list)) else output

        return hook

    handles = [blocks[depth - 1].register_forward_hook(keep(depth)) for depth in depths]
    try:
        _decoder(model)(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return states


@torch.no_grad()
def _check_norm(student: NestedStudent) -> None:
    """Head and norm as we apply them must give the model's own logits (some families scale or cap them)."""
    ids = torch.arange(min(4, student.vocabulary), device=student.draft.device)[None]
    training = student.draft.training
    student.draft.eval()
    try:
        ours, own = student.by_depth(ids)[student.depths[-1]], student.logits(ids)
    finally:
        student.draft.train(training)
    if not torch.allclose(ours.float(), own.float(), atol=1e-3, rtol=1e-3):
        raise RequestError(
            f"a {type(student.draft).__name__} does more to its logits than norm and head; it cannot be nested"
        )
