"""As much as makes texts grow fastest, which may be nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from runtime.decoding.lengths.base import DEPTH, NODES, Costs, Lengths, Plan, Progress
from runtime.decoding.tree import Tree
from runtime.kv_cache.bounds import COUNT, bounded, check_bounds

_MARGIN = 1.02  # what drafting must promise over plain decoding: estimates err, and losing is worse than not winning
_CHEAP = 0.02  # of a step: a drafter that takes no longer is always asked, and its best proposals are verified
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 512  # steps


@dataclass(eq=False)
class _Pause:
    """Texts for which drafting did not pay are left alone for a while, longer each time."""

    left: int = 0
    length: int = _FIRST_PAUSE
    probing: bool = False


@dataclass(frozen=True)
class Goodput(Lengths):
    """The expected number of tokens a second is made largest, from the measured times of steps and drafts and the measured rates of
    acceptance, over all texts of a step at once: each next most likely token is verified as long as the whole gains. Where nothing
    gains nothing is drafted, but for a token now and then to see whether it would.

    Source: Liu et al., Optimizing Speculative Decoding for Serving Large Language Models Using Goodput, arXiv 2406.14066; over several
    texts: Wu et al., TETRIS, arXiv 2502.15197.

    Attributes:
        depth: most tokens of a branch.
        nodes: most tokens of a tree.
    """

    name: ClassVar[str] = "goodput"
    depth: int = bounded(DEPTH, COUNT)
    nodes: int = bounded(NODES, COUNT)

    def __post_init__(self) -> None:
        check_bounds(self)

    def plan(self, texts: Sequence[Progress], costs: Costs, rows: int, most_rows: int) -> list[Plan]:
        share = max(0, most_rows - rows) // max(1, len(texts))
        nodes = min(self.nodes, share)
        plain = costs.step(rows)
        if not nodes or not plain or not costs.draft.known or costs.draft(self.depth) <= _CHEAP * plain:
            return [Plan(nodes, min(self.depth, text.room)) for text in texts]
        depth, rate = self._depth(texts, costs, rows)
        plans = []
        for text in texts:
            pause = text.memory = text.memory or _Pause()
            pause.probing = False
            wanted, least = min(depth, text.room), 0.0
            if depth:
                pause.length = _FIRST_PAUSE
                more = costs.draft(depth) - costs.draft(depth - 1) + costs.step(rows + 1) - plain
                least = max(0.0, more * rate / len(texts))
            elif pause.left:
                pause.left -= 1
            else:
                pause.left, pause.length = pause.length, min(2 * pause.length, _LONGEST_PAUSE)
                pause.probing, wanted = True, min(2, text.room)
            plans.append(Plan(nodes if wanted else 0, wanted, min(least, 0.9)))
        return plans

    def _depth(self, texts: Sequence[Progress], costs: Costs, rows: int) -> tuple[int, float]:
        """The number of tokens to draft for each text, and the tokens a second that it promises."""
        best, rate = 0, len(texts) / costs.step(rows) * _MARGIN
        expected = float(len(texts))
        reach = [1.0] * len(texts)
        for depth in range(1, self.depth + 1):
            for index, text in enumerate(texts):
                reach[index] *= text.belief.rate(depth) if depth <= text.room else 0.0
                expected += reach[index]
            seconds = costs.draft(depth) + costs.step(rows + depth * len(texts))
            if expected / seconds > rate:
                best, rate = depth, expected / seconds
        return best, rate

    def trim(
        self, texts: Sequence[Progress], trees: Sequence[Tree], costs: Costs, rows: int, drafted: float
    ) -> list[Tree]:
        if not costs.step.known or any(tree.proposals for tree in trees):
            return list(trees)
        probing = [text.memory is not None and text.memory.probing for text in texts]
        reach = [text.belief.reach(tree) for text, tree in zip(texts, trees, strict=True)]
        # A node is never likelier than its parent, so that in this order parents come first.
        order = sorted(
            ((-chance, node, index) for index, each in enumerate(reach) for node, chance in enumerate(each)),
        )
        expected = float(len(texts))
        best, rate = 0, expected / (drafted + costs.step(rows))
        plain = rate * _MARGIN
        for count, (chance, _, _) in enumerate(order, 1):
            expected -= chance
            found = expected / (drafted + costs.step(rows + count))
            if found > max(rate, plain):
                best, rate = count, found
        kept: list[list[int]] = [[] for _ in trees]
        for _, node, index in order[:best]:
            kept[index].append(node)
        return [
            tree if probe else tree.keep(sorted(nodes)) for tree, nodes, probe in zip(trees, kept, probing, strict=True)
        ]
