"""Heads on a frozen target as they are trained: each token ahead is said out of the target's hidden states, through its own head.

Medusa-1 (arXiv 2401.10774): only the heads learn. They are trained on the target's own texts and towards its own distributions, so that
what it is compressed to is what they predict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional

from compress.distill.draft.checks import Prospect, RefusedError, check_ahead, plain_head
from compress.distill.draft.config import DraftConfig
from compress.distill.draft.features import Features
from compress.distill.draft.student import TensorStudent, round_trained
from compress.distill.draft.training import DraftTraining
from compress.distill.train.checkpoint import trained_weights
from compress.distill.train.data import Batch, TextRows
from compress.distill.train.losses import Targets
from compress.distill.train.teacher import Teacher, teacher_rows
from runtime.drafting.drafters.heads import KEPT, WEIGHTS

_RANKS = 8  # guesses of each head whose rates are measured


class HeadsConfig(DraftConfig):
    """Heads that read the artifact's own hidden states."""

    data: Literal["given", "teacher"] = Field(
        "teacher", description="What is trained on: the calibration text, or what the artifact writes after it."
    )
    quantize: Literal["none"] = Field("none", description="Heads are rounded where they run.")
    vocabulary: int | None = Field(
        None,
        ge=1,
        description="Tokens that the heads may propose, those that the artifact writes most (2506.22694, 2509.18362); none: all.",
    )
    decay: float = Field(
        0.8, gt=0, le=1, description="Weight of the loss of each further token, of that of the one before."
    )


def check_heads(config: HeadsConfig, target: Prospect) -> None:
    """See `DraftMethod.check`."""
    check_ahead(config)
    what = type(target.model).__name__
    if not hasattr(target.model.get_output_embeddings(), "in_features"):
        raise RefusedError("method", f"a {what} shows no head, which heads of this kind need")
    if plain_head(target.model) is False:
        raise RefusedError("method", f"a {what} does more to its logits than its head; heads cannot be trained on it")


def train_heads(
    training: DraftTraining, config: HeadsConfig, student: Callable[[Features, Any, torch.Tensor | None], HeadStudent]
) -> dict[str, Any]:
    """See `DraftMethod.make`.

    Args:
        student: the heads, of features of the target, the config and kept tokens. Its teacher reads the same features, computed once.
    """
    kept = training.kept(config.vocabulary)
    features = Features(training.teacher.source.engine, training.teacher)
    return replace(training, teacher=features.teacher).run(config, student(features, config, kept))


class HeadModel(nn.Module):
    """What is trained, as `Student.draft` is asked: a module with the config of its target."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        super().__init__()
        self.module, self.config = module, config

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next(self.parameters()).device


class HeadStudent(TensorStudent):
    """Heads that predict `levels` tokens from each hidden state.

    Anchors are as of `Student.proposals`: at anchor a the tokens up to a are known, and the states up to a - 1. Anchor 0 has no state
    before it; nothing is proposed there (all logits are 0), and it is not trained or measured.

    Attributes:
        features: of the target.
        levels: tokens ahead that are trained.
        decay: weight of the loss of each further token ahead, of that of the one before.
    """

    file = WEIGHTS
    head_weight: torch.Tensor
    head_bias: torch.Tensor | None

    def __init__(
        self, features: Features, module: nn.Module, config: HeadsConfig, kept: torch.Tensor | None = None
    ) -> None:
        super().__init__(HeadModel(module, features.config), config.objective(), kept)  # type: ignore[arg-type]
        self.features, self.levels, self.decay = features, config.tokens, config.decay
        weight, bias = features.parts.rows(self.kept)
        self.register_buffer("head_weight", weight.float(), persistent=False)
        self.register_buffer("head_bias", None if bias is None else bias.float(), persistent=False)

    @property
    def sizes(self) -> dict[str, int]:
        """Of the module, for draft.json."""
        raise NotImplementedError

    @property
    def content(self) -> dict[str, Any]:
        return {"vocabulary": self.vocabulary, "hidden": self.features.parts.hidden, "heads": self.sizes}

    def states(self, ids: torch.Tensor, length: int) -> Iterator[torch.Tensor]:
        """For each of `length` tokens ahead, j = 0, 1, ...: what the target's head reads, `[b, s - 1 - j, hidden]`, anchors from 1 on."""
        raise NotImplementedError

    def said(self, states: torch.Tensor) -> torch.Tensor:
        """Logits `[..., width]` of states `[..., hidden]`."""
        return functional.linear(states, self.head_weight, self.head_bias)

    def forward(self, batch: Batch, targets: Targets | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Student.forward`, the losses of the tokens ahead weighted and summed."""
        total, weights = self.head_weight.new_zeros(()), self.head_weight.new_zeros(())
        for ahead, states in enumerate(self.states(batch.ids, self.levels)):
            loss, count = self.loss(states, batch, targets, 1 + ahead, self.said)
            total, weights = total + self.decay**ahead * loss, weights + self.decay**ahead * count
        return total, weights

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return next(self.proposals(ids, 1))

    def proposals(self, ids: torch.Tensor, length: int) -> Iterator[torch.Tensor]:
        for states in self.states(ids, length):
            logits = self.said(states)
            yield torch.cat([torch.zeros_like(logits[:, :1]), logits], 1)

    def measured(self, ids: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, int]]:
        """As `Student.measured`, without anchor 0."""
        for ahead, states in enumerate(self.states(ids, self.levels)):
            yield str(ahead + 1), self.said(states), 1 + ahead

    def write(self, directory: Path, content: Mapping[str, Any], teacher: Teacher, held_out: TextRows) -> None:
        """As `Student.write`; with the rates of guesses on what the target writes after held-out prompts."""
        round_trained(self)
        prompt = max(1, held_out.length // 4)
        rows = teacher_rows(teacher, held_out.ids[:, :prompt], held_out.length - prompt)
        super().write(directory, {**content, "rates": rank_rates(self, rows, _RANKS)}, teacher, held_out)

    def tensors(self) -> dict[str, torch.Tensor]:
        """As `runtime.drafting.drafters.heads` describes and reads them."""
        module: Any = self.draft.module
        kept = {} if self.kept is None else {KEPT: self.kept.to(torch.int32)}
        return {**module.state_dict(), **dict(module.named_parameters()), **kept}

    def bytes_read(self, directory: Path, artifact: Path) -> float:
        """Each weight, and each of the target's head, is 8 bits where it runs."""
        return sum(weight.numel() for weight in trained_weights(self).values()) + self.head_weight.numel()

    def describe(self) -> dict[str, Any]:
        own = {"levels": self.levels, "decay": self.decay, "target": self.features.teacher.fingerprint}
        return super().describe() | own


@torch.no_grad()
def rank_rates(student: HeadStudent, rows: TextRows, width: int) -> list[list[float]]:
    """How often the token that the target wrote was the r-th likeliest of those foretold, by depth and rank: `[levels][width]`.

    A depth counts where the tokens before it were among the `width` likeliest of theirs, as only then a tree gets there.

    Args:
        rows: written by the target; trained positions count.
    """
    width = min(width, student.width)
    right = torch.zeros(student.levels, width, dtype=torch.float64)
    seen = torch.zeros(student.levels, dtype=torch.float64)
    for part in rows.parts(4):
        ids, trained = (value.to(student.head_weight.device) for value in part)
        alive = None
        for ahead, states in enumerate(student.states(ids, student.levels)):
            tokens = student.said(states).topk(width, -1).indices
            tokens = tokens if student.kept is None else student.kept[tokens]
            places = states.shape[1] - (student.levels - 1 - ahead)  # anchors that all levels have
            hit = (tokens == ids.roll(-1, 1)[:, 1 + ahead :, None])[:, :places]
            if alive is None:
                alive = torch.stack([trained[:, 1 + j : 1 + j + places] for j in range(student.levels)]).all(0)
            seen[ahead] += alive.sum().cpu()
            right[ahead] += (hit & alive[..., None]).sum((0, 1)).double().cpu()
            alive = alive & hit.any(-1)
    return (right / seen.clamp_min(1)[:, None]).tolist()
