"""Interface of a policy of speculation length. One file a policy in this folder."""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from runtime.config.settings import Settings
from runtime.drafting.lengths.belief import Belief
from runtime.sampling.tree import Tree

# Seconds as a function of a whole number, learned while it is used.

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
        """Whether anything was measured."""
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


# How far what was promised of drafting came true.

_PRIOR = 24.0  # tokens that were promised and came, before anything was
_FORGETS = 0.98  # at each promise
_MORE, _LESS = 3.0, 8.0  # times more or less than was promised that a step counts for: a machine may stop for seconds
_RECOVERS = 0.1  # of what was lost, at a probe
_FIRST_WAIT, _LONGEST_WAIT = 32, 512  # steps
_STEADY = 64  # promises


class Trust:
    """Tokens that came as a share of those that were promised for the same time.

    Sums and not an average of shares: a step writes one token or five, and of so noisy a number an average that cannot pass 1 would
    always be too low.
    """

    def __init__(self) -> None:
        self._promised = self._kept = _PRIOR
        self._waited = self._tried = 0
        self._wait = _FIRST_WAIT

    @property
    def value(self) -> float:
        """At most 1."""
        return min(1.0, self._kept / self._promised)

    def add(self, promised: float, kept: float) -> None:
        """So many tokens were promised for a step, and so many came."""
        promised = min(promised, _LESS * kept)
        self._promised = _FORGETS * self._promised + promised
        self._kept = _FORGETS * self._kept + min(kept, _MORE * promised)

    def recover(self) -> None:
        """What is not tried any more cannot earn it."""
        self._kept += _RECOVERS * (self._promised - self._kept)

    def wait(self, steps: int) -> None:
        """For so many steps nothing will be promised, and nothing refused."""
        self._waited += steps

    def allows(self, promised: float, needed: float) -> bool:
        """Whether a promise of so many tokens a second is still more than is needed, as such promises were kept.

        Where they were not, trust comes back after a number of such refusals, which doubles until it is kept for a while.
        """
        if promised * self.value > needed:
            self._tried += 1
            if self._tried >= _STEADY:
                self._wait = _FIRST_WAIT
            return True
        self._tried = 0
        self._waited += 1
        if self._waited >= self._wait:
            self._waited, self._wait = 0, min(2 * self._wait, _LONGEST_WAIT)
            self.recover()
        return False


#: Most tokens of a branch and most nodes of a tree where nobody says otherwise.
DEPTH, NODES = 8, 16


class Plan(NamedTuple):
    """What a drafter is asked for; 0 nodes: it is not asked. See `Ask`."""

    nodes: int
    depth: int
    least: float = 0.0


@dataclass
class Costs:
    """What was measured of a model and its drafter, for all calls.

    Attributes:
        step: seconds of the target's step by its number of rows.
        draft: seconds of a drafter's turn, for all sequences of the step, by the depth of the deepest branch.
        belief: in its chances.
        idle: seconds that asking for drafts takes a step besides drafting itself.
        pause: for how many more steps of any sequence trying anew where drafting does not pay would cost too much; 0: it may be tried.
        reading: seconds that a drafter took to catch up with a sequence that it had not drafted for.
        promised: tokens a second that `plan` or `trim` expects of this step, of all sequences together; 0: nothing.
        trust: what came of such promises.
        drawn: how likely the likeliest nodes of drawn trees were reached, in that order, on average of late.
    """

    step: Curve
    draft: Curve
    belief: Belief
    idle: float = 0.0
    pause: int = 0
    reading: float = 0.0
    promised: float = 0.0
    trust: Trust = field(default_factory=Trust)
    drawn: list[float] = field(default_factory=list)

    @classmethod
    def unknown(cls) -> Costs:
        """Costs before any measurement."""
        # A row of a memory-bound model is nearly free, of a compute-bound one not at all; what is measured soon takes over.
        return cls(Curve(0.3), Curve(1.0), Belief())

    def kept(self, promised: float, tokens: float, seconds: float) -> None:
        """A step of which so many tokens a second were promised (0: nothing was) took so long, and wrote so many tokens."""
        if promised and seconds > 0:
            self.trust.add(promised * seconds, tokens)


@dataclass(eq=False)
class Progress:
    """One sequence as a length policy sees it.

    Attributes:
        belief: in the drafter's chances, for this sequence.
        room: most tokens that may still follow, so that a longer branch is of no use.
        drawn: its tokens are drawn from the drafter's distributions.
        memory: what the policy keeps between its turns.
    """

    belief: Belief
    room: int = 0
    memory: Any = None
    drawn: bool = False


class Lengths(Settings):
    """How much to draft next.

    Attributes:
        name: as `lengths=` says it.
    """

    name: ClassVar[str]

    def plan(self, texts: Sequence[Progress], costs: Costs, rows: int, most_rows: int) -> list[Plan]:
        """What to ask the drafter for, for each sequence.

        Args:
            costs: as measured so far.
            rows: that the step has anyway: one of each sequence, and those of prompts.
            most_rows: that a step can have.
        """
        raise NotImplementedError

    def trim(
        self, texts: Sequence[Progress], trees: Sequence[Tree], costs: Costs, rows: int, drafted: float
    ) -> list[Tree]:
        """Of what was drafted, what is worth being verified. Drawn trees (`Tree.proposals`) must not be changed by what is in them.

        Args:
            drafted: seconds that drafting took.
        """
        return list(trees)

    def resting(self, texts: Sequence[Progress]) -> int:
        """For how many steps from now on nothing will be asked for any of these sequences, whatever happens."""
        return 0

    def rested(self, texts: Sequence[Progress], costs: Costs, steps: int) -> None:
        """So many steps went by in which `plan` was not called."""

    def describe(self) -> str:
        """In a few words, for `Model.stats`."""
        return self.name
