"""What decides how much is drafted. One file a policy in this folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from runtime.decoding.lengths.belief import Belief
from runtime.decoding.lengths.curve import Curve
from runtime.decoding.lengths.trust import Trust
from runtime.decoding.tree import Tree

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
        draft: seconds of a drafter's turn, for all texts of the step, by the depth of the deepest branch.
        belief: in its chances.
        idle: seconds that asking for drafts takes a step besides drafting itself.
        pause: for how many more steps of any text trying anew where drafting does not pay would cost too much; 0: it may be tried.
        reading: seconds that a drafter took to catch up with a text that it had not drafted for.
        promised: tokens a second that `plan` or `trim` expects of this step, of all texts together; 0: nothing.
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
        # A row of a memory-bound model is nearly free, of a compute-bound one not at all; what is measured soon takes over.
        return cls(Curve(0.3), Curve(1.0), Belief())

    def kept(self, promised: float, tokens: float, seconds: float) -> None:
        """A step of which so many tokens a second were promised (0: nothing was) took so long, and wrote so many tokens."""
        if promised and seconds > 0:
            self.trust.add(promised * seconds, tokens)


@dataclass(eq=False)
class Progress:
    """One text as a length policy sees it.

    Attributes:
        belief: in the drafter's chances, for this text.
        room: most tokens that may still follow, so that a longer branch is of no use.
        drawn: its tokens are drawn from the drafter's distributions.
        memory: what the policy keeps between its turns.
    """

    belief: Belief
    room: int = 0
    memory: Any = None
    drawn: bool = False


class Lengths:
    """How much to draft next.

    Attributes:
        name: as `lengths=` says it.
    """

    name: ClassVar[str]

    def plan(self, texts: Sequence[Progress], costs: Costs, rows: int, most_rows: int) -> list[Plan]:
        """What to ask the drafter for, for each text.

        Args:
            costs: as measured so far.
            rows: that the step has anyway: one of each text, and those of prompts.
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
        """For how many steps from now on nothing will be asked for any of these texts, whatever happens."""
        return 0

    def rested(self, texts: Sequence[Progress], costs: Costs, steps: int) -> None:
        """So many steps went by in which `plan` was not called."""

    def describe(self) -> str:
        """In a few words, for `Model.stats`."""
        return self.name
