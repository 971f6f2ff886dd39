"""Page table of a KV cache: reference counts, and full pages that several sequences begin with.

Only full pages are shared. Nothing is ever written to a full page, so none is copied.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

ROOT = 0  # the content before the first page


@dataclass(eq=False)
class Content:
    """What a full page holds: `tokens`, after everything that `parent` stands for.

    Attributes:
        name: a number that no other content ever gets, so that (parent, tokens) names a whole prefix exactly: prefixes are
            compared token by token (a dict compares keys that hash alike), and never by a hash alone.
        ready: its keys and values are computed; False while the sequence that came first still has to.
    """

    name: int
    parent: int
    tokens: tuple[int, ...]
    page: int
    ready: bool


class Pages:
    """`count` pages of `size` positions with reference counts.

    A page is taken in this order: freed pages of no use to others, pages never used yet (whose memory the engine has not
    touched), then full pages that nobody holds, the one longest unused first.

    Attributes:
        touched: pages used so far, which is what the pool takes of memory.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size
        self.touched = 0
        self._holders = [0] * count
        self._blank: list[int] = []
        self._unused: OrderedDict[int, None] = OrderedDict()  # full pages nobody holds, longest unused first
        self._contents: dict[tuple[int, tuple[int, ...]], Content] = {}
        self._on: list[Content | None] = [None] * count
        self._names = ROOT

    # ---------------------------------------------------------------- taking and giving back
    @property
    def available(self) -> int:
        """Pages that could be taken now."""
        return len(self._blank) + self.count - self.touched + len(self._unused)

    def take(self) -> int:
        """A page to write to; `available` must be above 0."""
        if self._blank:
            page = self._blank.pop()
        elif self.touched < self.count:
            page = self.touched
            self.touched += 1
        else:
            page, _ = self._unused.popitem(last=False)
            self._forget(page)
        self._holders[page] = 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        """Give a sequence's pages back. The last ones are forgotten first: a prefix is of no use without its beginning."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            content = self._on[page]
            if content is not None and content.ready:
                self._unused[page] = None
            else:
                self._forget(page)
                self._blank.append(page)

    # ---------------------------------------------------------------- sharing
    def find(self, tokens: Sequence[int]) -> list[Content]:
        """The longest run of full pages that `tokens` begin with, computed or about to be."""
        found: list[Content] = []
        parent = ROOT
        for start in range(0, len(tokens) - self.size + 1, self.size):
            content = self._contents.get((parent, tuple(tokens[start : start + self.size])))
            if content is None:
                break
            found.append(content)
            parent = content.name
        return found

    def unused(self, contents: Sequence[Content]) -> int:
        """How many of them nobody holds: holding them makes as many fewer pages `available`."""
        return sum(content.page in self._unused for content in contents)

    def hold(self, content: Content) -> int:
        """One more sequence uses a page that `find` gave; returns it."""
        self._unused.pop(content.page, None)
        self._holders[content.page] += 1
        return content.page

    def announce(self, page: int, parent: int, tokens: Sequence[int]) -> Content:
        """`page` will hold `tokens` when its sequence has computed them. Sequences with the same beginning may wait for it.

        Where another page has or will have the same content, that one's is returned and `page` stays private.
        """
        key = (parent, tuple(tokens))
        content = self._contents.get(key)
        if content is None:
            self._names += 1
            content = Content(self._names, parent, key[1], page, ready=False)
            self._contents[key] = self._on[page] = content
        return content

    def settle(self, page: int, content: Content) -> int:
        """`page` now has all its tokens' keys and values. Returns the page to use from now on.

        That is another one where two sequences came to the same content, which then takes one page.
        """
        if content.page == page:
            content.ready = True
            return page
        if not content.ready or self._on[content.page] is not content:
            return page
        self.hold(content)
        self.release([page])
        return content.page

    def _forget(self, page: int) -> None:
        content = self._on[page]
        if content is not None:
            self._on[page] = None
            del self._contents[content.parent, content.tokens]


@dataclass(eq=False)
class PrefixCache:
    """A pool that outlives a call: sequences of the next one read their prompts only from where they differ from what it holds.

    Attributes:
        table: which page holds what; None: there is no pool yet.
        pool: of the engine.
        drafts: whether the pool was made for drafts.
        lock: of the call that uses it. Another one at the same time has a pool of its own.
    """

    table: Pages | None = None
    pool: Any = None
    drafts: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def holds(self, count: int) -> bool:
        """Whether there is a pool of `count` pages."""
        return self.table is not None and self.table.count >= count

    def take(self, table: Pages, drafts: bool, make: Callable[[int, bool], Any]) -> tuple[Pages, Any]:
        """The table and the pool of a call that would have had `table`; a new pool, from `make`, where this one does not serve."""
        if not self.holds(table.count) or self.drafts != drafts:
            self.table = self.pool = None  # before memory is taken for the next
            self.pool = make(table.count, drafts)
            self.table, self.drafts = table, drafts
        assert self.table is not None
        return self.table, self.pool
