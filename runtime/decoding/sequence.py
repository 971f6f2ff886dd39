"""One sequence in the scheduler: its tokens, how many of them are in the cache, and the pages that hold them; and the call it is of."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from collections.abc import Sequence as Ids
from contextlib import suppress

import torch

from runtime.decoding.pages import ROOT, Content, Pages
from runtime.drafting.speculation import Speculation
from runtime.engines.base import Chunk, Retention
from runtime.sampling.options import GenerationOptions
from runtime.sampling.output import SequenceOutput
from runtime.sampling.stats import GenerationStats
from runtime.sampling.tree import Tree

AHEAD = 16  # tokens of a stream that are computed before it is read again, in steps that others need


class Sequence:
    """A prompt and what has been added to it.

    Attributes:
        call: that it is of. age: its place in the order of all calls' sequences, the oldest first.
        tokens: ids of the prompt and of the output so far.
        prompt: how many of them are the caller's and the engine's prefix. prefix: how many of these are the engine's.
        computed: how many of them are in the cache.
        high: the most `computed` has been; less after a preemption.
        pages: in order. contents: what the full ones among them hold, or will.
        retention: of what the engine evicts or leaves unread; None: nothing. public: tokens up to which others may begin on its pages.
    """

    def __init__(
        self, prompt: Ids[int], output: SequenceOutput, generator: torch.Generator | None, prefix: Ids[int] = ()
    ) -> None:
        self.tokens = [*prefix, *prompt]
        self.prompt, self.prefix = len(self.tokens), len(prefix)
        self.output = output
        self.generator = generator
        self.seen: torch.Tensor | None = None
        self.high = 0
        self.age = (0.0, 0)
        self.call: Call
        self.reset()

    @property
    def options(self) -> GenerationOptions:
        """Of its call."""
        return self.call.options

    @property
    def stats(self) -> GenerationStats:
        """Of its call."""
        return self.call.stats

    def reset(self) -> None:
        """Nothing is in the cache."""
        self.computed = 0
        self.settled = 0
        self.pages: list[int] = []
        self.contents: list[Content] = []
        self.awaited: Content | None = None
        self.retention: Retention | None = None
        self.public: float = math.inf

    @property
    def held(self) -> int:
        """Slots of its pages that are taken: by all that was computed and not evicted."""
        return self.computed - (0 if self.retention is None else self.retention.evicted)

    @property
    def reach(self) -> float:
        """Tokens that can be computed before some are evicted."""
        boundary = None if self.retention is None else self.retention.boundary
        return math.inf if boundary is None else boundary - self.computed

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

    def enter(self, pages: Pages, spare: int, retention: Retention | None = None) -> bool:
        """Take pages for all tokens, shared ones where there are any; False (and nothing taken) if fewer than `spare` remain."""
        size = pages.size
        # The last token is always computed: its logits are what comes next.
        shared, slots, public = len(self.tokens) - 1, len(self.tokens), math.inf
        if retention is not None:
            end, own = retention.prompt if retention.boundary is None else retention.boundary, retention.own
            slots = retention.most(len(self.tokens) - retention.prompt)
            shared, public = min(shared, end - own), end if own < end else 0
        found = pages.find(self.tokens[: shared // size * size])
        needed = -(-slots // size) - len(found)
        if pages.available - pages.unused(found) < needed + spare + pages.overhead.sequence:
            return False
        pages.sequences += 1
        self.pages = [pages.hold(content) for content in found]
        self.pages += [pages.take() for _ in range(needed)]
        self.retention, self.public = retention, public
        if pages.sharing is not None:
            pages.sharing.enter(self.pages, len(found))
        self.contents = found
        self.awaited = found[-1] if found else None  # whoever computes the last of them has the ones before
        self.settled = len(found)
        self.computed = len(found) * size
        for place in range(len(found), int(min(public, len(self.tokens))) // size):
            self._announce(pages, place)
        return True

    def evict(self, pages: Pages, gather: Callable[[Retention, Ids[int], Ids[int]], bool]) -> bool:
        """Gather what stays where the engine evicts tokens now, and give the other pages back; False: there is no room.

        Args:
            gather: as `Engine.evict`, without the pool.
        """
        retention, before = self.retention, self.pages
        assert retention is not None
        into = self._pages_of_rest(retention, pages)
        if into is None:
            return False
        if gather(retention, before, into):
            self.pages = into[: -(-(self.held + self.rest) // pages.size)]
            same = retention.fixed // pages.size
            self.contents, self.settled = self.contents[:same], min(self.settled, same)
            self.public = self.settled * pages.size
        stays = set(self.pages)
        pages.release([page for page in dict.fromkeys([*before, *into]) if page not in stays])
        if retention.moves:  # what is computed again goes on at once, until tokens are evicted next
            wanted = -(-(self.held + int(min(self.rest, self.reach))) // pages.size)
            self.pages = self.pages + [pages.take() for _ in range(wanted - len(self.pages))]
        return True

    def _pages_of_rest(self, retention: Retention, pages: Pages) -> list[int] | None:
        """Pages for what stays where tokens are evicted now; None: there is no room.

        Pages that others hold stay as they are, and so do those that others may begin on, as long as there is room.
        """
        after = retention.left + (1 if retention.moves else self.rest)
        count, same = (-(-n // pages.size) for n in (after, retention.fixed))
        fixed, rest = self.pages[:same], self.pages[same:count]
        if retention.moves:
            rest = self.pages[-(-self.held // pages.size) :][: count - same]
            taken = count - same - len(rest)
            if pages.available < taken:
                return None
            return fixed + rest + [pages.take() for _ in range(taken)]
        if retention.left >= self.held:
            return self.pages
        if pages.available < sum(pages.is_shared(page) for page in rest):
            return None
        for place, page in sorted(enumerate(rest), key=lambda each: not pages.is_shared(each[1])):
            if pages.is_shared(page) or (pages.is_announced(page) and pages.available > 0):
                rest[place] = pages.take()
            else:
                pages.disown(page)
        return fixed + rest

    def leave(self, pages: Pages) -> None:
        """Give all pages back."""
        for page, content in zip(self.pages[self.settled :], self.contents[self.settled :], strict=False):
            if content.page == page:
                pages.abandon(page)
        if pages.sharing is not None and self.pages:
            pages.sharing.leave(self.pages)
        pages.release(self.pages)
        pages.sequences -= bool(self.pages)
        self.reset()

    def restore(self) -> None:
        """Make all of it what its tokens say, nothing of them in the cache: a step was broken off, maybe in the middle of a token."""
        self.reset()
        self.seen = None
        new = self.tokens[self.prompt :]
        self.output.replay(new)
        if self.generator is not None and self.options.seed is not None:
            self.generator.manual_seed(self.generator.initial_seed())
            for _ in new:
                torch.rand((), generator=self.generator, dtype=torch.float64)

    def full(self, pages: Pages) -> bool:
        """Whether the next token needs another page."""
        return self.held == len(self.pages) * pages.size

    def chunk(self, count: int, tree: Tree | None = None) -> Chunk:
        """The next `count` tokens, for the engine; `tree`: what may follow the last of them, `count` being 1 then."""
        tokens = self.tokens[self.computed : self.computed + count]
        if tree is None or not len(tree):
            return Chunk(tokens, self.computed, self.pages, retention=self.retention)
        parents = None if tree.is_chain else [-1, *(parent + 1 for parent in tree.parents)]
        tokens += tree.tokens
        return Chunk(tokens, self.computed, self.pages, 1 + len(tree), parents, retention=self.retention)

    def stretch(self, count: int, pages: Pages, spare: int) -> int:
        """Pages for `count` drafted tokens after the next one, as long as more than `spare` are free; returns how many have a place."""
        free = len(self.pages) * pages.size - self.held - 1
        while free < count and pages.available > spare:
            self.pages.append(pages.take())
            free += pages.size
        return max(0, min(count, free))

    def advance(self, count: int, pages: Pages) -> None:
        """`count` more tokens are in the cache."""
        self.computed += count
        while (self.settled + 1) * pages.size <= min(self.computed, self.public):
            place = self.settled
            if place == len(self.contents):
                self._announce(pages, place)
            self.pages[place] = pages.settle(self.pages[place], self.contents[place])
            self.settled += 1

    def _announce(self, pages: Pages, place: int) -> None:
        parent = self.contents[-1].name if self.contents else ROOT
        tokens = self.tokens[place * pages.size : (place + 1) * pages.size]
        self.contents.append(pages.announce(self.pages[place], parent, tokens))


class Call:
    """The sequences of a call (or of a group of its prompts), and how far they are.

    Attributes:
        options, stats, speculation: of the call; its sequences share steps with others', which may have different ones.
        streams: each token is news, not only the end of a sequence.
        pages: most that one of its sequences takes.
        open: sequences that have not ended.
        over: none is left, or `error` ended them. news: there is something to read. Both are for the thread of the call.
        waiting: that thread wants news, since the time `since`. closed: it wants no more.
        joined: the scheduler knows its sequences.
        ahead: tokens that were written since it last read.
        held: most pages that its sequences held at once. started: `Engine.usage` when the first came in.
    """

    def __init__(
        self,
        sequences: Ids[Sequence],
        options: GenerationOptions,
        stats: GenerationStats,
        speculation: Speculation | None = None,
        *,
        streams: bool = False,
        pages: int = 1,
    ) -> None:
        self.sequences = list(sequences)
        for sequence in self.sequences:
            sequence.call = self
        self.options, self.stats, self.speculation = options, stats, speculation
        self.streams, self.pages = streams, pages
        #: What `next_tokens` reads of the options: sequences that agree in it are drawn together.
        self.sampling = (
            options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty,
        )  # fmt: skip
        self.open = len(self.sequences)
        self.over = self.news = self.waiting = self.closed = self.joined = False
        self.error: BaseException | None = None
        self.since: float | None = None
        self.ahead = self.held = 0
        self.started: tuple[int, int] | None = None
        self._bell = threading.Lock()
        self._bell.acquire()

    @property
    def paused(self) -> bool:
        """Whether nothing more is to be computed until its stream is read."""
        return self.streams and self.ahead >= AHEAD and not self.waiting

    def ring(self) -> None:
        """Wake its thread, or keep it from falling asleep."""
        with suppress(RuntimeError):  # it is rung already
            self._bell.release()

    def sleep(self, seconds: float) -> None:
        """Until somebody rings."""
        self._bell.acquire(timeout=seconds)

    def account(self, began: float, now: float, decoded: int, rows: int) -> None:
        """A step is done that began then, of whose rows so many were of this call, so many of them new tokens being decoded."""
        if self.since is not None:  # its thread waited for the step to begin, too
            began, self.since = min(began, self.since), now
        stats, seconds = self.stats, now - began
        stats.steps += 1
        stats.decode_seconds += seconds * decoded / rows
        stats.prefill_seconds += seconds * (rows - decoded) / rows
