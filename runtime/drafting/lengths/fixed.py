"""Draft-length policy that asks for the same number of tokens each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from runtime.config.settings import Count, Probability
from runtime.drafting.lengths.base import DEPTH, NODES, Costs, Lengths, Plan, Progress


@dataclass(frozen=True)
class Fixed(Lengths):
    """Always `nodes` tokens, `depth` of them one after another. With `confidence` a branch ends where it is less likely to be reached.

    Attributes:
        depth: most tokens of a branch.
        nodes: most tokens of a tree.
        confidence: branches do not go on from a token that is reached less likely than this, as the drafter says.
    """

    name: ClassVar[str] = "fixed"
    depth: Count = DEPTH
    nodes: Count = NODES
    confidence: Probability = 0.0

    def plan(self, sequences: Sequence[Progress], costs: Costs, rows: int, most_rows: int) -> list[Plan]:
        share = max(0, most_rows - rows) // max(1, len(sequences))
        return [Plan(min(self.nodes, share), min(self.depth, sequence.room), self.confidence) for sequence in sequences]
