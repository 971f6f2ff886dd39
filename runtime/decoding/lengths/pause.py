"""When a text for which drafting did not pay is tried again."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.decoding.lengths.base import Costs

_FIRST, _LONGEST = 32, 512  # steps
_DEAREST = 4096  # steps, however dear it was to try: what was measured may have been an accident
_STEADY = 64  # steps


@dataclass(eq=False)
class Pause:
    """A text for which drafting does not pay is left alone for a while, longer each time.

    Attributes:
        left: steps until it is tried again. length: of the next pause.
        vain: times in a row that nothing was drafted that was worth being verified. asking: seconds of the fastest of these.
        steady: times in a row that drafting promised to pay.
        probing: this time it is tried whatever it promises.
    """

    left: int = 0
    length: int = _FIRST
    vain: int = 0
    asking: float = float("inf")
    steady: int = 0
    probing: bool = False

    def begin(self, costs: Costs, least: int = 0) -> None:
        self.left = min(max(self.length, least), _DEAREST)
        self.length, self.vain, self.asking, self.steady = min(2 * self.length, _LONGEST), 0, float("inf"), 0
        costs.pause = self.left

    def over(self, costs: Costs) -> None:
        self.left, self.length, self.vain, self.asking = 0, _FIRST, 0, float("inf")
        costs.pause = 0

    def promising(self, costs: Costs) -> None:
        """It is worth drafting; a promise that is not kept ends that soon, and must not be renewed every few steps."""
        self.left, self.steady = 0, self.steady + 1
        if self.steady >= _STEADY:
            self.over(costs)
