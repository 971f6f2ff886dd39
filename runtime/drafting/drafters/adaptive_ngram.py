"""Adaptive draft-verification: a tri-gram model of what the target writes, searched for branches that are likely or little explored."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Annotated, ClassVar

from annotated_types import Interval

from runtime.config.settings import Count
from runtime.drafting.drafters.base import Ask, Text
from runtime.drafting.drafters.ngrams import GuessDrafter, Guessed
from runtime.drafting.drafters.tables.odds import Guesses
from runtime.drafting.drafters.tables.token_trie import TokenTrie, blended
from runtime.sampling.tree import ROOT

_KINDS = 16  # of guesses, by their probability in the model


@dataclass(eq=False)
class AdaptiveNgram(GuessDrafter):
    """Counts of tri-grams, bi-grams and tokens are brought up to date with every verified token; what follows the last two is their
    blend. Branches are found by a tree search that weighs what is known to be likely against what was not looked at (Adaptive
    Draft-Verification: Liu et al., arXiv 2407.12021).

    The search is a Monte Carlo tree search without chance: as often as there are nodes wanted it goes down from the root, always to
    the child of the largest Q + `exploration` * P * sqrt(N) / (1 + n), and adds the first that is not in the tree yet. P is the
    child's probability in the model, n and N are how often it and its parent were passed, and Q the mean of what was found there: P
    at the end of a way, and above it P times one plus what was found below, halved. So with `exploration` at 0 it follows the
    likeliest branch down, and with more of it branches become wider.

    Attributes:
        exploration: how much what was seldom passed is preferred (PUCT's constant).
        width: most branches that go on from a token.
        capacity: most n-grams; beyond it those that are not seen again are dropped.
        prompt: most tokens of a prompt, its last ones, that are counted, too.
    """

    name: ClassVar[str] = "adaptive-ngram"
    exploration: Annotated[float, Interval(ge=0, le=1000)] = 3.0
    width: Count = 4
    capacity: Annotated[int, Interval(ge=1 << 10, le=1 << 24)] = 1 << 17
    prompt: Annotated[int, Interval(ge=0, le=1 << 24)] = 1 << 14

    def __post_init__(self) -> None:
        super().__post_init__()
        self._counts = self.trie = TokenTrie(3, self.capacity)

    def begin(self, text: Text) -> Guessed:
        state = super().begin(text)
        self._counts.read(state.reader, text.tokens[max(0, text.prompt - self.prompt) : text.prompt])
        return state

    def guess(self, state: Guessed, ask: Ask) -> Guesses:
        search = _Search(self, ask)
        for _ in range(ask.nodes):
            if not search.once():
                break
        return search.guesses

    def following(self, last: tuple[int, ...]) -> list[tuple[int, float]]:
        """What comes after the last two tokens (or the one), and how likely."""
        contexts = []
        for tokens in (last, last[1:]) if len(last) > 1 else (last,):
            node = self._counts.find(tokens)
            if node is not None:
                contexts.append(self._counts.followers(node))
        return [(token, chance) for token, chance, _ in blended(contexts, self.width)]


@dataclass(eq=False, slots=True)
class _Branch:
    """A child in the search; in the tree once it was chosen."""

    last: tuple[int, ...]
    token: int
    probability: float
    reach: float
    depth: int
    node: int | None = None
    passed: int = 0
    found: float = 0.0
    below: list[_Branch] | None = None  # None: not looked up yet


class _Search:
    """One tree."""

    def __init__(self, model: AdaptiveNgram, ask: Ask) -> None:
        self._model, self._ask = model, ask
        self.guesses = Guesses()
        self._root = _Branch(tuple(ask.text.tokens[-2:]), -1, 1.0, 1.0, 0, ROOT)

    def once(self) -> bool:
        """Add one node; False if there is none."""
        way = [self._root]
        while True:
            at = way[-1]
            if at.below is None:
                at.below = self._children(at)
            if not at.below:  # exhausted: it is passed no more
                way.pop()
                if not way:
                    return False
                siblings = way[-1].below
                assert siblings is not None
                siblings.remove(at)
                continue
            scale = self._model.exploration * sqrt(at.passed + 1)
            best, most = at.below[0], -1.0
            for branch in at.below:
                n = branch.passed
                score = scale * branch.probability / (1 + n) + (branch.found / n if n else 0.0)
                if score > most:
                    best, most = branch, score
            way.append(best)
            if best.node is None:
                self._add(best, way[-2])
                break
        found = 0.0
        for branch in reversed(way):
            found = branch.probability if branch is way[-1] else branch.probability * (1 + found) / 2
            branch.passed += 1
            branch.found += found
        return True

    def _children(self, at: _Branch) -> list[_Branch]:
        if at.depth >= self._ask.depth or at.reach < self._ask.least:
            return []
        last = at.last if at.node == ROOT else (*at.last[-1:], at.token)
        return [_Branch(last, token, p, at.reach, at.depth + 1) for token, p in self._model.following(last)]

    def _add(self, branch: _Branch, above: _Branch) -> None:
        kind, parent = min(int(branch.probability * _KINDS), _KINDS - 1), above.node
        assert parent is not None
        chance = self._ask.state.odds.chance(kind, branch.probability)
        branch.node = self.guesses.add(branch.token, parent, chance, kind, branch.probability)
        branch.reach = above.reach * chance
