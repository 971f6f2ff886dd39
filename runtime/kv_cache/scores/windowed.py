"""Scores that look at an observation window, which they always keep, and pool over neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.ranges import COUNT, Range, bounded, check_bounds


@dataclass(frozen=True)
class Windowed:
    """What such scores have in common.

    Attributes:
        observe: queries of the window.
        kernel: neighbours that are pooled, odd.
    """

    observe: int = bounded(32, COUNT)
    kernel: int = bounded(5, Range(1, odd=True))

    def __post_init__(self) -> None:
        check_bounds(self)

    def window(self, count: int) -> int:
        return min(self.observe, count)

    def kept(self) -> int:
        return self.observe
