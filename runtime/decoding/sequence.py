"""One sequence in the scheduler: its tokens, how many of them are in the cache, and the pages that hold them."""

from __future__ import annotations

from collections.abc import Sequence as Ids

import torch

from runtime.decoding.pages import ROOT, Content, Pages
from runtime.engines.base import Chunk
from runtime.sampling.output import SequenceOutput
from runtime.sampling.tree import Tree


class Sequence:
    """A prompt and what has been added to it.

    Attributes:
        tokens: ids of the prompt and of the output so far.
        prompt: how many of them the caller gave.
        computed: how many of them are in the cache.
        high: the most `computed` has been; less after a preemption.
        pages: in order. contents: what the full ones among them hold, or will.
    """

    def __init__(self, prompt: Ids[int], output: SequenceOutput, generator: torch.Generator | None) -> None:
        self.tokens = list(prompt)
        self.prompt = len(prompt)
        self.output = output
        self.generator = generator
        self.seen: torch.Tensor | None = None
        self.high = 0
        self.reset()

    def reset(self) -> None:
        """Nothing is in the cache."""
        self.computed = 0
        self.settled = 0
        self.pages: list[int] = []
        self.contents: list[Content] = []
        self.awaited: Content | None = None

    @property
    def rest(self) -> int:
        """Tokens that are not in the cache: one while decoding, more while the prompt is read."""
        return len(self.tokens) - self.computed

    @property
    def decodes(self) -> bool:
        """Whether its prompt and all that it wrote is read, but for the last token."""
        return self.rest == 1 and len(self.tokens) > self.prompt

    @property
    def waits(self) -> bool:
        """Whether another sequence still computes pages that this one shares."""
        return self.awaited is not None and not self.awaited.ready

    def enter(self, pages: Pages, spare: int) -> bool:
        """Take pages for all tokens, shared ones where there are any; False (and nothing taken) if fewer than `spare` remain."""
        size = pages.size
        # The last token is always computed: its logits are what comes next.
        found = pages.find(self.tokens[: (len(self.tokens) - 1) // size * size])
        needed = -(-len(self.tokens) // size) - len(found)
        if pages.available - pages.unused(found) < needed + spare:
            return False
        self.pages = [pages.hold(content) for content in found]
        self.pages += [pages.take() for _ in range(needed)]
        self.contents = found
        self.awaited = found[-1] if found else None  # whoever computes the last of them has the ones before
        self.settled = len(found)
        self.computed = len(found) * size
        for place in range(len(found), len(self.tokens) // size):
            self._announce(pages, place)
        return True

    def leave(self, pages: Pages) -> None:
        """Give all pages back."""
        pages.release(self.pages)
        self.reset()

    def full(self, pages: Pages) -> bool:
        """Whether the next token needs another page."""
        return self.computed == len(self.pages) * pages.size

    def chunk(self, count: int, tree: Tree | None = None) -> Chunk:
        """The next `count` tokens, for the engine; `tree`: what may follow the last of them, `count` being 1 then."""
        tokens = self.tokens[self.computed : self.computed + count]
        if tree is None or not len(tree):
            return Chunk(tokens, self.computed, self.pages)
        parents = None if tree.is_chain else [-1, *(parent + 1 for parent in tree.parents)]
        return Chunk([*tokens, *tree.tokens], self.computed, self.pages, 1 + len(tree), parents)

    def stretch(self, count: int, pages: Pages, spare: int) -> int:
        """Pages for `count` drafted tokens after the next one, as long as more than `spare` are free; returns how many have a place."""
        free = len(self.pages) * pages.size - self.computed - 1
        while free < count and pages.available > spare:
            self.pages.append(pages.take())
            free += pages.size
        return max(0, min(count, free))

    def advance(self, count: int, pages: Pages) -> None:
        """`count` more tokens are in the cache."""
        self.computed += count
        while (self.settled + 1) * pages.size <= self.computed:
            place = self.settled
            if place == len(self.contents):
                self._announce(pages, place)
            self.pages[place] = pages.settle(self.pages[place], self.contents[place])
            self.settled += 1

    def _announce(self, pages: Pages, place: int) -> None:
        parent = self.contents[-1].name if self.contents else ROOT
        tokens = self.tokens[place * pages.size : (place + 1) * pages.size]
        self.contents.append(pages.announce(self.pages[place], parent, tokens))
