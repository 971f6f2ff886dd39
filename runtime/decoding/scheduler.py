"""Scheduler of a model: the calls of all threads decode together, a step at a time, over one paged KV cache.

No thread runs in the background. Of the calls whose threads wait for tokens one leads: its thread computes steps for all until it has
what it waits for, and then wakes another to lead on. A call alone leads itself and is in nobody's way.

Only the leader touches the batch. What may happen to it at any time does not harm the others: of a call that is closed, or cancelled,
the sequences go before the next step; an error of the engine reaches the calls that took part in the step; after an interrupt
(Ctrl-C) in the leader's thread the others are computed again from their tokens, with the random numbers that they had.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

from runtime.decoding.batch import Batch
from runtime.decoding.sequence import Call
from runtime.decoding.step import Steps
from runtime.decoding.turns import Caller, Turns
from runtime.engines.base import Engine
from runtime.sampling.options import GenerationOptions
from runtime.sampling.stats import GenerationStats

_NAP_SECONDS = (
    0.1  # a waiting thread looks after itself that often, lest an interrupt swallowed the ring that was for it
)


class Scheduler:
    """Calls that share a pool of pages.

    Args:
        engine: that computes. On engines with `lockstep` a scheduler has one call at a time.
        turns: of the model, for all that uses the engine; a step is a turn.
        pages: of the pool, where it is for one call; None: see `Batch`.
        keep: bytes that the pool may have taken to be kept between calls; None: a default.
    """

    def __init__(self, engine: Engine, turns: Turns, pages: int | None = None, keep: int | None = None) -> None:
        self.batch = Batch(engine, pages, keep)
        self._steps = Steps(self.batch)
        self._caller = Caller(turns)
        self._calls: list[Call] = []
        self._leader: tuple[Call, int] | None = None  # and its thread: a call that is closed any thread may take out
        self._broken = False  # the batch is being changed
        # Held for an assignment only, by `with` alone: an interrupt cannot leave it locked. Streams may be collected anywhere, and
        # are closed then.
        self._lock = threading.RLock()

    def run(self, call: Call) -> Iterator[int]:
        """Fill the outputs of a call until all are finished; yields whenever there is news how many have ended since.

        Raises:
            Exception: what the engine raised in a step that the call took part in.
        """
        call.stats.sequences += call.open
        reported = call.open
        try:
            if call not in self._calls:
                self._calls.append(call)
            while True:
                self._await(call)
                if call.error is not None:
                    try:
                        raise call.error
                    finally:
                        call.error = None  # its traceback holds the call
                over, left = call.over, call.open
                yield reported - left
                reported = left
                if over:
                    return
        finally:
            if not call.over:
                self._measure(call)
                call.closed = True
                self._lead(call)
            if call not in self._calls:  # sequences and call hold each other
                call.sequences.clear()

    def claim(self, call: Call) -> bool:
        """Reserve a scheduler for a call that is to be run; False: another is there."""
        with self._lock:
            if not self._calls:
                self._calls.append(call)
        return call in self._calls

    def keep_for(self, keeper: object) -> None:
        """Keep the pool between calls, whatever it takes, as long as `keeper` lives."""
        # Of weak references the last one made is called first: the set of keepers must know before.
        weakref.finalize(keeper, self.trim).atexit = False
        self.batch.keepers.add(keeper)
        self.batch.set_kept()

    def trim(self) -> None:
        """Free the pool if it is in nobody's use and takes too much."""
        nobody = Call((), GenerationOptions(), GenerationStats())
        nobody.closed = True
        self._lead(nobody)

    # ---------------------------------------------------------------- leading
    def _await(self, call: Call) -> None:
        """Wait for news, leading where nobody else does."""
        call.ahead, call.since, call.waiting = 0, time.perf_counter(), True
        while not (call.news or call.over):
            if not self._lead(call):
                call.sleep(_NAP_SECONDS)
        call.waiting, call.since, call.news = False, None, False

    def _lead(self, call: Call) -> bool:
        """Compute steps until the call has news, or take it out where it is closed; False: another one leads."""
        me = (call, threading.get_ident())
        try:
            with self._lock:
                if self._leader is None:
                    self._leader = me
            if self._leader != me:
                return False
            if self._broken:  # an interrupt has hit what follows one
                self._break_off(set(), None)
            if call.closed:
                self._change(self._sweep)
            while not (call.news or call.over or call.closed):  # a turn each
                self._caller.run(self._change, self._step)
            if not self._calls:
                self._change(self._idle)
        except BaseException as error:
            if self._leader != me or not self._broken:
                raise
            parts = {sequence.call for sequence, _ in self._steps.parts}
            self._break_off((parts or set(self._calls)) if isinstance(error, Exception) else {call}, error)
            if call.closed:
                raise
        finally:
            if self._leader == me:
                self._leader = None
                self._pass_on()
        return True

    def _pass_on(self) -> None:
        """Nobody leads: wake somebody who waits, if possible one who will lead for more than a token."""
        heir = None
        for call in list(self._calls):
            if call.closed:  # while another one led
                self._lead(call)
                return
            if call.waiting and not call.news and (heir is None or heir.streams):
                heir = call
        if heir is not None:
            heir.ring()

    def _change(self, function: Callable[[], None]) -> None:
        self._broken = True
        function()
        self._broken = False

    # ---------------------------------------------------------------- what a leader does
    def _step(self) -> None:
        steps, batch = self._steps, self.batch
        self._sweep()
        steps.parts = []
        batch.admit()
        steps.parts = batch.pack()
        if steps.parts:
            steps.run()
            for call in steps.news:
                if call.open:
                    self._tell(call)
                else:
                    self._finish(call)
            steps.news.clear()
        elif any(not call.paused and not call.over for call in self._calls if call.joined):
            raise RuntimeError("the scheduler has sequences and nothing to compute")  # a mistake in this room

    def _sweep(self) -> None:
        """Let new calls in and closed and cancelled ones out."""
        for call in self._calls[:]:
            if call.closed:
                self._remove(call)
                self._leave(call)
            elif call.options.cancel is not None and call.options.cancel.is_set():
                for sequence in call.sequences:
                    if not sequence.output.finished:
                        sequence.output.end("cancelled")
                self._remove(call)
                self._finish(call)
            elif not call.joined:
                self.batch.join(call)

    def _finish(self, call: Call) -> None:
        """The call is over, and told so. Nothing of it is in the batch any more."""
        self._measure(call)
        call.over = True  # before it is out: whatever is hit by an interrupt here is found over by its thread, or by the next leader
        self._leave(call)
        self._tell(call)

    def _leave(self, call: Call) -> None:
        with suppress(ValueError):
            self._calls.remove(call)

    def _remove(self, call: Call) -> None:
        """Take the sequences out of a call that has not come to its end."""
        self.batch.remove(call)
        if call.speculation is not None and call.speculation in self._steps.speculators:
            for sequence in call.sequences:
                self._steps.speculators[call.speculation].leave(sequence)

    def _tell(self, call: Call) -> None:
        call.news = True
        if call.waiting and self._leader != (call, threading.get_ident()):
            call.ring()

    def _idle(self) -> None:
        for speculator in self._steps.speculators.values():
            speculator.close()
        self._steps.speculators.clear()
        self.batch.idle()

    def _measure(self, call: Call) -> None:
        """What the cache of a call took, as far as it is known."""
        pool, stats = self.batch.pool, call.stats
        if pool is not None and call.started is not None:
            usage = self.batch.engine.usage(pool, call.held)
            stats.cache_bytes = max(stats.cache_bytes, usage.bytes)
            stats.read_tokens += max(0, usage.read_tokens - call.started[0])
            stats.held_tokens += max(0, usage.held_tokens - call.started[1])

    def _break_off(self, hit: set[Call], error: BaseException | None) -> None:
        """A step has failed, or was interrupted anywhere: the calls that it hit are over, the others begin again from their tokens."""
        for call in hit:
            call.error = error
            self._remove(call)
            self._finish(call)
        self.batch.restore(sequence for call in self._calls if call.joined for sequence in call.sequences)
        for call in list(self._calls):
            call.open = sum(not sequence.output.finished for sequence in call.sequences)
            if call.open:
                self._tell(call)
            else:
                self._finish(call)
        self._steps.parts = []
        self._steps.news.clear()
        if not self._calls:
            self._idle()
        self._broken = False
