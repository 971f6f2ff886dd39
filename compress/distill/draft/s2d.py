"""S2D: one draft whose first d layers, under the same norm and head, are a draft for each d of some depths (arXiv 2407.01955).

It is trained with the sum of the losses of all depths, so that one set of weights serves targets, and moments, that want drafts of
different cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field

from compress.distill.draft.checks import Prospect, RefusedError, check_cut, plain_head, refused
from compress.distill.draft.config import CutConfig
from compress.distill.draft.cut import decoder_of, final_norm
from compress.distill.draft.student import Student
from compress.distill.draft.training import DraftMethod, DraftTraining
from compress.distill.train.data import Batch
from compress.distill.train.losses import Objective, Targets
from compress.model.module_hooks import block_outputs, evaluating
from runtime.errors import RequestError
from runtime.modeling.skeleton import find_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class S2DConfig(CutConfig):
    """A draft that is trained at several depths at once, under one norm and head: where its shallow part is sure of a token the others
    are not computed, and one draft serves targets of several sizes."""

    method: Literal["s2d"] = Field("s2d", description="Name of the method.")
    depths: list[int] | None = Field(
        None,
        description="Numbers of the draft's first layers that draft by themselves; its own depth is always one. None: every number.",
    )


class NestedStudent(Student):
    """A draft that is trained at several depths at once.

    Args:
        draft: as of `Student`; its logits must be its head of its final norm.
        depths: ascending, the last is the draft's own number of layers.

    Raises:
        RequestError: a model whose final norm cannot be told, or that does more to its logits.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        depths: Sequence[int],
        objective: Objective | None = None,
        kept: torch.Tensor | None = None,
    ) -> None:
        super().__init__(draft, objective, kept)
        self.depths = list(depths)
        _check_norm(self)

    def forward(self, batch: Batch, targets: Targets | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Student.forward`, the losses of the depths summed."""
        losses = [self.loss(logits, batch, targets) for logits in self.by_depth(batch.ids, self.depths).values()]
        return torch.stack([loss for loss, _ in losses]).sum(), losses[0][1]

    def by_depth(self, ids: torch.Tensor, depths: Sequence[int]) -> dict[int, torch.Tensor]:
        """{depth: what the draft of so many layers would propose, `[b, s, width]`}, in one pass."""
        blocks = find_blocks(self.draft)[1]
        with block_outputs([blocks[depth - 1] for depth in depths]) as states:
            decoder_of(self.draft)(input_ids=ids, use_cache=False)
        head: Any = self.draft.get_output_embeddings()
        norm = final_norm(self.draft)
        return {depth: self._own(head(norm(state))) for depth, state in zip(depths, states, strict=True)}

    def measured(self, ids: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, int]]:
        """As `Student.measured`; of each depth, named "depth_2", ..."""
        for depth, logits in self.by_depth(ids, self.depths).items():
            yield f"depth_{depth}", logits, 0

    def variants(self) -> dict[str, Student]:
        """The drafts of each depth by themselves, to be measured."""
        return {str(depth): DepthStudent(self, depth) for depth in self.depths}

    @property
    def content(self) -> dict[str, Any]:
        return {"depths": self.depths}

    def describe(self) -> dict[str, Any]:
        return super().describe() | self.content


class DepthStudent(Student):
    """One depth of a nested draft."""

    def __init__(self, nested: NestedStudent, depth: int) -> None:
        super().__init__(nested.draft, nested.objective, nested.kept)
        self._nested, self.depth = (nested,), depth  # a tuple: it is no part of this module

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self._nested[0].by_depth(ids, [self.depth])[self.depth]


@torch.no_grad()
def _check_norm(student: NestedStudent) -> None:
    """Head and norm as we apply them must give the model's own logits (some families scale or cap them)."""
    ids = torch.arange(min(4, student.vocabulary), device=student.draft.device)[None]
    with evaluating(student.draft):
        ours, own = student.by_depth(ids, student.depths[-1:])[student.depths[-1]], student.logits(ids)
    if not torch.allclose(ours.float(), own.float(), atol=1e-3, rtol=1e-3):
        text = f"a {type(student.draft).__name__} does more to its logits than norm and head; it cannot be nested"
        raise RequestError(text)


def make(training: DraftTraining, config: S2DConfig) -> dict[str, Any]:
    """See `DraftMethod.make`."""
    draft = training.cut(config)
    layers = int(draft.config.num_hidden_layers)
    depths = sorted({*(config.depths or range(1, layers + 1)), layers})
    training.facts["depths"] = depths
    return training.run(config, NestedStudent(draft, depths, config.objective(), training.kept(config.vocabulary)))


def check(config: S2DConfig, target: Prospect) -> None:
    """See `DraftMethod.check`."""
    draft = check_cut(config, target)
    layers = len(find_blocks(draft)[1])
    if config.depths is not None and any(not 1 <= depth <= layers for depth in config.depths):
        raise RefusedError("depths", f"1 to {layers}, the draft's own layers, not {config.depths}")
    with refused("method"):
        final_norm(draft)
    if plain_head(draft) is False:
        text = f"a {type(draft).__name__} does more to its logits than norm and head; it cannot be nested"
        raise RefusedError("method", text)


METHOD = DraftMethod(
    name="s2d",
    config=S2DConfig,
    summary="a draft that is one at several depths, and goes no deeper than it must",
    paper="Kavehzadeh et al., S2D: Sorted Speculative Decoding, 2024, arXiv 2407.01955",
    make=make,
    check=check,
)
