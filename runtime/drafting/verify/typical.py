"""Typical acceptance: tokens that the target finds plausible pass, whoever proposed them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.config.settings import Share
from runtime.drafting.verify.base import Rule, Verdict
from runtime.drafting.verify.exact import Exact
from runtime.drafting.verify.target import TargetLogits
from runtime.sampling.tree import ROOT, Tree


@dataclass(frozen=True)
class Typical(Rule):
    """A token passes if its probability p exceeds min(epsilon, delta * exp(-entropy of the target's distribution)); of the branches
    that pass the longest is taken, of equal ones the likeliest. Lossy: sequences are as plausible, not distributed alike. At temperature 0
    it is exact.

    Source: Cai et al., Medusa, arXiv 2401.10774, section 2.3.1.

    Attributes:
        epsilon: the probability that always suffices.
        delta: what the entropy's bound is multiplied with.
    """

    name: ClassVar[str] = "typical"
    epsilon: Share = 0.09
    delta: Share = 0.3

    def accept(self, tree: Tree, target: TargetLogits) -> Verdict:
        if not target.draws:
            return Exact().accept(tree, target)
        children = tree.children()
        best: tuple[int, float, list[int]] = (0, 0.0, [])
        waiting: list[tuple[int, list[int], float]] = [(ROOT, [], 0.0)]
        while waiting:
            node, path, likelihood = waiting.pop()
            if (len(path), likelihood) > best[:2]:
                best = (len(path), likelihood, path)
            options = children.get(node, ())
            if not options:
                continue
            p = target.distribution(node, [tree.tokens[each] for each in path])
            entropy = float(torch.special.entr(p).sum())
            enough = min(self.epsilon, self.delta * float(torch.exp(torch.tensor(-entropy))))
            for child in options:
                chance = float(p[tree.tokens[child]])
                if chance > enough:
                    waiting.append((child, [*path, child], likelihood + float(torch.log(torch.tensor(chance)))))
        path = best[2]
        branch = [tree.tokens[each] for each in path]
        return Verdict(path, target.choose(path[-1] if path else ROOT, branch))
