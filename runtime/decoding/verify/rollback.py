"""Rollback: the draft's tokens stay unless the target finds one very unlikely."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from runtime.decoding.tree import Tree
from runtime.decoding.verify.base import Rule
from runtime.decoding.verify.target import Target
from runtime.kv_cache.bounds import ABOVE_ZERO, bounded, check_bounds


@dataclass(frozen=True)
class Rollback(Rule):
    """A token stays while the target's cross entropy with it, -log p, is at most `threshold`; from the first that does not, the text is
    rolled back and the target writes one token itself. The small model hands over by itself where it is not sure (`confidence` of
    a model draft), so both policies of the source are there. Lossy: most tokens are the small model's.

    Source: Kim et al., Speculative Decoding with Big Little Decoder, arXiv 2302.07863, section 3.

    Attributes:
        threshold: most nats that a token may cost the target.
    """

    name: ClassVar[str] = "rollback"
    threshold: float = bounded(2.0, ABOVE_ZERO)

    def __post_init__(self) -> None:
        check_bounds(self)

    def step(
        self, tree: Tree, node: int, options: Sequence[int], branch: Sequence[int], target: Target
    ) -> tuple[int | None, int]:
        if options:
            p = target.distribution(node, branch, temperature=None if target.draws else 1.0)
            least = math.exp(-self.threshold)
            for child in options:
                if float(p[tree.tokens[child]]) >= least:
                    return child, tree.tokens[child]
        return None, target.choose(node, branch)
