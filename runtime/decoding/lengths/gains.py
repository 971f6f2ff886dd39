"""What a step of several texts is worth."""

from __future__ import annotations

from runtime.decoding.lengths.base import Costs

_DEAR = 0.5  # of its share of a step: rows that cost more are computed, not read


class Gains:
    """What a step writes, and what that is worth in tokens of plain decoding.

    A step is saved where all texts get on. What some texts gain over the slowest saves only their own rows of later steps, unless others
    take their places; where rows are dear it is counted as no more. Where they are cheap it costs nothing either, and texts end earlier.

    Args:
        texts: how many, at least one. rows: of the step without drafts.
    """

    def __init__(self, texts: int, costs: Costs, rows: int) -> None:
        step = costs.step(rows)
        # Of more rows, which were measured: fewer than there are texts seldom are.
        row = (costs.step(rows + 1) - step) * texts / step if texts > 1 and step > 0 else 1.0
        self._uneven = min(1.0, row) if row > _DEAR else 1.0
        self._more = [0.0] * texts
        self._least = self._total = 0.0
        self._lowest = texts  # how many have no more than the least

    def add(self, text: int, tokens: float) -> None:
        """A text is expected to get so many tokens more."""
        before = self._more[text]
        self._more[text] = before + tokens
        self._total += tokens
        if before <= self._least and tokens > 0:
            self._lowest -= 1
            if not self._lowest:
                self._least = min(self._more)
                self._lowest = sum(more <= self._least for more in self._more)

    @property
    def worth(self) -> float:
        even = self._least * len(self._more)
        return len(self._more) + even + self._uneven * (self._total - even)
