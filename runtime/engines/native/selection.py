"""Selection inside the native engine: how much each token that follows a prompt reads of the cache; selection.h chooses what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from runtime.engines.base import Chunk
from runtime.kernels.cpu.decoder import PAGE, Step
from runtime.kv_cache.pages import PAGE as HALF
from runtime.kv_cache.selection.base import Budget
from runtime.kv_cache.selection.quest import Quest

_ALL = 1 << 62  # no token is at this position


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

    @property
    def left(self) -> int:
        """There is no boundary."""
        raise NotImplementedError

    def most(self, new: int) -> int:
        """All of them."""
        return self.prompt + new


class Reading(NamedTuple):
    """What the rows of a step read that do not read all.

    Attributes:
        held: int64 `[such rows]`, tokens that each could read. read: likewise, that it reads in a layer that selects.
        budget, chosen: what the step points to, of all rows.
    """

    held: torch.Tensor
    read: torch.Tensor
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
    prompts = [_ALL if chunk.retention is None else chunk.retention.prompt for chunk in chunks for _ in chunk.tokens]
    selects = rows["rotary"] >= torch.tensor(prompts)
    if not bool(selects.any()):
        return None
    held, newest = rows["position"] + 1, max(1, rule.recent)
    budget = rule.counts(held).where(selects, -1)
    chosen = torch.empty(len(held), heads, step.pages_stride, dtype=torch.uint8)
    step.budget, step.chosen, step.newest = budget.data_ptr(), chosen.data_ptr(), newest
    held = held[selects]
    return Reading(held, read_tokens(held, budget[selects], newest), budget, chosen)


def read_tokens(held: torch.Tensor, budget: torch.Tensor, newest: int) -> torch.Tensor:
    """Tokens that rows read, int64 `[rows]`, as selection.h counts them.

    Args:
        held: int64 `[rows]`, tokens that each could read. budget: likewise, that it may. newest: that it reads in any case.
    """
    end = (held - newest).clamp(min=0) // HALF
    count = (budget - HALF - (held - end * HALF)).clamp(min=0) // HALF
    return held.where((budget >= held) | (count >= end - 1), held - (end - 1 - count) * HALF)


def bounds(pages: int, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of the bounds of a layer's keys."""
    return torch.empty(pages, heads, PAGE // HALF, 2, head_dim, dtype=dtype)


__all__ = ["Reading", "WholeSequence", "bounds", "choose", "read_tokens", "why_modules_select"]
