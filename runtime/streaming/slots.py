"""Where streamed blocks lie: buffers in main memory, or on a GPU behind a copy stream."""

from __future__ import annotations

from typing import Any

import torch

from runtime.streaming.file import Group, PreparedFile
from runtime.streaming.reader import RangeReader, aligned


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
