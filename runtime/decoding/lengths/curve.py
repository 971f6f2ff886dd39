"""Seconds as a function of a whole number, learned while it is used."""

from __future__ import annotations

import bisect
import statistics
from collections import deque

_KEPT = 9  # samples of a number; their median does not mind a disturbed few
_LATE = 9  # samples of any number, whose median says how fast the machine is now


class Curve:
    """What `n` rows (or tokens) take, from samples: their median where there are any, straight lines between, and beyond them.

    Numbers are sampled at different times, and what else a machine does changes its speed: a number that is seldom seen would keep what it
    took in better times. So what is kept of a sample is how it compares with all others, and the speed is learned from the latest of
    any number. More rows never take less: where samples say so, they were disturbed.

    Args:
        slope: what one more adds, as a share of the time of one, as long as nothing else is known.
    """

    def __init__(self, slope: float) -> None:
        self._slope = slope
        self._samples: dict[int, deque[float]] = {}
        self._places: list[int] = []
        self._medians: list[float] = []
        self._values: list[float] = []
        self._ratios: deque[float] = deque(maxlen=_LATE)
        self._speed = 1.0

    @property
    def known(self) -> bool:
        return bool(self._places)

    def add(self, n: int, seconds: float) -> None:
        """One more measurement."""
        samples = self._samples.get(n)
        place = bisect.bisect_left(self._places, n)
        if samples is None:
            samples = self._samples[n] = deque(maxlen=_KEPT)
            self._places.insert(place, n)
            self._medians.insert(place, seconds)
        elif self._medians[place] > 0:
            self._ratios.append(seconds / self._medians[place])
            self._speed = statistics.median(self._ratios)
        samples.append(seconds / self._speed if self._speed > 0 else seconds)
        self._medians[place] = statistics.median(samples)
        least, self._values = float("inf"), [0.0] * len(self._medians)
        for index in range(len(self._medians) - 1, -1, -1):
            least = min(least, self._medians[index])
            self._values[index] = least

    @property
    def last(self) -> int:
        """The largest number of which there are samples; 0: of none."""
        return self._places[-1] if self._places else 0

    def count(self, n: int) -> int:
        """How many samples of this number there are, at most as many as are kept."""
        return len(self._samples.get(n, ()))

    def __call__(self, n: int) -> float:
        """Seconds that `n` take; 0 where nothing is known."""
        return self._shape(n) * self._speed

    def _shape(self, n: int) -> float:
        places, values = self._places, self._values
        if not places:
            return 0.0
        place = bisect.bisect_left(places, n)
        if place < len(places) and places[place] == n:
            return values[place]
        if place == 0:  # below all: the line that the slope alone draws through the first
            return values[0] * (1 + self._slope * (n - 1)) / (1 + self._slope * (places[0] - 1))
        before, low = places[place - 1], values[place - 1]
        if place < len(places):
            share = (n - before) / (places[place] - before)
            return low + share * (values[place] - low)
        return low + (n - before) * self._step()

    def _step(self) -> float:
        """What one more adds beyond all that was measured: as over the whole of it, or by the slope."""
        first, last = self._places[0], self._places[-1]
        guess = self._slope * self._values[0] / (1 + self._slope * (first - 1))
        if first == last:
            return guess
        return max((self._values[-1] - self._values[0]) / (last - first), 0.1 * guess)
