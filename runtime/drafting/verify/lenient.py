"""Lenient acceptance: speculative sampling that forgives the draft a factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from runtime.config.settings import Share
from runtime.drafting.verify.base import Rule
from runtime.drafting.verify.exact import found, tried
from runtime.drafting.verify.target import TargetLogits
from runtime.sampling.tree import Tree


@dataclass(frozen=True)
class Lenient(Rule):
    """A drawn token is accepted with probability min(1, p / (factor * q)); a guess, and any token at temperature 0, if its
    probability is at least `factor` of the largest one. 1 is exact for drawn tokens and for greedy decoding; the smaller the factor,
    the more of the draft's distribution is in the sequence. Lossy below 1.

    Source: Leviathan et al., arXiv 2211.17192, appendix A.5; Zhou et al., DistillSpec, arXiv 2310.08461, section 4.4 (linear lenience).

    Attributes:
        factor: of the draft's probability (greedy: of the target's largest).
    """

    name: ClassVar[str] = "lenient"
    factor: Share = 0.5

    def step(
        self, tree: Tree, node: int, options: Sequence[int], branch: Sequence[int], target: TargetLogits
    ) -> tuple[int | None, int]:
        if not options:
            return None, target.choose(node, branch)
        proposal = tree.proposals.get(node) if target.draws else None
        p = target.distribution(node, branch, temperature=None if target.draws else 1.0)
        if proposal is None:
            chosen, token = found(tree, options, target.choose(node, branch))
            if chosen is None:
                least = self.factor * float(p.max())
                for child in options:
                    if float(p[tree.tokens[child]]) >= least:
                        return child, tree.tokens[child]
            return chosen, token
        return tried(tree, options, p, proposal, target, self.factor)
