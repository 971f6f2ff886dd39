"""Rollback: the draft's tokens stay unless it was not sure itself, or the target finds one very unlikely."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from runtime.config.settings import Positive, Probability
from runtime.drafting.verify.base import Rule
from runtime.drafting.verify.exact import found
from runtime.drafting.verify.target import TargetLogits
from runtime.sampling.tree import Tree


@dataclass(frozen=True)
class Rollback(Rule):
    """The small model writes, and the target in two cases. Fallback: where the small model gives no token a probability of `fallback`, it
    hands over, and the token is the target's. Rollback: a token stays while the target's cross entropy with it, -log p, is at most
    `threshold`; from the first that does not, the sequence is rolled back and the target writes that token. Lossy: most tokens are the
    small model's. A draft that is to spend nothing on what comes after a token that it is not sure of ends there: its `confidence`.

    Source: Kim et al., Speculative Decoding with Big Little Decoder, arXiv 2302.07863, section 3.

    Attributes:
        threshold: most nats that a token may cost the target.
        fallback: probability that the small model's likeliest token must have; drafters that say nothing of their chances never fall back.
    """

    name: ClassVar[str] = "rollback"
    threshold: Positive = 2.0
    fallback: Probability = 0.5

    def step(
        self, tree: Tree, node: int, options: Sequence[int], branch: Sequence[int], target: TargetLogits
    ) -> tuple[int | None, int]:
        if options and self._unsure(tree, node, options):
            # What was drafted after the target's token, where that is one of them, is as good as after any other.
            return found(tree, options, target.choose(node, branch))
        if options:
            p = target.distribution(node, branch, temperature=None if target.draws else 1.0)
            least = math.exp(-self.threshold)
            for child in options:
                if float(p[tree.tokens[child]]) >= least:
                    return child, tree.tokens[child]
        return None, target.choose(node, branch)

    def _unsure(self, tree: Tree, node: int, options: Sequence[int]) -> bool:
        """Whether the small model hands over after this node."""
        proposal = tree.proposals.get(node)
        if proposal is not None:
            return float(proposal.max()) < self.fallback
        return bool(tree.chances) and max(tree.chances[child] for child in options) < self.fallback
