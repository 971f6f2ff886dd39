"""Heads on a frozen target as they are trained: each token ahead is said out of the target's hidden states, through its own head.

Medusa-1 (arXiv 2401.10774): only the heads learn. They are trained on the target's own texts and towards its own distributions, so that
what it is compressed to is what they foretell.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from compress.distill.draft.features import Features
from compress.distill.draft.student import Student, Sums, overlaps
from compress.distill.train.data import Batch, TextRows
from compress.distill.train.losses import Objective, Targets
from runtime.drafting.drafters.medusa import MedusaHeads
from runtime.errors import RequestError


class HeadModel(nn.Module):
    """What is trained, as `Student.draft` is asked: a module with the config of its target."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        super().__init__()
        self.module, self.config = module, config

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next(self.parameters()).device


class HeadStudent(Student):
    """Heads that foretell `levels` tokens from each hidden state.

    Anchors are as of `Student.proposals`: at anchor a the tokens up to a are known, and the states up to a - 1. Anchor 0 has no state
    before it; nothing is proposed there (all logits are 0), and it is not trained or measured.

    Attributes:
        features: of the target.
        levels: tokens ahead that are trained.
        decay: weight of the loss of each further token ahead, of that of the one before.
    """

    head_weight: torch.Tensor
    head_bias: torch.Tensor | None

    def __init__(
        self,
        features: Features,
        module: nn.Module,
        levels: int,
        objective: Objective | None = None,
        kept: torch.Tensor | None = None,
        decay: float = 0.8,
    ) -> None:
        super().__init__(HeadModel(module, features.config), objective, kept)  # type: ignore[arg-type]
        if levels < 1:
            raise RequestError(f"heads must foretell at least 1 token, not {levels}")
        if not 0 < decay <= 1:
            raise RequestError(f"the weight of a further token must be above 0 and at most 1, not {decay}")
        self.features, self.levels, self.decay = features, levels, decay
        weight, bias = features.parts.rows(self.kept)
        self.register_buffer("head_weight", weight.float(), persistent=False)
        self.register_buffer("head_bias", None if bias is None else bias.float(), persistent=False)

    @property
    def sizes(self) -> dict[str, int]:
        """Of the module, for draft.json."""
        raise NotImplementedError

    def states(self, ids: torch.Tensor, length: int) -> Iterator[torch.Tensor]:
        """For each of `length` tokens ahead, j = 0, 1, ...: what the target's head reads, `[b, s - 1 - j, hidden]`, anchors from 1 on."""
        raise NotImplementedError

    def said(self, states: torch.Tensor) -> torch.Tensor:
        """Logits `[..., width]` of states `[..., hidden]`."""
        return functional.linear(states, self.head_weight, self.head_bias)

    def forward(self, batch: Batch, targets: Targets | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Student.forward`, the losses of the tokens ahead weighted and summed."""
        following = batch.ids.roll(-1, 1)
        total, weights = self.head_weight.new_zeros(()), self.head_weight.new_zeros(())
        for ahead, states in enumerate(self.states(batch.ids, self.levels)):
            trained, labels = batch.trained[:, 1 + ahead :], following[:, 1 + ahead :]
            if self.kept is not None and not self.objective.needs_teacher:
                labels, known = self._renamed(labels)
                trained = trained & known
            chosen = None if targets is None else self._restricted(targets[:, 1 + ahead :][trained])
            losses = self.objective(self.said(states[trained]), chosen, labels[trained])
            total = total + self.decay**ahead * losses.sum()
            weights = weights + self.decay**ahead * trained.sum()
        return total, weights

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return next(self.proposals(ids, 1))

    def proposals(self, ids: torch.Tensor, length: int) -> Iterator[torch.Tensor]:
        for states in self.states(ids, length):
            logits = self.said(states)
            yield torch.cat([torch.zeros_like(logits[:, :1]), logits], 1)

    @torch.no_grad()
    def measure(self, batch: Batch, teacher: torch.Tensor) -> Sums:
        """As `Student.measure`, without anchor 0."""
        result: dict[str, tuple[float, float]] = {}
        for ahead, states in enumerate(self.states(batch.ids, self.levels)):
            first = 1 + ahead
            found = overlaps(self.said(states), teacher[:, first:], batch.trained[:, first:], self.kept)
            for name, (value, count) in found.items():
                before = result.get(name, (0.0, 0.0))
                result[name] = (before[0] + value, before[1] + count)
                result[f"{name}_{ahead + 1}"] = (value, count)
        return result

    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "levels": self.levels,
            "decay": self.decay,
            "target": self.features.teacher.fingerprint,
        }


class MedusaStudent(HeadStudent):
    """Medusa heads, which at first all say what the target says next.

    Args:
        features: of the target.
        heads: tokens ahead.
        blocks: residual blocks of each.
        objective, kept, decay: as of `HeadStudent`; the paper weights head k by 0.8^k.
    """

    one_pass = True

    def __init__(
        self,
        features: Features,
        heads: int = 3,
        blocks: int = 1,
        objective: Objective | None = None,
        kept: torch.Tensor | None = None,
        decay: float = 0.8,
    ) -> None:
        self_heads = MedusaHeads(features.parts.hidden, heads, blocks)
        self_heads.begin()
        super().__init__(features, self_heads, heads, objective, kept, decay)
        self.blocks = blocks

    @property
    def sizes(self) -> dict[str, int]:
        return {"count": self.levels, "blocks": self.blocks}

    def states(self, ids: torch.Tensor, length: int) -> Iterator[torch.Tensor]:
        if length > self.levels:
            raise RequestError(f"there are {self.levels} heads; they cannot propose {length} tokens")
        hidden = self.features.hidden(ids)
        module: Any = self.draft.module
        for ahead, head in enumerate(module.heads[:length]):
            yield head(hidden[:, : hidden.shape[1] - 1 - ahead])


@torch.no_grad()
def rank_rates(student: HeadStudent, rows: TextRows, width: int = 8, batch: int = 4) -> list[list[float]]:
    """How often the token that the target wrote was the r-th likeliest of those foretold, by depth and rank: `[levels][width]`.

    A depth counts where the tokens before it were among the `width` likeliest of theirs, as only then a tree gets there.

    Args:
        rows: written by the target; trained positions count.
    """
    width = min(width, student.width)
    right = torch.zeros(student.levels, width, dtype=torch.float64)
    seen = torch.zeros(student.levels, dtype=torch.float64)
    for start in range(0, len(rows), batch):
        ids = rows.ids[start : start + batch].to(student.head_weight.device)
        trained = rows.trained[start : start + batch].to(ids.device)
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
    rates: list[list[float]] = (right / seen.clamp_min(1)[:, None]).tolist()
    return rates
