"""A smaller model drafts: token after token, all texts of a step together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.decoding.drafters.base import Ask, Drafter, Text
from runtime.decoding.drafters.candidates import Candidates
from runtime.decoding.drafters.lanes import Lane, Lanes
from runtime.decoding.tree import Tree
from runtime.kv_cache.bounds import Range, bounded, check_bounds

_FAR = 16  # tokens; a lane that is further behind (nothing was drafted for a while) is brought up to date apart from the draft
_RECENT = 256  # tokens that are compared one by one


@dataclass(eq=False)
class ModelDrafter(Drafter):
    """A chain of tokens from a smaller causal language model of the same vocabulary.

    Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv 2211.17192; Chen et al., arXiv 2302.01318.

    Attributes:
        lanes: of the draft model.
        candidates: from its logits to tokens of the target.
        confidence: a chain ends with a token that the draft gives less than this probability; 0: never. The target verifies that token as
            any other (acceptance "rollback" has BiLD's fallback, where it does not count).
        weights: bytes of the draft's weights that the target does not have.
    """

    name: ClassVar[str] = "chain"
    draws = True

    lanes: Lanes
    candidates: Candidates
    confidence: float = bounded(0.0, Range(0, 1, open_high=True))
    weights: int = 0

    def __post_init__(self) -> None:
        check_bounds(self)
        self.vocabulary = self.candidates.vocabulary

    def begin(self, text: Text) -> Lane:
        return self.lanes.open()

    def end(self, state: Lane) -> None:
        self.lanes.close(state)

    @property
    def memory_bytes(self) -> int:
        return self.weights + self.lanes.nbytes

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        logits = self.start(asks)
        trees = [Tree() for _ in asks]
        reach = [1.0] * len(asks)
        alive = list(range(len(asks)))
        while True:
            following = []
            for row, index in enumerate(alive):
                ask, tree = asks[index], trees[index]
                token, chance = self.choose(logits[row], ask, tree)
                tree.add(token, len(tree) - 1, chance)
                reach[index] *= chance
                sure = chance >= self.confidence and reach[index] >= ask.least
                if sure and len(tree) < min(ask.nodes, ask.depth):
                    following.append(index)
            if not following:
                return trees
            alive = following
            logits = self.lanes.feed(
                [asks[index].state for index in alive], [trees[index].tokens[-1:] for index in alive]
            )

    def choose(self, logits: torch.Tensor, ask: Ask, tree: Tree) -> tuple[int, float]:
        """The next token of a chain, and how likely it is; what it is drawn from goes into the tree."""
        if ask.draw is None:
            tokens, chances = self.candidates.best(logits[None], 1)
            return tokens[0][0], chances[0][0]
        q = self.candidates.distribution(logits, ask.draw, [*ask.text.tokens, *tree.tokens])
        (token,) = self.candidates.draw(q, ask.draw)
        tree.proposals[len(tree) - 1] = q
        return token, float(q[token])

    # ---------------------------------------------------------------- the text so far
    def start(self, asks: Sequence[Ask]) -> torch.Tensor:
        """Logits after the texts, `[asks, vocab]`; what of them was not read is read."""
        return self.lanes.feed([ask.state for ask in asks], self.missing(asks))

    def missing(self, asks: Sequence[Ask]) -> list[list[int]]:
        """What of each text was not read yet, at least its last token. What is more than a few tokens is read here."""
        self.overhead = self.read_far([ask.state for ask in asks], [ask.text.tokens for ask in asks])
        missing = []
        for ask in asks:
            self.lanes.cut(ask.state, _common(ask.state.tokens, ask.text.tokens[:-1]))
            missing.append(ask.text.tokens[len(ask.state.tokens) :])
        return missing

    def read_far(self, lanes: Sequence[Lane], texts: Sequence[Sequence[int]]) -> float:
        """Read all but the last token of those texts of which much is missing, such as a prompt; returns the seconds that it took."""
        far = [
            (lane, text[:-1]) for lane, text in zip(lanes, texts, strict=True) if len(text) - len(lane.tokens) > _FAR
        ]
        started = time.perf_counter()
        if far:
            self.catch_up([lane for lane, _ in far], [text for _, text in far])
        return time.perf_counter() - started

    def catch_up(self, lanes: Sequence[Lane], texts: Sequence[Sequence[int]]) -> None:
        """See to it that each lane holds exactly its text."""
        for lane, tokens in zip(lanes, texts, strict=True):
            self.lanes.cut(lane, _common(lane.tokens, tokens))
        behind = [(lane, rest) for lane, text in zip(lanes, texts, strict=True) if (rest := text[len(lane.tokens) :])]
        if behind:
            self.lanes.feed([lane for lane, _ in behind], [rest for _, rest in behind])


def _common(held: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the common beginning, nearly always nearly all: both are compared from the end of the shorter one's recent part on."""
    length = min(len(held), len(tokens))
    start = max(0, length - _RECENT)
    if held[:start] != tokens[:start]:
        start = 0
    return next((place for place in range(start, length) if held[place] != tokens[place]), length)
