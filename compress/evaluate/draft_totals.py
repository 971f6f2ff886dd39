"""What became of drafts over several calls of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any


@dataclass
class DraftTotals:
    """Sums of `Model.stats`."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    reached_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)

    def add(self, stats: Mapping[str, Any]) -> None:
        """One more call."""
        self.steps += stats["steps"]
        self.drafted += stats["drafted_tokens"]
        self.accepted += stats["accepted_tokens"]
        self.rounds += stats["draft_rounds"]
        self.reached_by_depth = _sums(self.reached_by_depth, stats["reached_by_depth"])
        self.accepted_by_depth = _sums(self.accepted_by_depth, stats["accepted_by_depth"])

    def facts(self) -> dict[str, Any]:
        """As `Model.stats` says it: rates are None where nothing was drafted."""
        reached = sum(self.reached_by_depth)
        return {
            "steps": self.steps, "drafted_tokens": self.drafted, "accepted_tokens": self.accepted,
            "acceptance_rate": sum(self.accepted_by_depth) / reached if reached else None,
            "mean_accepted": self.accepted / self.rounds if self.rounds else None,
            "acceptance_by_depth": [
                right / seen for right, seen in zip(self.accepted_by_depth, self.reached_by_depth, strict=True)
            ],
        }  # fmt: skip


def _sums(one: list[int], other: list[int]) -> list[int]:
    return [left + right for left, right in zip_longest(one, other, fillvalue=0)]
