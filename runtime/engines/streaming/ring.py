"""Ring of buffers that a thread fills with the blocks to come while the caller computes with the one that is there.

The order of blocks is known and begins again after the last one, so reading never stops between two tokens. A caller that was
interrupted (Ctrl-C, an error) begins a new pass, and the ring goes back to the block that is wanted then.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import torch

from runtime.engines.streaming.prepared_file import PAGE, Group, PreparedFile
from runtime.errors import ArtifactError

# Byte ranges of a file into aligned memory, past the page cache where the file system allows it.
#
# Weights that are read for every token would push everything else out of the page cache and be in memory twice.

_HUGE = 2 << 20


class RangeReader:
    """Reads ranges whose begin and length are multiples of `PAGE`. Used by one thread at a time.

    Attributes:
        direct: whether the page cache is passed by.
        bytes, seconds: read so far, and the time that took.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes, self.seconds = 0, 0.0
        self.direct = False
        try:
            self._file = self._open()
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error
        self._direct_now = self.direct

    def read(self, memory: mmap.mmap, begin: int, count: int) -> None:
        """`count` bytes from `begin` on to the front of `memory`.

        Raises:
            ArtifactError: the file is too short or cannot be read.
        """
        started, done = time.perf_counter(), 0
        view = memoryview(memory)
        try:
            while done < count:
                if self.direct:
                    self._pass_by(done % PAGE == 0)
                got = os.preadv(self._file, [view[done:count]], begin + done)
                if got == 0:
                    raise ArtifactError(
                        f"{self.path} was truncated while its weights were being read; load the model again"
                    )
                done += got
            if not self._direct_now and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._file, begin, count, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise ArtifactError(f"{self.path} cannot be read: {error.strerror or error}") from error
        finally:
            view.release()
        self.bytes += count
        self.seconds += time.perf_counter() - started

    def _pass_by(self, wanted: bool) -> None:
        """Pass the page cache by or not: what follows a read that stopped within a page can only be had through it."""
        if wanted != self._direct_now:
            import fcntl

            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
            self._direct_now = wanted

    def close(self) -> None:
        """Close the file; reading is over."""
        os.close(self._file)

    def _open(self) -> int:
        flag = getattr(os, "O_DIRECT", 0)
        if flag:
            try:
                file = os.open(self.path, os.O_RDONLY | flag)
            except OSError:  # tmpfs, some network file systems
                return os.open(self.path, os.O_RDONLY)
            try:
                with aligned(PAGE) as probe:
                    os.preadv(file, [probe], 0)
                self.direct = True
                return file
            except OSError:
                os.close(file)
        return os.open(self.path, os.O_RDONLY)


def aligned(count: int) -> mmap.mmap:
    """Memory of this process that begins at a page, in huge pages where the system has them."""
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    memory = mmap.mmap(-1, max(count, 1), **flags)
    if count >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


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


# Where streamed blocks lie: buffers in main memory, or on a GPU behind a copy stream.


class HostSlots:
    """Buffers in main memory, read from the file."""

    def __init__(self, file: PreparedFile, blocks: list[Group], count: int) -> None:
        self.count = count
        self.reader = RangeReader(file.path)
        self._blocks = blocks
        size = max(group.size for group in blocks)
        self._memory = [aligned(size) for _ in range(count)]
        self.buffers = [torch.frombuffer(memory, dtype=torch.uint8) for memory in self._memory]

    def fill(self, slot: int, block: int) -> None:
        group = self._blocks[block]
        self.reader.read(self._memory[slot], group.begin, group.size)

    def begin(self, slot: int) -> None:
        pass

    def end(self, slot: int) -> None:
        pass

    def close(self) -> None:
        self.reader.close()  # the buffers go with the last tensor that looks at them


class DeviceSlots:
    """Buffers on a GPU. Blocks come from pinned main memory: all of them where `pinned` allows, else two at a time from the file.

    The copy waits for what computes with the buffer's old content and runs beside what computes with the others.
    """

    def __init__(
        self,
        file: PreparedFile,
        blocks: list[Group],
        order: tuple[int, ...],
        count: int,
        device: torch.device,
        pinned: bool,
    ) -> None:
        self.count = count
        self.reader = RangeReader(file.path)
        self._blocks, self._device = blocks, device
        size = max(group.size for group in blocks)
        self._memory = aligned(size)
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        self._stream: Any = torch.cuda.Stream(device)
        self._copied: list[Any] = [torch.cuda.Event() for _ in range(count)]
        self._used: list[Any] = [torch.cuda.Event() for _ in range(count)]
        self._host: dict[int, torch.Tensor] = {}
        if pinned:
            for block in order:
                self._host[block] = torch.empty(blocks[block].size, dtype=torch.uint8, pin_memory=True)
                self._load(block, self._host[block])
        self._staging = [] if pinned else [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent: list[Any] = [torch.cuda.Event() for _ in self._staging]
        self._turn = 0

    def fill(self, slot: int, block: int) -> None:
        source = self._host.get(block)
        sent = None
        if source is None:
            turn, self._turn = self._turn, 1 - self._turn
            sent = self._sent[turn]
            sent.synchronize()  # its last copy has left
            source = self._staging[turn][: self._blocks[block].size]
            self._load(block, source)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._used[slot])
            self.buffers[slot][: source.numel()].copy_(source, non_blocking=True)
            self._copied[slot].record(self._stream)
            if sent is not None:
                sent.record(self._stream)

    def begin(self, slot: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._copied[slot])

    def end(self, slot: int) -> None:
        self._used[slot].record(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        self._stream.synchronize()
        self.reader.close()

    def _load(self, block: int, target: torch.Tensor) -> None:
        group = self._blocks[block]
        self.reader.read(self._memory, group.begin, group.size)
        target.copy_(torch.frombuffer(self._memory, dtype=torch.uint8, count=group.size))
