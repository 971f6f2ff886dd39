"""Interface of a policy of speculation length. One file a policy in this folder."""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

from runtime.config.settings import Settings
from runtime.drafting.rates import Rates
from runtime.sampling.tree import ROOT, Tree

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
        self._medians: dict[int, float] = {}
        self._places: list[int] = []
        self._values: list[float] = []
        self._ratios: deque[float] = deque(maxlen=_LATE)
        self._speed = 1.0

    def add(self, n: int, seconds: float) -> None:
        """One more measurement."""
        if n not in self._samples:
            self._samples[n] = deque(maxlen=_KEPT)
            bisect.insort(self._places, n)
        elif self._medians[n] > 0:
            self._ratios.append(seconds / self._medians[n])
            self._speed = statistics.median(self._ratios)
        self._samples[n].append(seconds / self._speed if self._speed > 0 else seconds)
        self._medians[n] = statistics.median(self._samples[n])
        self._values = list(accumulate((self._medians[place] for place in reversed(self._places)), min))[::-1]

    @property
    def last(self) -> int:
        """The largest number of which there are samples; 0: of none."""
        return self._places[-1] if self._places else 0

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


# How far a drafter's confidence is to be believed.

_BINS = 12
_PRIOR_CHANCE = 4.0  # tokens that a drafter's own confidence counts as
_KEEP = 0.99
_DEPTHS = 64
_FIRST_CHANCE = 0.6  # how likely a token is right of a drafter that states no confidence


class Belief:
    """Rates of acceptance: of nodes by the drafter's confidence in them, and of any child by depth.

    Args:
        parent: where a new sequence starts from; None: from the drafter's own confidence.
    """

    def __init__(self, parent: Belief | None = None) -> None:
        self._parent = parent
        self._nodes = Rates(_PRIOR_CHANCE, _KEEP)
        self._depths = Rates(_PRIOR_CHANCE, _KEEP)

    def chance(self, said: float) -> float:
        """How likely a node is right of which the drafter says so."""
        return self._nodes.rate(_bin(said), said if self._parent is None else self._parent.chance(said))

    def rate(self, depth: int) -> float:
        """How likely some token of this depth (1: the first) is right where those before it are."""
        depth = min(depth, _DEPTHS)
        before = self.rate(depth - 1) if depth > 1 else _FIRST_CHANCE
        if self._parent is None:
            expected = before
        elif depth == 1:
            expected = self._parent.rate(depth)
        else:
            # Other sequences may have been hopeless at this depth; the depth before, which this one tries too, speaks for it.
            expected = 0.5 * (self._parent.rate(depth) + before)
        return self._depths.rate(depth, expected)

    def reach(self, tree: Tree) -> list[float]:
        """Of each node, how likely it and all before it are right."""
        if tree.chances:
            known = {said: self.chance(said) for said in set(tree.chances)}
            chances = [known[said] for said in tree.chances]
        else:
            # Of siblings without confidence the first gets all of what is left.
            first = {options[0] for options in tree.children().values()}
            chances = [self.rate(depth) if node in first else 0.0 for node, depth in enumerate(tree.depths())]
        return Tree(tree.tokens, tree.parents, chances).reach()

    def observe(self, tree: Tree, new: Sequence[int]) -> None:
        """What followed: nodes on the way are right, their siblings wrong, what comes after a wrong one is not known."""
        children, node = tree.children(), ROOT
        for depth, token in enumerate(new):
            options = children.get(node, ())
            right = [option for option in options if tree.tokens[option] == token]
            for option in options if tree.chances else ():
                self._nodes.add(_bin(tree.chances[option]), option in right)
            if options:
                self._depths.add(min(depth + 1, _DEPTHS), bool(right))
            if not right:
                return
            node = right[-1]


def _bin(said: float) -> int:
    """Finer towards 1, where a small difference changes long branches most."""
    return min(int(_BINS * said * said), _BINS - 1) if said > 0 else 0


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

    # A row of a memory-bound model is nearly free, of a compute-bound one not at all; what is measured soon takes over.
    step: Curve = field(default_factory=partial(Curve, 0.3))
    draft: Curve = field(default_factory=partial(Curve, 1.0))
    belief: Belief = field(default_factory=Belief)
    idle: float = 0.0
    pause: int = 0
    reading: float = 0.0
    promised: float = 0.0
    trust: Trust = field(default_factory=Trust)
    drawn: list[float] = field(default_factory=list)

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

    def plan(self, sequences: Sequence[Progress], costs: Costs, rows: int, most_rows: int) -> list[Plan]:
        """What to ask the drafter for, for each sequence.

        Args:
            costs: as measured so far.
            rows: that the step has anyway: one of each sequence, and those of prompts.
            most_rows: that a step can have.
        """
        raise NotImplementedError

    def trim(
        self, sequences: Sequence[Progress], trees: Sequence[Tree], costs: Costs, rows: int, drafted: float
    ) -> list[Tree]:
        """Of what was drafted, what is worth being verified. Drawn trees (`Tree.proposals`) must not be changed by what is in them.

        Args:
            drafted: seconds that drafting took.
        """
        return list(trees)

    def resting(self, sequences: Sequence[Progress]) -> int:
        """For how many steps from now on nothing will be asked for any of these sequences, whatever happens."""
        return 0

    def rested(self, sequences: Sequence[Progress], costs: Costs, steps: int) -> None:
        """So many steps went by in which `plan` was not called."""

    def describe(self) -> str:
        """In a few words, for `Model.stats`."""
        return self.name
