"""Lossless acceptance: greedy decoding, chains and trees of drawn tokens, guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from runtime.drafting.verify.base import Rule
from runtime.drafting.verify.target import TargetLogits
from runtime.sampling.sampling import tokens_at
from runtime.sampling.tree import Tree


class Exact(Rule):
    """Every token is distributed as the target alone would write it.

    Where children are guesses (or nothing is drawn) the target chooses its token, and the walk goes on if a child is that token. Where
    they were drawn from a distribution q, one after another without replacement, the first is accepted with probability min(1, p / q);
    if it is not, p becomes the positive part of p - q, q loses the child, and the next is tried. With one child this is speculative
    sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318), with several recursive rejection sampling without
    replacement (Jeon et al., arXiv 2402.14160; multi-round: Miao et al., SpecInfer, arXiv 2305.09781).
    """

    name: ClassVar[str] = "exact"
    lossless: ClassVar[bool] = True

    def step(
        self, tree: Tree, node: int, options: Sequence[int], branch: Sequence[int], target: TargetLogits
    ) -> tuple[int | None, int]:
        proposal = tree.proposals.get(node) if target.draws and options else None
        if proposal is None:
            return found(tree, options, target.choose(node, branch))
        return tried(tree, options, target.distribution(node, branch), proposal, target)


def tried(
    tree: Tree,
    options: Sequence[int],
    p: torch.Tensor,
    proposal: torch.Tensor,
    target: TargetLogits,
    factor: float = 1.0,
) -> tuple[int | None, int]:
    """The first of the children drawn from a proposal that is accepted, with probability min(1, p / (factor * q)); if none is, None and
    a token of what is left of p."""
    q = normalized(proposal.double())
    for child in options:
        token = tree.tokens[child]
        if target.uniform() * factor * q[token] < p[token]:
            return child, token
        p, q = rejected(p, q * factor, token)
    return None, int(tokens_at(p[None], torch.tensor([target.uniform()], dtype=torch.float64)))


def found(tree: Tree, options: Sequence[int], token: int) -> tuple[int | None, int]:
    """The child that is the token, if one is."""
    return next((child for child in options if tree.tokens[child] == token), None), token


def rejected(p: torch.Tensor, q: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What is left to draw after a token of q was not accepted: for the target, and for the next child."""
    left = (p - q).clamp(min=0)
    total = left.sum()
    # Where q covers p nothing can be rejected but for rounding.
    p = left / total if total > 0 else p
    q = q.clone()
    q[token] = 0
    return p, normalized(q)


def normalized(q: torch.Tensor) -> torch.Tensor:
    """`q` divided by its sum; as it is where the sum is zero."""
    total = q.sum()
    return q / total if total > 0 else q
