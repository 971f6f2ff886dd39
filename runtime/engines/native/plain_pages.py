"""Which pages of a pool are plain: those that tokens are written to, and those that some sequence still has among its newest tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch

from runtime.engines.base import Chunk
from runtime.engines.native.storage import PageStorage
from runtime.kernels.cpu.attention import PAGE

_MOST_PAGES = 16  # of a sequence, that a step may write


class PlainPages:
    """Places of plain pages, and which pages have been stored in few bits.

    A query at position p sees a page as it is stored where the page ends at p - recent or before, whatever else is computed with it. So
    a page is stored when such a query comes, and its plain one is given up when no query to come can see it.

    Attributes:
        places: int32 `[pages]`, of each page that is plain (kv_store.h reads it).
        most: places that were ever taken.
    """

    def __init__(self, count: int, storage: PageStorage) -> None:
        self.places = torch.zeros(count, dtype=torch.int32)
        self.most = 0
        self._first, self._recent = storage.first, storage.recent
        self._at: dict[int, int] = {}
        self._free: list[int] = []  # a heap: the lowest first, so that few places are ever touched
        self._stored: set[int] = set()
        self._held: dict[int, int] = {}  # sequences that have still to begin on a page
        self._joining: dict[
            int, tuple[int, list[int]]
        ] = {}  # where they begin, and what they hold, by their first own page

    # ---------------------------------------------------------------- a step
    def begin(self, chunks: Sequence[Chunk]) -> list[int]:
        """Places for what chunks write; returns the pages that must be stored in few bits in this step."""
        found: dict[int, bool] = {}
        for chunk in chunks:
            self._join(chunk)
            self._give_up(chunk)
        for chunk in chunks:
            begin, end = chunk.start + chunk.cached, chunk.start + chunk.cached + len(chunk.tokens)
            for index in range(begin // PAGE, (end - 1) // PAGE + 1):
                page = chunk.pages[index]
                if index * PAGE >= begin:  # new, or written again
                    self._stored.discard(page)
                if page not in self._at:
                    self._take(page)
            for index in range(self._begin_of_recent(begin), (begin - 1) // PAGE + 1):
                if chunk.pages[index] not in self._at:
                    raise RuntimeError("a page that a step reads plain is not there")  # a mistake in this file
            # What is drafted may be taken back: a page that it fills is stored again.
            final = end if chunk.outputs == 1 and chunk.parents is None else chunk.start
            index = (end - 1 - self._recent) // PAGE - 1
            while index >= self._first and chunk.pages[index] not in self._stored:
                page = chunk.pages[index]
                found[page] = found.get(page, False) or (index + 1) * PAGE <= final
                index -= 1
        self._stored.update(page for page, final in found.items() if final)
        return list(found)

    def _begin_of_recent(self, position: int) -> int:
        """The first page that a query at `position` sees plain, of those after the first ones that always are."""
        return max(self._first, (position - self._recent) // PAGE)

    def _give_up(self, chunk: Chunk) -> None:
        """Places that the sequence needs no more, nor one that begins on its last full page."""
        index = self._begin_of_recent(chunk.start // PAGE * PAGE) - 1
        # Those before were given up in the steps before: none has more tokens than so many pages.
        for page in chunk.pages[max(self._first, index - _MOST_PAGES) : max(0, index + 1)]:
            if page in self._at and page in self._stored and page not in self._held:
                heapq.heappush(self._free, self._at.pop(page))

    def _take(self, page: int) -> None:
        if not self._free:
            self._free.append(self.most)
            self.most += 1
        self._at[page] = place = heapq.heappop(self._free)
        self.places[page] = place

    # ---------------------------------------------------------------- sequences that share pages
    def usable(self, pages: Sequence[int]) -> int:
        """After how many of these pages, which other sequences compute or have computed, one can begin."""
        count = len(pages)
        while count and any(
            page in self._stored and page not in self._at for page in pages[self._begin_of_recent(count * PAGE) : count]
        ):
            count -= 1
        return count

    def enter(self, pages: Sequence[int], shared: int) -> None:
        """A sequence of these pages will begin after the first `shared`: what it sees plain is kept until then."""
        self._leave(pages[shared])
        held = list(pages[self._begin_of_recent(shared * PAGE) : shared])
        for page in held:
            self._held[page] = self._held.get(page, 0) + 1
        self._joining[pages[shared]] = shared, held

    def _join(self, chunk: Chunk) -> None:
        index = chunk.start // PAGE
        if chunk.start % PAGE == 0 and chunk.pages[index] in self._joining:
            self._leave(chunk.pages[index])

    def _leave(self, page: int) -> None:
        _, held = self._joining.pop(page, (0, []))
        for each in held:
            self._held[each] -= 1
            if not self._held[each]:
                del self._held[each]
