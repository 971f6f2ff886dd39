"""Places of the pages that a sequence still reads as floats, in pools whose older pages are stored in few bits."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.engines.base import Chunk


@dataclass
class _Stay:
    """A sequence that runs.

    Attributes:
        next: from this page on it needs pages plain, and the first ones of the policy.
        counted: pages that are counted as needed by it.
        prompt: pages of its prompt, on which others may begin too.
    """

    next: int
    counted: int
    prompt: int


class PlainPages:
    """Places of plain pages, and which pages have been stored in few bits.

    A query at position p sees a page as it is stored where the page ends at p - recent or before, whatever else is computed with it. So
    a page is stored when such a query comes, and its plain one is given up when no query to come can see it.

    Attributes:
        places: int32 `[pages]`, of each page that is plain (kv_store.h reads it).
        placed: pages that got a place since the last step began.
        most: places that were ever taken. most_needed: that sequences needed at once; others are kept for those to come.
    """

    def __init__(self, count: int, page: int, first: int, recent: int, size: int) -> None:
        """`page`: positions of one. `first`: pages of a sequence that stay plain. `size`: bytes of a place."""
        self.places = torch.zeros(count, dtype=torch.int32)
        self.placed: list[int] = []
        self.most = self.most_needed = 0
        self._page, self._first, self._recent, self._size = page, first, recent, size
        self._at: dict[int, int] = {}
        self._free: list[int] = []  # a heap: the lowest first, so that few places are ever touched
        self._stored: set[int] = set()
        self._lost: set[int] = set()  # pages that are neither stored nor plain any more
        self._stays: dict[int, _Stay] = {}  # of sequences, by the first page that is theirs
        self._needed: dict[int, int] = {}  # by so many sequences
        self._idle: OrderedDict[int, None] = OrderedDict()  # pages with places that none needs, the longest so first
        self._idle_bytes = math.inf  # that they may take

    @property
    def bytes(self) -> int:
        """Memory of the places that sequences needed at once."""
        return self.most_needed * self._size

    # ---------------------------------------------------------------- a step
    def begin(self, chunks: Sequence[Chunk], drafts: bool = False) -> list[int]:
        """Places for what chunks write; returns the pages that must be stored in few bits in this step.

        `drafts`: all that is written will be written again.
        """
        found: dict[int, bool] = {}
        self.placed = []
        if not drafts:
            for chunk in chunks:
                self._pass(chunk)
        for chunk in chunks:
            begin = chunk.slot + chunk.cached
            end = begin + len(chunk.tokens)
            for index in range(begin // self._page, (end - 1) // self._page + 1):
                page = chunk.pages[index]
                if index * self._page >= begin:  # new, or written again
                    self._stored.discard(page)
                    self._lost.discard(page)
                if page not in self._at:
                    self._take(page)
            for index in range(self._begin_of_recent(begin), (begin - 1) // self._page + 1):
                if chunk.pages[index] not in self._at:
                    raise RuntimeError("a page that a step reads plain is not there")  # a mistake in this file
            # What is drafted may be taken back: a page that it fills is stored again.
            final = 0 if drafts else end if chunk.outputs == 1 and chunk.parents is None else chunk.slot
            index = (end - 1 - self._recent) // self._page - 1
            while index >= self._first and chunk.pages[index] not in self._stored:
                page = chunk.pages[index]
                found[page] = found.get(page, False) or (index + 1) * self._page <= final
                index -= 1
        self._stored.update(page for page, final in found.items() if final)
        self.most_needed = max(self.most_needed, len(self._at) - len(self._idle))
        return list(found)

    def _begin_of_recent(self, position: int) -> int:
        """The first page that a query at `position` sees plain, of those after the first ones that always are."""
        return max(self._first, (position - self._recent) // self._page)

    def _pass(self, chunk: Chunk) -> None:
        """Count the pages that are new to a sequence, and give up those that neither it nor one that begins on its last full page needs."""
        stay, pages = self._stays.setdefault(self._key(chunk.pages), _Stay(self._first, 0, 0)), chunk.pages
        for page in pages[stay.counted :]:
            self._need(page)
        stay.counted = len(pages)
        end = self._begin_of_recent(chunk.slot // self._page * self._page)
        while stay.next < end and pages[stay.next] in self._stored:
            page = pages[stay.next]
            if self._spare(page):
                if stay.next < stay.prompt:
                    self._idle[page] = None
                else:
                    heapq.heappush(self._free, self._at.pop(page))
            stay.next += 1
        self._trim()

    def _take(self, page: int) -> None:
        if not self._free:
            self._free.append(self.most)
            self.most += 1
        self._at[page] = place = heapq.heappop(self._free)
        self.places[page] = place
        self.placed.append(page)

    def slot(self, page: int, offset: int) -> int:
        """Of a position of a plain page, among those of all places."""
        return self._at[page] * self._page + offset

    # ---------------------------------------------------------------- sequences that lose tokens
    def write(self, pages: Sequence[int], held: int) -> None:
        """Places for the pages of a sequence of so many tokens that will not be stored."""
        for index, page in enumerate(pages[: -(-held // self._page)]):
            if not self._is_stored(index, held) and page not in self._at:
                self._take(page)

    def replace(self, pages: Sequence[int], into: Sequence[int], held: int) -> None:
        """What stays of a sequence, so many tokens, is in other pages now, or in the same at the same place."""
        old = self._stays.pop(self._key(pages), None)
        self._stays[into[0]] = _Stay(self._first, len(into), 0)
        for index, page in enumerate(into):
            self._need(page)
            self._lost.discard(page)
            (self._stored.add if self._is_stored(index, held) else self._stored.discard)(page)
        self.most_needed = max(self.most_needed, len(self._at) - len(self._idle))
        if old is not None:
            self._give_up(old, pages)

    def _is_stored(self, index: int, held: int) -> bool:
        return index >= self._first and (index + 1) * self._page + self._recent < held

    # ---------------------------------------------------------------- sequences that share pages
    def usable(self, pages: Sequence[int]) -> int:
        """After how many of these pages, which other sequences compute or have computed, one can begin."""
        count = next((place for place, page in enumerate(pages) if page in self._lost), len(pages))
        while count and any(
            page in self._stored and page not in self._at
            for page in pages[self._begin_of_recent(count * self._page) : count]
        ):
            count -= 1
        return count

    def enter(self, pages: Sequence[int], shared: int) -> None:
        """A sequence of these pages will begin after the first `shared`: until it leaves, what it sees plain is kept for it."""
        begin = min(shared, self._begin_of_recent(shared * self._page))
        self._stays[pages[shared]] = _Stay(max(begin, self._first), len(pages), len(pages))
        for page in (*pages[: min(begin, self._first)], *pages[begin:]):
            self._need(page)

    def leave(self, pages: Sequence[int]) -> None:
        """The sequence of these pages is gone; another may begin on what it has computed."""
        stay = self._stays.pop(self._key(pages), None)
        if stay is not None:  # it has computed something
            self._give_up(stay, pages)

    def _give_up(self, stay: _Stay, pages: Sequence[int]) -> None:
        first = min(self._first, stay.counted)
        for page in (*pages[:first], *pages[max(self._first, stay.next) : stay.counted]):
            if self._spare(page):
                self._idle[page] = None
        self._trim()

    def keep(self, memory: float) -> None:
        """Bytes that places may take of pages that no sequence needs."""
        self._idle_bytes = memory
        self._trim()

    def _key(self, pages: Sequence[int]) -> int:
        """Of a sequence: the first page that it does not share, where it has entered; else its first page."""
        return next((page for page in reversed(pages) if page in self._stays), pages[0])

    def _need(self, page: int) -> None:
        self._needed[page] = self._needed.get(page, 0) + 1
        self._idle.pop(page, None)

    def _spare(self, page: int) -> bool:
        """One sequence less needs a page; whether it has a place that none needs any more."""
        self._needed[page] -= 1
        if self._needed[page]:
            return False
        del self._needed[page]
        return page in self._at

    def _trim(self) -> None:
        while len(self._idle) * self._size > self._idle_bytes:
            page, _ = self._idle.popitem(last=False)
            heapq.heappush(self._free, self._at.pop(page))
            if page not in self._stored:
                self._lost.add(page)
