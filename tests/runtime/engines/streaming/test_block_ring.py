"""The ring: blocks in order, ahead of the caller, across interruptions, failures and the end of its owner."""

from __future__ import annotations

import gc
import os
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.engines.streaming.ring import HostSlots, RangeReader, Ring, aligned
from runtime.errors import ArtifactError


class Fake(HostSlots):
    """Slots that remember what they were filled with; `allow` fills, when it is not None, and then reading waits."""

    def __init__(self, count: int, allow: threading.Semaphore | None = None) -> None:
        self.count, self.allow = count, allow
        self.filled = [-1] * count
        self.history: list[int] = []
        self.used: set[int] = set()
        self.fail: dict[int, BaseException] = {}
        self.closed = threading.Event()

    def fill(self, slot: int, block: int) -> None:
        assert slot not in self.used
        if self.allow is not None:
            assert self.allow.acquire(timeout=20)
        if block in self.fail:
            raise self.fail[block]
        self.filled[slot] = block
        self.history.append(block)

    def begin(self, slot: int) -> None:
        self.used.add(slot)

    def end(self, slot: int) -> None:
        self.used.discard(slot)

    def close(self) -> None:
        self.closed.set()


def passes(ring: Ring, slots: Fake, order: list[int], count: int) -> None:
    for _ in range(count):
        ring.restart()
        for block in order:
            with ring.block(block) as slot:
                assert slots.filled[slot] == block


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("count", [2, 3])
def test_passes_follow_one_another_without_a_wasted_read(count: int) -> None:
    slots, order = Fake(count), [0, 2, 3, 5]
    ring = Ring(slots, order)
    passes(ring, slots, order, 5)
    wait_for(lambda: len(slots.history) == 20 + count)  # what comes next is being read already
    assert slots.history == (order * 6)[: 20 + count]
    ring.close()
    assert slots.closed.is_set()


def broken_off(ring: Ring, order: list[int], stop: int) -> None:
    for block in order:
        with ring.block(block):
            if block == stop:
                raise KeyboardInterrupt


def test_a_pass_that_was_broken_off() -> None:
    slots, order = Fake(3), [0, 1, 2, 3, 4]
    ring = Ring(slots, order)
    for stop in range(5):
        ring.restart()
        with pytest.raises(KeyboardInterrupt):
            broken_off(ring, order, stop)
        ring.restart()
        ring.take(0)  # never given back
        passes(ring, slots, order, 2)
    ring.close()


def test_interrupted_while_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    allow = threading.Semaphore(0)
    slots, order = Fake(2, allow), [0, 1, 2]
    ring = Ring(slots, order)
    ring.restart()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ring.take(2)  # the thread reads it meanwhile
    allow.release(1000)
    passes(ring, slots, order, 3)
    ring.close()


def test_failures_reach_the_caller_and_are_tried_again() -> None:
    slots, order = Fake(3), [0, 1, 2, 3]
    ring = Ring(slots, order)
    passes(ring, slots, order, 1)
    for failure, message in ((OSError(5, "Input/output error"), "could not be read"), (ArtifactError("gone"), "gone")):
        slots.fail[2] = failure
        with pytest.raises(ArtifactError, match=message):
            passes(ring, slots, order, 3)
        slots.fail.clear()
        passes(ring, slots, order, 2)
    ring.close()
    with pytest.raises(ArtifactError, match="closed"):
        ring.take(0)
    ring.close()


def test_the_thread_ends_with_its_owner() -> None:
    before = set(threading.enumerate())
    slots = Fake(2)
    ring = Ring(slots, [0, 1, 2])
    passes(ring, slots, [0, 1, 2], 1)
    (thread,) = set(threading.enumerate()) - before
    del ring
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
    assert slots.closed.is_set()
    unused = Fake(2)
    del slots
    Ring(unused, [0, 1, 2]).close()
    assert unused.closed.is_set()


def test_after_a_fork() -> None:
    slots, order = Fake(2), [0, 1, 2]
    ring = Ring(slots, order)
    passes(ring, slots, order, 1)
    wait_for(lambda: len(slots.history) == 5)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            passes(ring, slots, order, 2)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    passes(ring, slots, order, 1)
    ring.close()


# -------------------------------------------------------------------- reading
@pytest.mark.parametrize("folder", ["tmp", "/dev/shm"])
def test_ranges(tmp_path: Path, folder: str) -> None:
    home = tmp_path if folder == "tmp" else Path(folder)
    if not home.is_dir():
        pytest.skip(f"there is no {folder}")
    file = home / f"ranges-{os.getpid()}.bin"
    try:
        content = os.urandom(1 << 16)
        file.write_bytes(content)
        reader, memory = RangeReader(file), aligned(1 << 15)
        assert torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 4096 == 0
        reader.read(memory, 8192, 1 << 15)
        assert memory[: 1 << 15] == content[8192 : 8192 + (1 << 15)]
        assert reader.bytes == 1 << 15
        os.truncate(file, 12288)
        with pytest.raises(ArtifactError, match="truncated"):
            reader.read(memory, 8192, 1 << 15)
        file.unlink()
        reader.read(memory, 0, 8192)  # an open file stays
        reader.close()
        with pytest.raises(ArtifactError, match=file.name):
            RangeReader(file)
    finally:
        file.unlink(missing_ok=True)


@pytest.mark.parametrize("most", [4096, 5000, 100])
def test_reads_that_stop_early_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    file, content, read = tmp_path / "file", os.urandom(1 << 16), os.preadv
    file.write_bytes(content)
    monkeypatch.setattr("runtime.engines.streaming.ring.os.preadv", lambda *arguments: min(most, read(*arguments)))
    reader, memory = RangeReader(file), aligned(1 << 15)
    for begin in (8192, 0):
        reader.read(memory, begin, 1 << 15)
        assert memory[: 1 << 15] == content[begin : begin + (1 << 15)]
    os.truncate(file, 12288 + 1)
    with pytest.raises(ArtifactError, match="truncated"):
        reader.read(memory, 8192, 1 << 15)
    reader.close()
