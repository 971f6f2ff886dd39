"""PARD: a draft that proposes K tokens in one pass, the tokens so far followed by K - 1 mask tokens (arXiv 2504.18583).

The text is read once, and behind it stand the masks of many anchors: mask j of anchor a is at position a + j, sees the text up to a and
the masks 1 to j of its own anchor, and predicts token a + j + 1. That is the pass a draft makes when only the tokens up to a are known,
for all anchors at once. Conditional drop-token training keeps, of each further mask, only some anchors, which had all masks before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field

from compress.distill.draft.checks import Prospect, RefusedError, check_ahead, check_cut
from compress.distill.draft.config import CutConfig
from compress.distill.draft.student import Student
from compress.distill.draft.training import DraftMethod, DraftTraining
from compress.distill.train.data import Batch, mix
from compress.distill.train.losses import Targets

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PardConfig(CutConfig):
    """A draft that learns to read mask tokens in the place of what it has not written yet, so that one pass proposes all tokens.

    Without a token of its own in the tokenizer the mask is the one that the calibration text has least often.
    """

    method: Literal["pard"] = Field("pard", description="Name of the method.")
    data: Literal["given", "teacher"] = Field(
        "teacher", description="What is trained on: the calibration text, or what the artifact writes after it."
    )
    divergence: Literal["forward_kl", "reverse_kl", "js", "tvd", "cross_entropy"] = Field(
        "cross_entropy", description="What is made small; further tokens have no teacher but the text."
    )
    mask_token: int | None = Field(None, ge=0, description="Token that stands for one not known yet; none: the rarest.")
    keep: float = Field(0.7, gt=0, le=1, description="Share of places that each further mask keeps in training.")


@dataclass(frozen=True)
class Layout:
    """Rows with their masks behind them, S places each.

    Attributes:
        ids: int64 `[b, S]`: the text, then the masks 1 of all anchors, then the masks 2, ...
        positions: int64 `[b, S]`, position ids: a place's in the text, or where its mask stands in for a token.
        anchors: int64 `[b, S]`: the last token that is known there.
        levels: int64 `[S]`: 0 in the text, j at masks j.
        allowed: bool `[b, 1, S, S]`: the place of the row sees that of the column.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    anchors: torch.Tensor
    levels: torch.Tensor
    allowed: torch.Tensor


def layout(ids: torch.Tensor, anchors: Sequence[torch.Tensor], mask_token: int) -> Layout:
    """Put masks behind rows.

    Args:
        ids: int64 `[b, s]`.
        anchors: for each mask j = 1, 2, ...: int64 `[b, n_j]`, distinct within a row, each among those of mask j - 1.
        mask_token: id of all masks.
    """
    batch, length = ids.shape
    text = torch.arange(length, device=ids.device).expand(batch, length)
    known = torch.cat([text, *anchors], 1)
    sizes = [length, *(part.shape[1] for part in anchors)]
    levels = torch.repeat_interleave(
        torch.arange(len(sizes), device=ids.device), torch.tensor(sizes, device=ids.device)
    )
    masks = torch.full((batch, sum(sizes) - length), mask_token, dtype=ids.dtype, device=ids.device)
    # A key of the text is seen from anchors at or after it; a mask from masks of its own anchor, up to itself.
    text_key = levels[None, :] == 0
    own = (known[:, :, None] == known[:, None, :]) & (levels[:, None] >= levels[None, :])
    before = known[:, :, None] >= known[:, None, :]
    allowed = torch.where(text_key, before, own)
    return Layout(torch.cat([ids, masks], 1), known + levels, known, levels, allowed[:, None])


def dropped(length: int, tokens: int, keep: float, least: float, seeds: Sequence[int]) -> list[torch.Tensor]:
    """The anchors that conditional drop-token training keeps.

    Mask j keeps a share of max(keep^j, least) of the anchors, drawn from those that mask j - 1 kept, so that all that a mask sees is
    there. Anchors are those with all `tokens` tokens after them.

    Args:
        length: tokens of a row, more than `tokens`.
        tokens: drafted in a pass, the first of them by the text's last token itself.
        keep, least: shares in (0, 1] and [0, 1].
        seeds: one a row.

    Returns:
        For each mask 1 to tokens - 1: int64 `[b, n_j]`, ascending in each row.
    """
    count = length - tokens
    sizes = [max(1, round(count * max(keep**ahead, least))) for ahead in range(1, tokens)]
    order = torch.stack(
        [torch.randperm(count, generator=torch.Generator().manual_seed(mix(seed, 3))) for seed in seeds]
    )
    # The first of one random order: the anchors of a mask are among those of the mask before.
    return [order[:, :size].sort(1).values for size in sizes]


def no_masks(draft: PreTrainedModel) -> str | None:
    """Why a model's attention cannot have the masks of a `Layout`; None: it can. Weights are not looked at."""
    config: Any = draft.config.get_text_config(decoder=True)
    attention = getattr(config, "_attn_implementation", None)
    if attention not in ("sdpa", "eager"):
        return f"a parallel draft needs sdpa or eager attention, not {attention}"
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return "a parallel draft needs full attention in all its layers"
    return None


class ParallelStudent(Student):
    """A draft that learns to propose several tokens in one pass.

    Args:
        draft: as of `Student`; its layers have full attention, computed by "sdpa" or "eager" (`no_masks`).
        mask_token: id that stands for a token not known yet, one that sequences do not have; its embedding is trained.
        least: see `dropped`.
    """

    one_pass = True

    def __init__(
        self,
        draft: PreTrainedModel,
        mask_token: int,
        config: PardConfig,
        kept: torch.Tensor | None = None,
        least: float = 0.2,
    ) -> None:
        super().__init__(draft, config.objective(), kept)
        text: Any = draft.config.get_text_config(decoder=True)
        self._attention = text._attn_implementation
        self.mask_token, self.levels, self.keep, self.least = mask_token, max(2, config.tokens), config.keep, least

    def forward(self, batch: Batch, targets: Targets | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Student.forward`; every token ahead counts equally, however many of its masks were kept."""
        length = batch.ids.shape[1]
        anchors = dropped(length, self.levels, self.keep, self.least, batch.seeds.tolist())
        placed = layout(batch.ids, [part.to(batch.ids.device) for part in anchors], self.mask_token)
        logits = self._placed_logits(placed)
        at = placed.anchors + placed.levels  # the place in the text whose prediction this is
        labels, trained = self.labels(batch.ids.roll(-1, 1).gather(1, at), batch.trained.gather(1, at))
        row, place = trained.nonzero(as_tuple=True)
        chosen = None if targets is None else self.restricted(targets[row, at[row, place]])
        losses = self.objective(logits[row, place], chosen, labels[row, place])
        sizes = torch.bincount(placed.levels)
        weights = (length / sizes)[placed.levels[place]].to(losses.dtype)
        return (losses * weights).sum(), weights.sum()

    def proposals(self, ids: torch.Tensor, length: int) -> Iterator[torch.Tensor]:
        """As `Student.proposals`, each anchor's tokens out of one pass; at most as many as it was trained for."""
        batch, size = ids.shape
        anchors = [torch.arange(size - ahead, device=ids.device).expand(batch, -1) for ahead in range(1, length)]
        placed = layout(ids, anchors, self.mask_token)
        logits = self._placed_logits(placed)
        for ahead in range(length):
            yield logits[:, placed.levels == ahead]

    @property
    def content(self) -> dict[str, Any]:
        return {"parallel": {"mask_token": self.mask_token, "tokens": self.levels}}

    def describe(self) -> dict[str, Any]:
        return super().describe() | self.content | {"keep": self.keep, "least": self.least}

    def _placed_logits(self, placed: Layout) -> torch.Tensor:
        allowed = placed.allowed
        if self._attention == "eager":  # which adds its mask
            lowest = torch.finfo(self.draft.dtype).min
            allowed = torch.zeros_like(allowed, dtype=self.draft.dtype).masked_fill(~allowed, lowest)
        output = self.draft(
            input_ids=placed.ids, attention_mask=allowed, position_ids=placed.positions, use_cache=False
        )
        return self._own(output.logits)


def make(training: DraftTraining, config: PardConfig) -> dict[str, Any]:
    """See `DraftMethod.make`."""
    draft = training.cut(config)
    mask = config.mask_token
    if mask is None:
        mask = int(training.split()[0].flatten().bincount(minlength=training.teacher.vocabulary).argmin())
    kept = training.kept(config.vocabulary)
    return training.run(config, ParallelStudent(draft, mask, config, kept))


def check(config: PardConfig, target: Prospect) -> None:
    """See `DraftMethod.check`."""
    check_ahead(config)
    draft = check_cut(config, target)
    if config.mask_token is not None and config.mask_token >= target.vocabulary:
        raise RefusedError("mask_token", f"ids are below {target.vocabulary}, not {config.mask_token}")
    reason = no_masks(draft)
    if reason is not None:
        raise RefusedError("method", reason)


METHOD = DraftMethod(
    name="pard",
    config=PardConfig,
    summary="a few layers of the artifact that propose several tokens in one pass",
    paper="An et al., PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation, 2025, arXiv 2504.18583",
    make=make,
    check=check,
)
