"""Scores that look at an observation window, which they always keep, and pool over neighbours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Windowed:
    """What such scores have in common.

    Attributes:
        observe: queries of the window.
        kernel: neighbours that are pooled, odd.
    """

    observe: int = 32
    kernel: int = 5

    def window(self, count: int) -> int:
        return min(self.observe, count)

    def kept(self) -> int:
        return self.observe
