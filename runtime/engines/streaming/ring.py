"""Ring of buffers that a thread fills with the blocks to come while the caller computes with the one that is there.

The order of blocks is known and begins again after the last one, so reading never stops between two tokens. A caller that was
interrupted (Ctrl-C, an error) begins a new pass, and the ring goes back to the block that is wanted then.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from runtime.engines.streaming.prepared_file import PAGE, Group, PreparedFile
from runtime.errors import ArtifactError

THREAD = "compress-weights"  # prefix of the names of reading threads
_HUGE = 2 << 20


class RangeReader:
    """Reads byte ranges whose begin and length are multiples of `PAGE`. Used by one thread at a time.

    The page cache is bypassed where the file system allows it: weights that are read for every token would push everything else out of
    it, and be in memory twice.

    Attributes:
        bytes, seconds: read so far, and the time that took.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes, self.seconds = 0, 0.0
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error
        self._direct = _open_direct(path)

    @property
    def direct(self) -> bool:
        """Whether the page cache is bypassed."""
        return self._direct is not None

    def read(self, memory: mmap.mmap, begin: int, count: int) -> None:
        """`count` bytes from `begin` on to the front of `memory`.

        Raises:
            ArtifactError: the file is too short or cannot be read.
        """
        started, done, cached = time.perf_counter(), 0, False
        try:
            with memoryview(memory) as view:
                while done < count:
                    # After a read that stopped within a page, the rest of that page can only be had through the page cache.
                    file = self._file if self._direct is None or done % PAGE else self._direct
                    cached |= file == self._file
                    got = os.preadv(file, [view[done:count]], begin + done)
                    if got == 0:
                        raise ArtifactError(
                            f"{self.path} was truncated while its weights were being read; load the model again"
                        )
                    done += got
            if cached and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._file, begin, count, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise ArtifactError(f"{self.path} cannot be read: {error.strerror or error}") from error
        self.bytes += count
        self.seconds += time.perf_counter() - started

    def close(self) -> None:
        """Close the file; reading is over."""
        os.close(self._file)
        if self._direct is not None:
            os.close(self._direct)


def _open_direct(path: Path) -> int | None:
    """A descriptor whose reads bypass the page cache; None where there is no such thing (tmpfs, some network file systems)."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    try:
        with aligned(PAGE) as probe:
            os.preadv(file, [probe], 0)
    except OSError:
        os.close(file)
        return None
    return file


def aligned(count: int) -> mmap.mmap:
    """Memory of this process that begins at a page, in huge pages where the system has them."""
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    memory = mmap.mmap(-1, max(count, 1), **flags)
    if count >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class HostSlots:
    """Buffers in main memory, numbered from 0. `fill` is called by the reading thread, `begin` and `end` by the thread that computes.

    Attributes:
        count: how many.
        buffers: uint8 tensors, each as large as the largest block.
    """

    def __init__(self, file: PreparedFile, blocks: list[Group], count: int) -> None:
        self.count, self._blocks = count, blocks
        self.reader = RangeReader(file.path)
        self._memory = [aligned(max(group.size for group in blocks)) for _ in range(count)]
        self.buffers = [torch.frombuffer(memory, dtype=torch.uint8) for memory in self._memory]

    def fill(self, slot: int, block: int) -> None:
        """Read a block into a buffer."""
        group = self._blocks[block]
        self.reader.read(self._memory[slot], group.begin, group.size)

    def begin(self, slot: int) -> None:
        """The buffer is going to be computed with."""

    def end(self, slot: int) -> None:
        """All work on the buffer has been given to the device; it may be filled again after that."""

    def close(self) -> None:
        """Close the file; buffers are freed with the last tensor that views them."""
        self.reader.close()


class DeviceSlots:
    """Buffers on a GPU; see `HostSlots`. Blocks come from pinned main memory: all of them where `pinned` allows, else two at a time from
    the file.

    The copy waits for the computation with the buffer's old content and overlaps with the computation with the other buffers.
    """

    def __init__(
        self,
        file: PreparedFile,
        blocks: list[Group],
        order: Sequence[int],
        count: int,
        device: torch.device,
        pinned: bool,
    ) -> None:
        self.count, self._blocks, self._device = count, blocks, device
        self._source = HostSlots(file, blocks, 1)
        self.reader = self._source.reader
        size = max(group.size for group in blocks)
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        self._stream: Any = torch.cuda.Stream(device)
        self._copied: list[Any] = [torch.cuda.Event() for _ in range(count)]
        self._used: list[Any] = [torch.cuda.Event() for _ in range(count)]
        self._host: dict[int, torch.Tensor] = {}
        if pinned:
            for block in order:
                self._host[block] = torch.empty(blocks[block].size, dtype=torch.uint8, pin_memory=True)
                self._read(block, self._host[block])
        self._staging = [] if pinned else [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent: list[Any] = [torch.cuda.Event() for _ in self._staging]
        self._turn = 0

    def fill(self, slot: int, block: int) -> None:
        """Start copying `block` into `slot`, from host memory or through a staging buffer from disk."""
        source = self._host.get(block)
        sent = None
        if source is None:
            turn, self._turn = self._turn, 1 - self._turn
            sent = self._sent[turn]
            sent.synchronize()  # its last copy has left
            source = self._staging[turn][: self._blocks[block].size]
            self._read(block, source)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._used[slot])
            self.buffers[slot][: source.numel()].copy_(source, non_blocking=True)
            self._copied[slot].record(self._stream)
            if sent is not None:
                sent.record(self._stream)

    def begin(self, slot: int) -> None:
        """Make the current stream wait until `slot` is filled."""
        torch.cuda.current_stream(self._device).wait_event(self._copied[slot])

    def end(self, slot: int) -> None:
        """Record that the current stream has used `slot`, so that it may be filled again."""
        self._used[slot].record(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        """Wait for running copies and close the source."""
        self._stream.synchronize()
        self._source.close()

    def _read(self, block: int, target: torch.Tensor) -> None:
        self._source.fill(0, block)
        target.copy_(self._source.buffers[0][: target.numel()])


Slots = HostSlots | DeviceSlots


class _Reading(NamedTuple):
    """A block on its way into a buffer."""

    block: int
    slot: int
    done: Future[None]


class Ring:
    """The blocks `order` of a pass, read into `slots` ahead of the caller. One caller at a time; the engine's lock sees to it.

    All reads run in one thread in the order in which they were begun, so a buffer may be given to the next read while a read that is not
    wanted any more still fills it.

    Attributes:
        waited: seconds that the caller waited for blocks.
    """

    def __init__(self, slots: Slots, order: Sequence[int]) -> None:
        self.slots, self.order, self.waited = slots, tuple(order), 0.0
        self._open()

    def _open(self) -> None:
        """A reading thread that has nothing to do yet."""
        self._process = os.getpid()
        self._thread = ThreadPoolExecutor(1, THREAD)
        self._ahead: deque[_Reading] = deque()  # every buffer is in it, or is being computed with
        self._finalizer = weakref.finalize(self, _close, self._thread, self._ahead, self.slots)
        self._finalizer.atexit = False

    def restart(self) -> None:
        """Before a pass: buffers that an interrupted one still used are free."""
        for slot in set(range(self.slots.count)) - {reading.slot for reading in self._ahead}:
            self.slots.end(slot)

    @contextmanager
    def block(self, number: int) -> Iterator[int]:
        """The slot that holds a block, while it is computed with; see `take`."""
        slot = self.take(number)
        try:
            yield slot
        finally:
            self.give(slot)

    def take(self, number: int) -> int:
        """The slot that holds a block, waiting for it if need be.

        Raises:
            ArtifactError: it could not be read; the next call tries again. Or the ring is closed.
        """
        if not self._finalizer.alive:
            raise ArtifactError("the model was closed")
        if self._process != os.getpid():  # threads stay behind in the parent
            self._finalizer.detach()
            self._open()
        if (
            len(self._ahead) < self.slots.count or self._ahead[0].block != number
        ):  # the first pass, or one after an interruption
            _cancel(self._ahead)
            self._next = self.order.index(number)
            for slot in range(self.slots.count):
                self._begin(slot)
        started = time.perf_counter()
        try:
            self._ahead[0].done.result()
        except Exception as error:
            _cancel(self._ahead)  # nothing is tried again before somebody asks
            if isinstance(error, ArtifactError):
                raise
            raise ArtifactError(f"weights could not be read: {error}") from error
        self.waited += time.perf_counter() - started
        slot = self._ahead.popleft().slot
        self.slots.begin(slot)
        return slot

    def give(self, slot: int) -> None:
        """The block in a slot from `take` is not needed any more."""
        self.slots.end(slot)
        self._begin(slot)

    def close(self) -> None:
        """Stop the thread and free the buffers."""
        self._finalizer()
        self._thread.shutdown()

    def _begin(self, slot: int) -> None:
        """Read the block after those ahead."""
        block = self.order[self._next]
        self._next = (self._next + 1) % len(self.order)
        self._ahead.append(_Reading(block, slot, self._thread.submit(self.slots.fill, slot, block)))


def _cancel(ahead: deque[_Reading]) -> None:
    for reading in ahead:
        reading.done.cancel()
    ahead.clear()


def _close(thread: ThreadPoolExecutor, ahead: deque[_Reading], slots: Slots) -> None:
    """Close the slots after what is being read."""
    _cancel(ahead)
    thread.submit(slots.close)
    thread.shutdown(wait=False)
