"""What tests of drafters share: texts, a target that reveals a fixed text, and loops of drafting, verifying and learning."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from runtime.drafting.drafters.adaptive_ngram import AdaptiveNgram
from runtime.drafting.drafters.base import Ask, Drafter, Verified
from runtime.drafting.drafters.hierarchy import Hierarchy
from runtime.drafting.drafters.lookup import Lookup
from runtime.drafting.drafters.suffix import Suffix
from runtime.drafting.drafters.token_recycling import TokenRecycling
from runtime.drafting.drafters.trie import Trie
from runtime.sampling.tree import ROOT, Tree

VOCABULARY = 40
FREE: dict[str, Callable[..., Drafter]] = {
    "lookup": Lookup,
    "suffix": Suffix,
    "trie": Trie,
    "recycling": TokenRecycling,
    "hierarchy": Hierarchy,
    "adaptive-ngram": AdaptiveNgram,
}


@dataclass
class Words:
    """A text."""

    tokens: list[int]
    prompt: int


@dataclass
class Writing:
    """A text that a target writes which has it by heart: `rest` follows the prompt. On other branches its logits are noise, but for
    tokens that the text has, after which it expects what followed them last.

    Attributes:
        steps: of the target so far. trees: that were drafted, before anything was left out of them.
    """

    drafter: Drafter
    prompt: Sequence[int]
    rest: Sequence[int]
    nodes: int = 16
    depth: int = 8
    vocabulary: int = VOCABULARY
    steps: int = 0
    trees: list[Tree] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.text = Words(list(self.prompt), len(self.prompt))
        self.noise = torch.Generator().manual_seed(0)
        self.state: Any = self.drafter.begin(self.text)
        self._learn(Tree())

    @property
    def done(self) -> bool:
        return len(self.text.tokens) == len(self.prompt) + len(self.rest)

    def step(self, kept: int | None = None) -> Tree:
        """Draft, verify (of the tree only its first `kept` nodes, if given), learn."""
        ask = Ask(self.state, self.text, self.nodes, self.depth)
        (tree,) = self.drafter.draft([ask])
        self.trees.append(tree)
        self._learn(tree if kept is None else tree.first(kept))
        return tree

    def _learn(self, tree: Tree) -> None:
        self.steps += 1
        path, new = walk(tree, self.rest[len(self.text.tokens) - len(self.prompt) :])
        logits = torch.rand(1 + len(tree), self.vocabulary, generator=self.noise)
        after = dict(zip(self.text.tokens, self.text.tokens[1:], strict=False))
        for node, token in enumerate(tree.tokens):
            if token in after:
                logits[1 + node, after[token]] = 2.0
        for row, token in zip([0, *(1 + node for node in path)], new, strict=False):
            logits[row, token] = 3.0
        self.text.tokens += new
        self.drafter.learn(self.state, Verified(self.text, tree, path, new, logits))

    def finish(self) -> Writing:
        while not self.done:
            self.step()
        self.drafter.end(self.state)
        return self

    @property
    def pace(self) -> float:
        """Tokens a step."""
        return len(self.rest) / self.steps


def walk(tree: Tree, coming: Sequence[int]) -> tuple[list[int], list[int]]:
    """The path that a target accepts which writes `coming`, and what it adds to the text."""
    path: list[int] = []
    children, node = tree.children(), ROOT
    for place, token in enumerate(coming):
        right = [child for child in children.get(node, ()) if tree.tokens[child] == token]
        if not right:
            return path, list(coming[: place + 1])
        node = right[0]
        path.append(node)
    return path, list(coming)


def branches(tree: Tree) -> list[list[int]]:
    """The tokens of each path from the root to a leaf."""
    leaves = [node for node in range(len(tree)) if node not in set(tree.parents)]
    return [[tree.tokens[node] for node in tree.path(leaf)] for leaf in leaves]


def check_tree(tree: Tree, nodes: int, depth: int) -> None:
    """All that holds of trees of guesses."""
    assert len(tree) == len(tree.parents) <= nodes
    assert not tree.proposals
    assert all(ROOT <= parent < index for index, parent in enumerate(tree.parents))
    assert max(tree.depths(), default=0) <= depth
    assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree)
    assert len(tree.chances) == len(tree)
    assert all(0 <= chance <= 1 for chance in tree.chances)


def random_text(seed: int, length: int, letters: int = 3) -> list[int]:
    """Few letters, pieces of which come again."""
    source = random.Random(seed)
    text: list[int] = []
    while len(text) < length:
        if len(text) > 4 and source.random() < 0.4:
            start = source.randrange(len(text) - 2)
            text += text[start : start + source.randrange(2, 12)]
        else:
            text.append(source.randrange(letters))
    return text[:length]


def occurrences(tokens: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Ends of all occurrences, the latest first: a plain scan."""
    size = len(wanted)
    return [
        end for end in range(len(tokens) - 1, size - 2, -1) if list(tokens[end - size + 1 : end + 1]) == list(wanted)
    ]
