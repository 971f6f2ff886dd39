"""Speculative decoding of a model: its drafter, the rule by which tokens are accepted, how much is drafted, and what was learned.

One `Speculation` a model; for the calls that decode together there is one `Speculator`, which plans and drafts for all their sequences
at once. Options and statistics are those of each sequence's own call.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from runtime.drafting.drafters.base import Ask, Drafter, Draw, Place, Text, Verified
from runtime.drafting.lengths.base import Belief, Costs, Lengths, Progress
from runtime.drafting.lengths.goodput import Goodput
from runtime.drafting.verify.base import Rule, Verdict
from runtime.drafting.verify.exact import Exact
from runtime.drafting.verify.target import TargetLogits
from runtime.engines.base import Engine
from runtime.sampling.options import GenerationOptions
from runtime.sampling.sampling import greedy
from runtime.sampling.stats import GenerationStats
from runtime.sampling.tree import ROOT, Tree

_log = logging.getLogger("compress.speculation")
_FADES = 0.99  # what catching up took, from draft to draft in which there was nothing to catch up with
_SELDOM = 8  # of the steps in which drafting rests every eighth is timed: learning what a step takes is itself some per cent of a short one
Result = TypeVar("Result")


PATIENCE = 10.0  # seconds; a drafter that thinks longer than this over a few tokens is of no use


class StalledError(Exception):
    """A drafter did not answer in time."""


class DrafterThread:
    """Runs functions in a thread of its own, one after another, and stops waiting for one that takes too long.

    A thread cannot be ended from outside: the one that hangs is left alone (it does not keep the process from ending), and nothing
    runs here any more.

    Args:
        patience: seconds.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience = patience
        self._calls: queue.SimpleQueue[Any] | None = None

    def run(self, what: Callable[..., Result], *arguments: Any) -> Result:
        """What the function gives or raises.

        Raises:
            StalledError: it took too long.
        """
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), name="drafter", daemon=True).start()
        answer: Future[Result] = Future()
        self._calls.put((answer, what, arguments))
        if not wait([answer], self.patience).done:
            self._calls = None
            raise StalledError(f"it did not answer within {self.patience:g} seconds")
        return answer.result()


def _serve(calls: queue.SimpleQueue[Any]) -> None:
    while True:
        answer, what, arguments = calls.get()
        try:
            answer.set_result(what(*arguments))
        except Exception as error:
            answer.set_exception(error)


@dataclass(eq=False)
class Speculation:
    """How a model decodes speculatively.

    Attributes:
        drafter: proposes. rule: accepts. lengths: says how much.
        costs: measured over all calls.
        off: why the drafter was switched off; None: it works.
        left: the drafter's states of sequences that were thrown away, not ended yet.
    """

    drafter: Drafter
    rule: Rule = field(default_factory=Exact)
    lengths: Lengths = field(default_factory=Goodput)
    costs: Costs = field(default_factory=Costs)
    off: str | None = None
    thread: DrafterThread = field(default_factory=DrafterThread)
    left: deque[Any] = field(default_factory=deque)

    def settle(self) -> None:
        """End the sequences that were thrown away."""
        while self.left and self.off is None:
            self.guarded(self.drafter.end, self.left.popleft())

    def guarded(self, what: Callable[..., Result], *arguments: Any) -> Result | None:
        """Call a drafter's method; if it fails or exceeds its time limit, switch the drafter off and return None."""
        try:
            return self.thread.run(what, *arguments) if self.drafter.watched else what(*arguments)
        except Exception as error:
            text = str(error).strip().splitlines()
            self.switch_off(f"{type(error).__name__}: {text[0]}" if text else type(error).__name__)
            return None

    def switch_off(self, reason: str) -> None:
        """Stop drafting for all sequences and log the reason."""
        self.off = reason
        _log.warning("the drafter %s is switched off: %s; decoding goes on without it", self.drafter.name, reason)

    def describe(self) -> str:
        """In a few words."""
        text = f"{self.drafter.describe()}, {self.lengths.describe()} lengths, {self.rule.describe()} acceptance"
        return text if self.off is None else f"{text}; switched off: {self.off}"


class Speculated(Text, Protocol):
    """A sequence that is drafted for.

    Attributes:
        generator: its random numbers; None: greedy. options, stats: of its call.
    """

    generator: torch.Generator | None

    @property
    def options(self) -> GenerationOptions:
        """Of its call."""

    @property
    def stats(self) -> GenerationStats:
        """Of its call."""


@dataclass(eq=False)
class Track:
    """What is known of one sequence.

    Attributes:
        state: the drafter's.
        progress: the length policy's.
        whole: the tree as it was drafted, before any of it was left out.
    """

    state: Any
    progress: Progress
    whole: Tree = field(default_factory=Tree)


class Speculator:
    """The speculation of the sequences that decode together.

    Args:
        speculation: the model's.
        engine: that verifies.

    Attributes:
        prompts: the drafter reads what the head reads of every token of prompts too.
        proposed: something was drafted for the step that is being computed (be it left out again): what comes of it is to be learned.
    """

    def __init__(self, speculation: Speculation, engine: Engine) -> None:
        self._speculation, self._engine = speculation, engine
        self._tracks: dict[int, Track] = {}
        self.proposed = False
        self._promised = self._overhead = 0.0  # tokens a second of this step; seconds of reading in what drafting took
        # Steps to come without a draft, those gone by so, and for how many sequences.
        self._rest = self._slept = self._resting = 0
        drafter = speculation.drafter
        self._wants_hidden = "hidden" in drafter.wants
        # A drafter of somebody else's may have been written against the promise that it is told of every step.
        self._wants_steps = self._wants_hidden or "steps" in drafter.wants or drafter.watched
        self.prompts = "prompt" in speculation.drafter.wants

    @property
    def on(self) -> bool:
        """Whether the drafter is still in use."""
        return self._speculation.off is None

    @property
    def hidden(self) -> bool:
        """Whether what the head reads is wanted of the step that is being computed."""
        return self._wants_hidden and self._rest == 0

    @property
    def learns(self) -> bool:
        """Whether what the step that is being computed says is to be learned from."""
        return self.proposed or (self._wants_steps and self._rest == 0)

    def rests(self, sequences: int) -> bool:
        """Whether drafting pays for none of so many sequences for now: the step is then one of plain decoding, and costs no more."""
        if self._rest == 0 or sequences != self._resting:
            return False
        self._rest -= 1
        self._slept += 1
        self.proposed = False
        return True

    # ---------------------------------------------------------------- before a step
    def propose(
        self,
        sequences: Sequence[Speculated],
        rooms: Sequence[int],
        rows: int,
        places: Callable[[int, int], Place] | None = None,
    ) -> list[Tree]:
        """A tree for each sequence, maybe an empty one.

        Args:
            sequences: that decode in this step.
            rooms: of each, most tokens that may still follow besides the one that the target writes itself.
            rows: tokens of the step without any draft.
            places: (index of a sequence, tokens to draft) to its place in the target's cache; only paged engines have it.
        """
        began = time.perf_counter()
        speculation = self._speculation
        nothing = [Tree() for _ in sequences]
        self.proposed, self._rest, self._promised, self._overhead = False, 0, 0.0, 0.0
        if not self.on or not sequences:
            return nothing
        speculation.settle()
        tracks = [self._track(sequence) for sequence in sequences]
        for track, room, sequence in zip(tracks, rooms, sequences, strict=True):
            track.whole = Tree()
            track.progress.room, track.progress.drawn = room, self._draw(sequence) is not None
        if not self.on:
            return nothing
        progress = [track.progress for track in tracks]
        if self._slept:
            speculation.lengths.rested(progress, speculation.costs, self._slept)
        self._slept = 0
        plans = speculation.lengths.plan(progress, speculation.costs, rows, self._engine.draft_rows)
        asked = [index for index, plan in enumerate(plans) if plan.nodes > 0 and plan.depth > 0]
        if not asked:
            # The step before the next draft is learned from again: what a drafter reads of it must be there.
            self._rest, self._resting = max(0, speculation.lengths.resting(progress) - 1), len(sequences)
            return nothing
        asks = []
        for index in asked:
            sequence, plan = sequences[index], plans[index]
            place = places(index, plan.depth) if places is not None and speculation.drafter.inside else None
            draw = self._draw(sequence)
            asks.append(Ask(tracks[index].state, sequence, plan.nodes, plan.depth, draw, plan.least, place))
        started = time.perf_counter()
        found = speculation.guarded(speculation.drafter.draft, asks)
        seconds = time.perf_counter() - started
        for stats in {id(sequences[index].stats): sequences[index].stats for index in asked}.values():
            stats.draft_seconds += seconds
        found = None if found is None else self._checked(found, asks)
        if found is None:
            return nothing
        deepest = max((max(tree.depths(), default=0) for tree in found), default=0)
        overhead = speculation.drafter.overhead / len(asks)
        speculation.costs.reading = max(overhead, _FADES * speculation.costs.reading)
        if deepest:
            speculation.costs.draft.add(deepest, max(0.0, seconds - speculation.drafter.overhead))
        self.proposed = any(map(len, found))
        for index, tree in zip(asked, found, strict=True):
            nothing[index] = tracks[index].whole = tree
        kept = speculation.lengths.trim(progress, nothing, speculation.costs, rows, seconds)
        # Calls with a cache of their own plan steps before this one is computed.
        self._promised, self._overhead = speculation.costs.promised, speculation.drafter.overhead
        idle = time.perf_counter() - began - seconds
        speculation.costs.idle += 0.1 * (idle - speculation.costs.idle)
        return kept

    def _draw(self, sequence: Speculated) -> Draw | None:
        """How its tokens are proposed; None: as guesses."""
        options, source = sequence.options, sequence.generator
        # A seed promises a text: where one is given, the target chooses every token itself, with the numbers of plain decoding.
        drawn = source is not None and options.seed is None and self._speculation.drafter.draws
        return Draw(options, source) if drawn and source is not None else None

    def _track(self, text: Text) -> Track:
        track = self._tracks.get(id(text))
        if track is None:
            state = self._speculation.guarded(self._speculation.drafter.begin, text)
            track = self._tracks[id(text)] = Track(state, Progress(Belief(self._speculation.costs.belief)))
        return track

    def _checked(self, trees: Sequence[Tree], asks: Sequence[Ask]) -> list[Tree] | None:
        """The trees as the engine can verify them; a drafter whose trees are none is switched off."""
        if len(trees) != len(asks):
            self._speculation.switch_off(f"it gave {len(trees)} trees for {len(asks)} sequences")
            return None
        checked = []
        for tree, ask in zip(trees, asks, strict=True):
            wrong = _wrong(tree, self._engine.vocab_size)
            if wrong is not None:
                self._speculation.switch_off(wrong)
                return None
            tree = tree.first(ask.nodes, ask.depth)
            checked.append(tree if self._engine.trees or tree.is_chain else tree.main_chain())
        return checked

    # ---------------------------------------------------------------- after it
    def timed(self, rows: int, seconds: float, drafting: float, tokens: int) -> None:
        """A step of decoding sequences alone took so long, besides what drafting for it took, and wrote so many tokens."""
        if self._slept % _SELDOM:
            return
        self._speculation.costs.step.add(rows, seconds)
        promised, self._promised = self._promised, 0.0
        self._speculation.costs.kept(promised, tokens, seconds + drafting - self._overhead)

    def accept(self, tree: Tree, target: TargetLogits) -> Verdict:
        """Which nodes of a tree are accepted."""
        rule = self._speculation.rule if len(tree) else Exact()
        return rule.accept(tree, target)

    def learn(self, verified: Verified, stats: GenerationStats) -> None:
        """After the new tokens are at the sequence's end; what became of the draft is counted in `stats`."""
        tree, path, new = verified.tree, verified.path, verified.new
        if len(tree):
            stats.count_draft(tree, path, min(len(new), len(path)))
        if not self.on:
            return
        track = self._track(verified.text)
        if len(track.whole):
            track.progress.belief.observe(track.whole, new)
            self._speculation.costs.belief.observe(track.whole, new)
        if self.on:
            self._speculation.guarded(self._speculation.drafter.learn, track.state, verified)

    def read(self, text: Text, start: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        """Tokens of a prompt were computed."""
        if self.on:
            self._speculation.guarded(self._speculation.drafter.read, self._track(text).state, start, tokens, hidden)

    def end(self, text: Text) -> None:
        """The sequence is finished."""
        track = self._tracks.pop(id(text), None)
        if track is not None and self.on:
            self._speculation.guarded(self._speculation.drafter.end, track.state)

    def leave(self, text: Text) -> None:
        """The sequence was thrown away, maybe in the middle of somebody's turn: it is ended in the next one."""
        track = self._tracks.pop(id(text), None)
        if track is not None:
            self._speculation.left.append(track.state)

    def close(self) -> None:
        """No sequence is left."""
        if self._slept:
            self._speculation.lengths.rested((), self._speculation.costs, self._slept)
            self._slept = 0


def likeliest(logits: torch.Tensor) -> list[int] | None:
    """The most likely token of every row at once; None where a row holds a NaN."""
    if logits.device.type != "cpu":
        return None if bool(torch.isnan(logits.amax()).any()) else logits.argmax(-1).tolist()
    tokens, broken = greedy(logits)
    return None if broken else tokens


def _wrong(tree: Tree, vocabulary: int) -> str | None:
    """What is wrong with a tree; None: nothing."""
    if len(tree.parents) != len(tree.tokens) or (tree.chances and len(tree.chances) != len(tree.tokens)):
        return "a tree has not as many parents or chances as tokens"
    for index, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if not 0 <= token < vocabulary:
            return f"it proposed token {token} of a vocabulary of {vocabulary}"
        if not ROOT <= parent < index:
            return f"node {index} of a tree comes before its parent {parent}"
    if len(set(zip(tree.parents, tree.tokens, strict=True))) < len(tree.tokens):
        return "a tree has the same token twice below a node"
    return None
