"""A ring of buffers that a thread fills with the blocks to come while the caller computes with the one that is there.

The order of blocks is known and begins again after the last one, so reading never stops between two tokens. A caller that was
interrupted (Ctrl-C, an error) begins a new pass, and the ring goes back to the block that is wanted then.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from runtime.errors import ArtifactError


class Slots(Protocol):
    """Buffers, numbered from 0. `fill` is called by the reading thread, the other two by the thread that computes."""

    count: int

    def fill(self, slot: int, block: int) -> None:
        """Put a block's bytes into a buffer."""

    def begin(self, slot: int) -> None:
        """The buffer is going to be computed with."""

    def end(self, slot: int) -> None:
        """What uses the buffer has been given to the device; it may be filled again after that."""

    def close(self) -> None:
        """Free everything."""


class _Stage(Enum):
    EMPTY, READING, READY, USED = range(4)


@dataclass
class _Slot:
    block: int = -1
    stage: _Stage = _Stage.EMPTY
    stale: bool = False  # what is being read is not wanted any more


@dataclass
class _State:
    """What the caller and the reading thread share; the thread must not keep the `Ring` itself alive."""

    slots: Slots
    order: Sequence[int]
    change: threading.Condition = field(default_factory=threading.Condition)
    held: list[_Slot] = field(default_factory=list)
    next: int = 0  # index into `order` of the block to read next
    failure: BaseException | None = None
    stopped: bool = False
    thread: threading.Thread | None = None


class Ring:
    """`order`: the blocks of one pass. One caller at a time; the engine's lock sees to it.

    Attributes:
        waited: seconds that the caller waited for blocks.
    """

    def __init__(self, slots: Slots, order: Sequence[int]) -> None:
        self.waited = 0.0
        self._state = _State(slots, tuple(order), held=[_Slot() for _ in range(slots.count)])
        self._finalizer = weakref.finalize(self, _stop, self._state)

    def restart(self) -> None:
        """Before a pass: whatever an interrupted one still held is free."""
        with self._state.change:
            for index, slot in enumerate(self._state.held):
                if slot.stage is _Stage.USED:
                    self._state.slots.end(index)
                    slot.stage = _Stage.EMPTY
            self._state.change.notify_all()

    @contextmanager
    def block(self, number: int) -> Iterator[int]:
        """The slot that holds a block, while it is computed with; see `take`."""
        slot = self.take(number)
        try:
            yield slot
        finally:
            self.give(slot)

    def give(self, slot: int) -> None:
        """The block in a slot from `take` is not needed any more."""
        self._state.slots.end(slot)
        with self._state.change:
            self._state.held[slot].stage = _Stage.EMPTY
            self._state.change.notify_all()

    def close(self) -> None:
        """Stop the thread and free the buffers."""
        thread = self._state.thread
        self._finalizer()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def take(self, number: int) -> int:
        """The slot that holds a block, waiting for it if need be.

        Raises:
            ArtifactError: it could not be read; the next call tries again. Or the ring is closed.
        """
        state, started = self._state, time.perf_counter()
        with state.change:
            if state.stopped:
                raise ArtifactError("the model was closed")
            if state.failure is not None:  # the caller may have mended what was wrong
                state.failure = None
                state.change.notify_all()
            self._start()
            self._aim(number)
            while True:
                for index, slot in enumerate(state.held):
                    if slot.block == number and slot.stage is _Stage.READY:
                        state.slots.begin(index)
                        slot.stage = _Stage.USED
                        self.waited += time.perf_counter() - started
                        return index
                if state.failure is not None:
                    raise state.failure
                state.change.wait()

    def _start(self) -> None:
        # Also after a fork: threads stay behind in the parent.
        state = self._state
        if state.thread is None or not state.thread.is_alive():
            for slot in state.held:
                if slot.stage is _Stage.READING:
                    slot.stage = _Stage.EMPTY
            state.thread = threading.Thread(target=_read, args=(state,), name="compress-weights", daemon=True)
            state.thread.start()

    def _aim(self, number: int) -> None:
        """Make sure that the blocks in the ring and the one to read next follow on `number`; after a broken pass they do not."""
        state, count = self._state, len(self._state.order)
        at = state.order.index(number)
        coming = [s for s in state.held if s.stage in (_Stage.READING, _Stage.READY) and not s.stale]
        ahead = sorted((state.order.index(slot.block) - at) % count for slot in coming)
        if ahead == list(range(len(coming))) and state.next == (at + len(coming)) % count:
            return
        for slot in coming:
            if slot.stage is _Stage.READING:
                slot.stale = True
            else:
                slot.stage = _Stage.EMPTY
        state.next = at
        state.change.notify_all()


def _read(state: _State) -> None:
    """The reading thread."""
    while True:
        with state.change:
            index = _free(state)
            while index is None and not state.stopped:
                state.change.wait()
                index = _free(state)
            if state.stopped or index is None:
                break
            slot = state.held[index]
            number = state.order[state.next]
            state.next = (state.next + 1) % len(state.order)
            slot.block, slot.stage, slot.stale = number, _Stage.READING, False
        failure: BaseException | None = None
        try:
            state.slots.fill(index, number)
        except BaseException as error:
            failure = error if isinstance(error, ArtifactError) else _wrapped(error)
        with state.change:
            if failure is not None and not slot.stale:
                state.failure, state.next = failure, state.order.index(number)
            slot.stage = _Stage.EMPTY if failure is not None or slot.stale else _Stage.READY
            slot.stale = False
            state.change.notify_all()
    state.slots.close()


def _free(state: _State) -> int | None:
    if state.failure is not None:  # nothing is tried again before somebody asks
        return None
    return next((i for i, slot in enumerate(state.held) if slot.stage is _Stage.EMPTY), None)


def _wrapped(error: BaseException) -> ArtifactError:
    failure = ArtifactError(f"weights could not be read: {error}")
    failure.__cause__ = error
    return failure


def _stop(state: _State) -> None:
    with state.change:
        if state.stopped:
            return
        state.stopped = True
        state.change.notify_all()
        running = state.thread is not None and state.thread.is_alive()
    if not running:  # else the thread does, when it is through with what it reads
        state.slots.close()
