"""A draft model proposes several tokens in one pass: mask tokens stand where the text has not come yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from runtime.decoding.drafters.base import Ask
from runtime.decoding.drafters.lanes import AheadLanes
from runtime.decoding.drafters.model import ModelDrafter
from runtime.decoding.tree import Tree
from runtime.kv_cache.bounds import COUNT, Range, bounded


@dataclass(eq=False)
class Parallel(ModelDrafter):
    """The draft reads the text's last token and then mask tokens, and what it says after each is the next token of the chain. A drafted
    token does not see those before it, which costs acceptance, and all of them cost one pass.

    Source: An et al., PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation, arXiv 2504.18583.

    Attributes:
        mask_token: id that it was trained to read in the place of tokens not known yet.
        most: tokens that it was trained to propose at once.
    """

    name: ClassVar[str] = "parallel"
    lanes: AheadLanes
    mask_token: int = bounded(0, Range())
    most: int = bounded(8, COUNT)

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        missing = self.missing(asks)
        masks = [[self.mask_token] * (min(ask.nodes, ask.depth, self.most) - 1) for ask in asks]
        logits = self.lanes.ahead([ask.state for ask in asks], missing, masks)
        trees = []
        for ask, rows in zip(asks, logits, strict=True):
            tree, reach = Tree(), 1.0
            for row in rows:
                token, chance = self.choose(row, ask, tree)
                tree.add(token, len(tree) - 1, chance)
                reach *= chance
                if chance < self.confidence or reach < ask.least:
                    break
            trees.append(tree)
        return trees
