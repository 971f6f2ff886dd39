"""Sequences that decode together over a pool of pages, and those that wait for a place among them.

A sequence comes in when another ends. One whose beginning is being computed by another waits for that instead of computing it too.
When pages run out, the youngest gives its own up and is computed again later; its tokens and its random numbers stay, so that its
output is the same. The oldest always gets its way, so that every call ends.
"""

from __future__ import annotations

import math
import weakref
from bisect import insort
from collections.abc import Iterable
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any

from runtime.decoding.memory import kept_bytes, most_pages, pages_of
from runtime.decoding.pages import Pages
from runtime.decoding.sequence import Call, Sequence
from runtime.engines.base import Engine

# Sequences that decode together. Beyond it the weights are read for nothing more, while every sequence takes memory.
MOST_SEQUENCES = 256
_AGE = attrgetter("age")


class Batch:
    """Sequences of any number of calls over one pool.

    Args:
        pages: of the pool, in which each sequence must fit. None: it is for calls to come too, as large as memory allows, and made
            anew when nobody runs and it is too small for a call.
        keep: bytes that such a pool may have taken to be kept between calls; None: a default.

    Attributes:
        pages, pool: made when the first sequence comes in. drafts: whether for drafts.
        running, waiting: sequences, by age.
        keepers: while any of them lives, the pool is kept between calls whatever it takes.
    """

    def __init__(self, engine: Engine, pages: int | None = None, keep: int | None = None) -> None:
        self.engine = engine
        self.pages: Pages | None = None
        self.pool: Any = None
        self.drafts = False
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.keepers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._count, self._keep = pages, keep
        self._most = max(1, min(MOST_SEQUENCES, engine.most_rows // 2))
        self._no_room = False  # for the next in line, until somebody leaves
        self._used = False  # the pool is of an earlier call
        self._time = 0.0  # the age with which a call begins that comes now
        self._numbers = count()

    # ---------------------------------------------------------------- the pool
    def holds(self, pages: int) -> bool:
        """Whether there is a pool of so many pages."""
        table = self.pages
        return table is not None and table.count - table.overhead.step >= pages

    def _make_pool(self, call: Call) -> None:
        """An empty pool in which each sequence of a call fits."""
        engine, total = self.engine, self._count
        self.drop()  # before memory is taken for the next
        if total is None:
            total = most_pages(engine, call.pages, None)
            if engine.context_length is not None:  # more than sequences could ever use
                total = min(
                    total, self._most * pages_of(engine, len(engine.prefix) + engine.context_length + engine.page_size)
                )
            if self._keep is None:
                self._keep = kept_bytes(engine)
        self.drafts = call.speculation is not None
        self.pool = engine.new_pages(total, self.drafts)
        self.pages = Pages(total, engine.page_size, overhead=engine.overhead)
        self.pages.sharing = engine.sharing(self.pool)
        self.set_kept()

    def set_kept(self) -> None:
        """How much memory is taken only for calls to come."""
        pages = self.pages
        if pages is None:
            return
        if self._count is not None:  # all its memory is for those that run
            if pages.sharing is not None:
                pages.sharing.keep(0)
        else:
            kept = math.inf if self.keepers else self._kept
            if pages.sharing is not None:
                pages.sharing.keep(kept / 3)
            pages.kept = int(min(pages.count, kept / self.engine.page_bytes))

    @property
    def _kept(self) -> float:
        """Bytes of pages that may stay between calls: three quarters of all where sharing them takes memory beside (`Sharing.keep`)."""
        shares = self.pages is not None and self.pages.sharing is not None
        return (self._keep or 0) * (0.75 if shares else 1.0)

    def drop(self) -> None:
        """Free the pool. Nobody runs."""
        self.pages = self.pool = None
        self._used = False

    def idle(self) -> None:
        """No call is there: free the pool unless it may stay."""
        self._used = True
        self.set_kept()
        taken = 0 if self.pages is None else self.engine.usage(self.pool, self.pages.touched).bytes
        if self._count is None and not self.keepers and taken > self._kept:
            self.drop()

    # ---------------------------------------------------------------- coming and going
    def join(self, call: Call) -> None:
        """Line a call's sequences up.

        The first of them is next in line, and of several calls each has its turn: thousands of prompts hold up nobody's single one,
        nor do thousands of calls hold up the next prompt of any.
        """
        number = next(self._numbers)
        for place, sequence in enumerate(call.sequences):
            sequence.age = (self._time + place, number)
        self.waiting = sorted([*self.waiting, *call.sequences], key=_AGE)
        call.joined = True

    def remove(self, call: Call) -> None:
        """The call's sequences go, their pages are free."""
        for sequence in self.running:
            if sequence.call is call and self.pages is not None:
                sequence.leave(self.pages)
        self.running = [sequence for sequence in self.running if sequence.call is not call]
        self.waiting = [sequence for sequence in self.waiting if sequence.call is not call]
        self._no_room = False

    def end(self) -> None:
        """Let go of the sequences that have ended."""
        self.running = [sequence for sequence in self.running if not sequence.output.finished]
        self._no_room = False

    def restore(self, sequences: Iterable[Sequence]) -> None:
        """Begin again with those of these that have not ended, with an empty pool."""
        self.drop()
        self.running, self.waiting, self._no_room = [], [], False
        for sequence in sorted(sequences, key=_AGE):
            if not sequence.output.finished:
                sequence.restore()
            if not sequence.output.finished:  # nor with its last token, which was all that was left to read
                self.waiting.append(sequence)

    def put_aside(self, sequence: Sequence) -> None:
        """A sequence gives up its pages, to be computed again."""
        assert self.pages is not None
        self.running.remove(sequence)
        sequence.leave(self.pages)
        insort(self.waiting, sequence, key=_AGE)
        self._no_room = False

    def admit(self) -> None:
        """Let sequences in while the step has rows for them and the pool pages."""
        while self.pages is not None and self.pages.lost:
            self.pages.lost = False
            for sequence in list(self.running):
                if sequence.awaited is not None and sequence.awaited.lost:  # what it waits for was never computed
                    self.put_aside(sequence)
        if not self.waiting:
            return
        active = self._active()
        if self._no_room and len(active) == len(self.running) > 0:
            return
        rows, place, reserved = self.engine.most_rows - sum(sequence.rest for sequence in active), 0, len(active)
        while place < len(self.waiting) and rows > 0 and reserved < self._most:
            sequence = self.waiting[place]
            if sequence.call.paused:
                place += 1
                continue
            if not self._enter(sequence, reserved):
                self._no_room = True
                return
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_AGE)
            self._time = max(self._time + 1 / MOST_SEQUENCES, sequence.age[0])
            rows -= sequence.rest
            reserved += 1

    def _active(self) -> list[Sequence]:
        """Those that run and are read."""
        return [each for each in self.running if not (each.call.streams and each.call.paused)]

    def _enter(self, sequence: Sequence, reserved: int) -> bool:
        """Take pages for a sequence, of those whose streams nobody reads where there are too few; False: there is no room.

        A page for each that runs is reserved, so that nobody is admitted only to be preempted.
        """
        call, engine = sequence.call, self.engine
        while True:
            serves = self.holds(call.pages) and (self.drafts or call.speculation is None)
            if not serves and not self.running:
                self._make_pool(call)
                serves = True
            if (
                serves
                and self.pages is not None
                and sequence.enter(self.pages, 0 if engine.lockstep else reserved, engine.retention(sequence.prompt))
            ):
                break
            paused = [other for other in self.running if other.call.paused]
            if not paused:
                return False
            self._preempt(paused[-1])
        if engine.lockstep and self._used:
            sequence.computed = engine.resume(self.pool, sequence.tokens, sequence.pages[0])
        if call.started is None:
            call.started = engine.usage(self.pool, 0)[1:]
        return True

    def _preempt(self, sequence: Sequence) -> None:
        sequence.stats.preemptions += 1
        self.put_aside(sequence)

    # ---------------------------------------------------------------- who takes part in a step
    def pack(self) -> list[tuple[Sequence, int]]:
        """What the next step computes: (sequence, number of its next tokens), oldest first, decoding before prompts."""
        parts: list[tuple[Sequence, int]] = []
        active = self._active()
        for sequence in active:
            if len(parts) < self._most and sequence.rest == 1 and not sequence.waits and self._has_page(sequence):
                parts.append((sequence, 1))
        if len(parts) == len(active):
            return parts
        room = self.engine.most_rows - len(parts)
        chunks: dict[Call, int] = {}  # what is left of each call's `prefill_chunk`
        for sequence in active:
            if room <= 0:
                break
            if sequence.rest > 1 and sequence.pages and not sequence.waits:
                call, limit = sequence.call, room
                if call.options.prefill_chunk is not None and not self.engine.lockstep:
                    limit = min(room, chunks.setdefault(call, call.options.prefill_chunk))
                if limit > 0:
                    taken = int(min(sequence.rest, limit, sequence.reach))
                    parts.append((sequence, taken))
                    room -= taken
                    chunks[call] = limit - taken
        return parts

    def evict(self, sequence: Sequence) -> None:
        """Evict tokens of a sequence where it is at a boundary."""
        assert self.pages is not None
        gather = partial(self.engine.evict, self.pool)
        while sequence.reach == 0 and not sequence.evict(self.pages, gather):
            self._preempt(self._victim())  # in the end itself
        self._no_room = False

    def _victim(self) -> Sequence:
        """Who gives its pages up where there are too few."""
        return next((each for each in reversed(self.running) if each.call.paused), self.running[-1])

    def _has_page(self, sequence: Sequence) -> bool:
        """See to it that the next token has a page; False when the sequence itself had to make room."""
        assert self.pages is not None
        if not sequence.pages:  # put aside in this very step, for an older one
            return False
        if sequence.full(self.pages):
            while self.pages.available <= 0:
                victim = self._victim()
                self._preempt(victim)
                if victim is sequence:
                    return False
            sequence.pages.append(self.pages.take())
        return True
