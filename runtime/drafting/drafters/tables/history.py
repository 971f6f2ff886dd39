"""What was written before, as one list in which n-grams can be looked up: bounded, the oldest of it forgotten first."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.drafting.drafters.tables.occurrences import Match, Occurrences, Suffix

#: Between two outputs, and equal to no token, so that nothing is found or copied across.
BORDER = (1 << 31) - 1


class History:
    """Outputs one after another.

    Args:
        window: most tokens; when there are more the older half goes. Below 4 there is no history.
        lengths: of n-grams that are indexed; texts that look something up have the same.
    """

    def __init__(self, window: int, lengths: Sequence[int]) -> None:
        self._window, self._lengths = window, tuple(lengths)
        self.clear()

    def clear(self) -> None:
        """Forget all of it."""
        self.index = Occurrences([], self._lengths)

    def __len__(self) -> int:
        return len(self.index.tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """One more output. Of one that is longer than half the window its end is kept."""
        half = self._window // 2
        if half < 2:
            return
        new = [*tokens[-(half - 1) :], BORDER]
        if len(self) + len(new) > self._window:
            self.index = Occurrences(self.index.tokens[-half:], self._lengths)
        self.index.tokens += new
        self.index.catch_up()

    def match(self, suffix: Suffix, most: int) -> Match:
        """The longest end of a text that occurred here, and where; see `Occurrences.own_match`."""
        return self.index.match(suffix, most)

    @property
    def memory_bytes(self) -> int:
        # A list's entry, and the number it points to: other lists mostly share it, but not after their end.
        return self.index.memory_bytes + 40 * len(self)
