"""Draft-length policy that maximizes goodput (Liu et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from runtime.config.settings import Count
from runtime.drafting.lengths.base import DEPTH, NODES, Costs, Lengths, Plan, Progress
from runtime.sampling.tree import Tree

# What a step of several sequences is worth.

_EXPENSIVE = 0.5  # of its share of a step: rows that cost more are bound by computation


class Gains:
    """What a step writes, and what that is worth in tokens of plain decoding.

    A step is saved only where all sequences advance. What some gain over the slowest saves only their own rows of later steps, unless
    others take their places; where rows are expensive it counts as no more. Where rows are cheap it counts in full: sequences end earlier.

    Args:
        sequences: how many, at least one. rows: of the step without drafts.
    """

    def __init__(self, sequences: int, costs: Costs, rows: int) -> None:
        step = costs.step(rows)
        # Of more rows, which were measured: fewer than there are sequences seldom are.
        row = (costs.step(rows + 1) - step) * sequences / step if sequences > 1 and step > 0 else 1.0
        self._uneven = min(1.0, row) if row > _EXPENSIVE else 1.0
        self._more = [0.0] * sequences
        self._least = self._total = 0.0
        self._lowest = sequences  # how many have no more than the least

    def add(self, sequence: int, tokens: float) -> None:
        """A sequence is expected to get so many tokens more."""
        before = self._more[sequence]
        self._more[sequence] = before + tokens
        self._total += tokens
        if before <= self._least and tokens > 0:
            self._lowest -= 1
            if not self._lowest:
                self._least = min(self._more)
                self._lowest = sum(more <= self._least for more in self._more)

    @property
    def worth(self) -> float:
        """Expected tokens of the step; those that only some sequences get more count less where rows are expensive."""
        even = self._least * len(self._more)
        return len(self._more) + even + self._uneven * (self._total - even)


# When a sequence for which drafting did not pay is tried again.

_FIRST, _LONGEST = 32, 512  # steps
_LONGEST_EVER = 4096  # steps, however expensive the try was: the measurement may have been disturbed
_STEADY = 64  # steps


@dataclass(eq=False)
class Pause:
    """A sequence for which drafting does not pay is left alone for a while, longer each time.

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
        """Pause for at least `least` steps; the next pause is twice as long, up to a limit."""
        self.left = min(max(self.length, least), _LONGEST_EVER)
        self.length, self.vain, self.asking, self.steady = min(2 * self.length, _LONGEST), 0, float("inf"), 0
        costs.pause = self.left

    def over(self, costs: Costs) -> None:
        """End the pause; the next one is as short as the first."""
        self.left, self.length, self.vain, self.asking = 0, _FIRST, 0, float("inf")
        costs.pause = 0

    def promising(self, costs: Costs) -> None:
        """It is worth drafting; a promise that is not kept ends that soon, and must not be renewed every few steps."""
        self.left, self.steady = 0, self.steady + 1
        if self.steady >= _STEADY:
            self.over(costs)


_MARGIN = 1.05  # what drafting must promise over plain decoding: estimates err, and losing is worse than not winning
_CHEAP = 0.02  # of a step: a drafter that takes no longer is always asked, and its best proposals are verified
_PROBE = 2  # tokens of a draft that is only to see
_VAIN = 8  # drafts
_TRY = 2  # nodes of a drawn tree beyond those of earlier ones
_LATE = 0.1  # weight of the last drawn tree in the average
_WORTH = 0.01  # of the time may go into seeing whether drafting pays


@dataclass(frozen=True)
class Goodput(Lengths):
    """The expected number of tokens a second is made largest, from the measured times of steps and drafts and the measured rates of
    acceptance, over all sequences of a step at once: each next most likely token is verified as long as the whole gains. Where nothing
    gains nothing is drafted, but for a token now and then to see whether it would.

    Source: Liu et al., Optimizing Speculative Decoding for Serving Large Language Models Using Goodput, arXiv 2406.14066; over several
    sequences: Wu et al., TETRIS, arXiv 2502.15197.

    Attributes:
        depth: most tokens of a branch.
        nodes: most tokens of a tree.
    """

    name: ClassVar[str] = "goodput"
    depth: Count = DEPTH
    nodes: Count = NODES

    def plan(self, sequences: Sequence[Progress], costs: Costs, rows: int, most_rows: int) -> list[Plan]:
        share = max(0, most_rows - rows) // max(1, len(sequences))
        nodes, plain = min(self.nodes, share), costs.step(rows)
        unknown = not plain or not costs.draft.last
        cheap = unknown or costs.draft(min(self.depth, costs.draft.last)) <= _CHEAP * plain
        costs.pause = max(0, costs.pause - 1)
        if unknown:  # one step, as large for many sequences as for one, says what the next may cost
            depth, rate = max(1, self.depth // max(1, len(sequences))), 0.0
        else:
            depth, rate = (self.depth, 0.0) if cheap else self._depth(sequences, costs, rows)
        costs.promised = rate / costs.trust.value if depth else 0.0
        least = 0.0
        drawn = any(sequence.drawn for sequence in sequences)
        if depth and drawn:
            nodes = min(nodes, max(depth, self._drawn_nodes(len(sequences), costs, rows, depth)))
        elif depth and not cheap:
            # What one more token of one sequence takes; the sequences share the passes of a draft.
            more = (costs.draft(depth) - costs.draft(depth - 1)) / len(sequences) + costs.step(rows + 1) - plain
            least = min(0.9, max(0.0, more * rate))
        plans, probed = [], False
        for sequence in sequences:
            if sequence.memory is None:  # what other sequences have shown is not tried again at once
                sequence.memory = Pause(costs.pause)
            pause: Pause = sequence.memory
            pause.probing = False
            if depth and not cheap:
                pause.promising(costs)
            plan = Plan(0, 0)
            if pause.left and sequence.room > 0:
                pause.left -= 1
            elif depth and sequence.room > 0:
                plan = Plan(nodes, min(depth, sequence.room), least)
            elif sequence.room < self.depth:
                pass  # its end is near: that nothing pays there says nothing of other places
            elif pause.steady:  # what came of it until now says more than a probe
                pause.begin(costs)
            elif probed:  # one sequence at a time says as much as all of them
                pause.left = costs.pause
            else:
                probe = costs.reading + costs.draft(_PROBE) + costs.step(rows + _PROBE) - plain
                pause.begin(costs, round(probe / plain / _WORTH))
                costs.trust.recover()
                pause.probing = probed = True
                plan = Plan(min(nodes, _PROBE), min(_PROBE, sequence.room))
            plans.append(plan)
        return plans

    def resting(self, sequences: Sequence[Progress]) -> int:
        return min((sequence.memory.left if sequence.memory is not None else 0 for sequence in sequences), default=0)

    def rested(self, sequences: Sequence[Progress], costs: Costs, steps: int) -> None:
        costs.pause = max(0, costs.pause - steps)
        for sequence in sequences:
            if sequence.memory is not None:
                sequence.memory.left = max(0, sequence.memory.left - steps)

    def _depth(self, sequences: Sequence[Progress], costs: Costs, rows: int) -> tuple[int, float]:
        """The number of tokens to draft for each sequence, and the tokens a second that it promises."""
        best, rate = 0, len(sequences) / costs.step(rows) * _MARGIN
        trust, gains = costs.trust.value, Gains(len(sequences), costs, rows)
        reach = [1.0] * len(sequences)
        for depth in range(1, self.depth + 1):
            for index, sequence in enumerate(sequences):
                reach[index] *= sequence.belief.rate(depth) if depth <= sequence.room else 0.0
                gains.add(index, reach[index])
            expected = gains.worth
            seconds = costs.draft(depth) + costs.step(rows + depth * len(sequences))
            # Rates are of what was drafted, of which not all is verified: how much of such promises came true says what they are worth.
            found = expected / seconds * trust
            if found > rate:
                best, rate = depth, found
        return best, rate

    def _drawn_nodes(self, sequences: int, costs: Costs, rows: int, depth: int) -> int:
        """How many nodes of a drawn tree pay, as earlier ones were reached: what is in the tree itself must not decide that."""
        known = costs.drawn
        if not known:
            return self.nodes
        seconds, expected = costs.draft(depth), float(sequences)
        best, rate = 0, 0.0
        for count in range(1, min(self.nodes, len(known) + _TRY) + 1):
            expected += sequences * known[min(count, len(known)) - 1]
            found = expected / (seconds + costs.step(rows + sequences * count))
            if found > rate:
                best, rate = count, found
        return best

    def trim(
        self, sequences: Sequence[Progress], trees: Sequence[Tree], costs: Costs, rows: int, drafted: float
    ) -> list[Tree]:
        reach = [sequence.belief.reach(tree) for sequence, tree in zip(sequences, trees, strict=True)]
        if any(tree.proposals for tree in trees):
            for each in reach:
                _average(costs.drawn, sorted(each, reverse=True))
            return list(trees)
        if not costs.step.last:
            return list(trees)
        # A node is never likelier than its parent, so that in this order parents come first.
        order = sorted(
            ((-chance, node, index) for index, each in enumerate(reach) for node, chance in enumerate(each)),
        )
        gains = Gains(len(sequences), costs, rows)
        best, rate = 0, gains.worth / (drafted + costs.step(rows))
        plain = rate * _MARGIN
        for count, (chance, _, index) in enumerate(order, 1):
            gains.add(index, -chance)
            found = gains.worth / (drafted + costs.step(rows + count))
            if found > max(rate, plain):
                best, rate = count, found
        probing = any(sequence.memory is not None and sequence.memory.probing for sequence in sequences)
        refused = False
        if best and not probing and not costs.promised:  # nobody had to promise anything to be asked
            refused = not costs.trust.allows(rate, plain)
            best, costs.promised = (0, 0.0) if refused else (best, rate)
        kept: list[list[int]] = [[] for _ in trees]
        for _, node, index in order[:best]:
            kept[index].append(node)
        result = []
        for sequence, tree, nodes in zip(sequences, trees, kept, strict=True):
            pause: Pause = sequence.memory or Pause()
            if pause.probing:
                result.append(tree)
                continue
            result.append(tree.keep(sorted(nodes)))
            if nodes:
                pause.over(costs)
                continue
            pause.vain += 1
            pause.asking = min(pause.asking, costs.idle + drafted)
            share = pause.asking / costs.step(rows) / _WORTH
            if pause.vain >= _VAIN and share > 1:
                pause.begin(costs, round(_VAIN * share))
                if refused:
                    costs.trust.wait(pause.left // len(sequences))
        return result


def _average(known: list[float], reach: Sequence[float]) -> None:
    """Let a moving average take in the nodes of one more tree; what it has no node for was not asked for."""
    for place, chance in enumerate(reach):
        if place == len(known):
            known.append(chance)
        else:
            known[place] += _LATE * (chance - known[place])
