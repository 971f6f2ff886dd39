"""Page table of a KV cache: reference counts, and full pages that several sequences begin with.

Only full pages are shared. Nothing is ever written to a full page, so none is copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.engines.base import Overhead, Sharing

ROOT = 0  # the content before the first page


@dataclass(eq=False)
class Content:
    """What a full page holds: `tokens`, after everything that `parent` stands for.

    Attributes:
        name: a number that no other content ever gets, so that (parent, tokens) names a whole prefix exactly: prefixes are
            compared token by token (a dict compares keys that hash alike), and never by a hash alone.
        ready: its keys and values are computed; False while the sequence that came first still has to.
        lost: that sequence left before it had: nobody computes it, and whoever waits for it must look again.
    """

    name: int
    parent: int
    tokens: tuple[int, ...]
    page: int
    ready: bool = False
    lost: bool = False


class Pages:
    """`count` pages of `size` positions with reference counts.

    A page is taken in this order: freed pages of no use to others, up to `kept` pages never used yet (whose memory the engine has
    not touched), full pages that nobody holds, the one longest unused first, and then the other pages never used yet.

    Attributes:
        touched: pages used so far, which is what the pool takes of memory.
        lost: a page was abandoned that others may wait for; for the scheduler to reset.
        sharing: what the engine says to sequences that share pages; None: nothing.
        kept: pages up to which memory is taken only to remember what nobody holds.
        overhead: of the pool, for which `available` leaves room. sequences: how many run.
    """

    def __init__(self, count: int, size: int, kept: int | None = None, overhead: Overhead = Overhead()) -> None:  # noqa: B008
        self.count = count
        self.size = size
        self.overhead = overhead
        self.sequences = 0
        self.kept = count if kept is None else kept
        self.touched = 0
        self.lost = False
        self.sharing: Sharing | None = None
        self._holders: list[int] = []  # of the touched ones, as `_on`
        self._blank: list[int] = []
        self._unused: OrderedDict[int, None] = OrderedDict()  # full pages nobody holds, longest unused first
        self._contents: dict[tuple[int, tuple[int, ...]], Content] = {}
        self._on: list[Content | None] = []
        self._names = ROOT

    # ---------------------------------------------------------------- taking and giving back
    @property
    def available(self) -> int:
        """Pages that could be taken now."""
        overhead = self.overhead.step + self.sequences * self.overhead.sequence
        return len(self._blank) + self.count - self.touched + len(self._unused) - overhead

    def take(self) -> int:
        """A page to write to; `available` must be above 0."""
        if self._blank:
            page = self._blank.pop()
        elif self.touched < self.count and (self.touched < self.kept or not self._unused):
            page = self.touched
            self._holders.append(0)
            self._on.append(None)
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

    # ---------------------------------------------------------------- writing again
    def is_shared(self, page: int) -> bool:
        """Whether several sequences hold a page."""
        return self._holders[page] > 1

    def is_announced(self, page: int) -> bool:
        """Whether sequences may begin on a page."""
        return self._on[page] is not None

    def disown(self, page: int) -> None:
        """A page that one sequence holds will hold something else."""
        self._forget(page)

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
        if self.sharing is not None:
            del found[self.sharing.usable([content.page for content in found]) :]
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
            content = Content(self._names, parent, key[1], page)
            self._contents[key] = self._on[page] = content
        return content

    def settle(self, page: int, content: Content) -> int:
        """`page` now has all its tokens' keys and values. Returns the page to use from now on.

        That is another one where two sequences came to the same content, which then takes one page.
        """
        if content.page == page:
            content.ready = True
            return page
        if not content.ready or self._on[content.page] is not content or self.sharing is not None:
            return page
        self.hold(content)
        self.release([page])
        return content.page

    def abandon(self, page: int) -> None:
        """The sequence that was to compute `page` goes before it has."""
        content = self._on[page]
        if content is not None and not content.ready:
            content.lost = self.lost = True
            self._forget(page)

    def _forget(self, page: int) -> None:
        content = self._on[page]
        if content is not None:
            self._on[page] = None
            del self._contents[content.parent, content.tokens]
