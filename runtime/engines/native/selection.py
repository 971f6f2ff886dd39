"""Selection inside the native engine: how much each token that follows a prompt reads of the cache; selection.h chooses what."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from runtime.engines.base import Chunk
from runtime.kernels.cpu.decoder import PAGE, Step
from runtime.kv_cache.pages import PAGE as HALF
from runtime.kv_cache.selection.base import Budget
from runtime.kv_cache.selection.quest import Quest


def why_modules_select(rule: Budget) -> str | None:
    """What a policy says to read that selection.h cannot choose; None: it can."""
    if isinstance(rule, Quest):
        return None
    return f"select single tokens ({rule.name}), where a page holds the keys of {PAGE} channel by channel"


@dataclass
class WholeSequence:
    """See `runtime.engines.base.Retention`: nothing is evicted, and tokens that follow the prompt read a part of the cache.

    So only pages of the prompt are those of any sequence that begins alike.
    """

    prompt: int
    evicted: int = 0
    boundary: int | None = None
    own: int = 0
    left: int = 0  # there is no boundary
    moves: bool = False
    fixed: int = 0

    def most(self, new: int) -> int:
        """All of them."""
        return self.prompt + new


class Reading(NamedTuple):
    """What the rows of a step read that do not read all.

    Attributes:
        held: tokens that they could read, all together. read: that they read in a layer that selects.
        budget, chosen: what the step points to, of all rows.
    """

    held: int
    read: int
    budget: torch.Tensor
    chosen: torch.Tensor


def choose(
    step: Step, rows: Mapping[str, torch.Tensor], chunks: Sequence[Chunk], rule: Quest, heads: int
) -> Reading | None:
    """Let a step read what a selection says; None: all its rows read all.

    Args:
        rows: of the step (`row_tensors`).
        chunks: tokens of a sequence without retention read all.
        heads: of the cache.
    """
    prompts = [
        math.inf if chunk.retention is None else chunk.retention.prompt for chunk in chunks for _ in chunk.tokens
    ]
    places = zip(rows["rotary"].tolist(), rows["position"].tolist(), prompts, strict=True)
    held = [position + 1 if place >= prompt else 0 for place, position, prompt in places]
    if not any(held):
        return None
    newest, budgets = max(1, rule.recent), [rule.most(count) if count else -1 for count in held]
    budget = torch.tensor(budgets)
    chosen = torch.empty(len(held), heads, step.pages_stride, dtype=torch.uint8)
    step.budget, step.chosen, step.newest = budget.data_ptr(), chosen.data_ptr(), newest
    read = sum(read_tokens(count, most, newest) for count, most in zip(held, budgets, strict=True) if count)
    return Reading(sum(held), read, budget, chosen)


def read_tokens(held: int, budget: int, newest: int) -> int:
    """Tokens that a row reads, as selection.h counts them.

    Args:
        held: that it could read. budget: that it may. newest: that it reads in any case.
    """
    end = max(0, held - newest) // HALF
    count = max(0, budget - HALF - (held - end * HALF)) // HALF
    return held if budget >= held or count >= end - 1 else held - (end - 1 - count) * HALF


def bounds(pages: int, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of the bounds of a layer's keys."""
    return torch.empty(pages, heads, PAGE // HALF, 2, head_dim, dtype=dtype)


__all__ = ["Reading", "WholeSequence", "bounds", "choose", "read_tokens", "why_modules_select"]
