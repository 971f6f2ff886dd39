"""Decode steps, one token a sequence, over static inputs: captured once for each batch bucket, then only refilled and replayed."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

import torch

from runtime.engines.base import Piece
from runtime.engines.cuda.cache import Memory
from runtime.engines.cuda.decoder import Decoder, Rows
from runtime.engines.cuda.graphs import Capture, Captured, Plain
from runtime.errors import RequestError

_log = logging.getLogger("compress.engine")
_said: set[str] = set()


class Steps:
    """The steps over one memory.

    A batch is filled up to the next bucket with padding rows: token 0 at position 0 of the scratch page. Their results are
    dropped, and they touch no page of anybody.

    Args:
        buckets: batch sizes, ascending. width: most pages of a sequence. capture: None: never.
    """

    def __init__(
        self, decoder: Decoder, memory: Memory, buckets: Sequence[int], width: int, capture: Capture | None
    ) -> None:
        device = memory.keys[0].device
        self._decoder, self._capture = decoder, capture
        # The memory owns its steps: a reference back would keep it until the garbage collector comes by.
        self._memory: Memory = weakref.proxy(memory)
        self.buckets = list(buckets)
        most, pinned = self.buckets[-1], device.type == "cuda"
        hidden = decoder.parts.final_norm.shape[0]
        self._numbers = torch.zeros(3 * most, dtype=torch.int32, device=device)
        self._hidden = torch.zeros(most, hidden, dtype=decoder.parts.dtype, device=device)
        self._tables = torch.full((most, width), memory.scratch, dtype=torch.int32, device=device)
        # The host's side of them. `_filled` is what the device has been sent.
        self._host_numbers = torch.zeros(3 * most, dtype=torch.int32, pin_memory=pinned)
        self._host_tables = torch.full((most, width), memory.scratch, dtype=torch.int32, pin_memory=pinned)
        self._filled: list[list[int]] = [[memory.scratch] for _ in range(most)]
        self._sent = torch.cuda.Event() if pinned else None
        self._captured: dict[int, Captured] = {}
        self._width: int | None = None

    def bucket(self, rows: int) -> int:
        """The batch size that so many sequences are computed in."""
        return next(size for size in self.buckets if size >= rows)

    def run(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Logits `[len(pieces), vocabulary]` of pieces of one token each, at most as many as the largest bucket.

        A view: the next run overwrites it.
        """
        size = self.bucket(len(pieces))
        self._fill(pieces, size)
        captured = self._captured.get(size)
        if captured is None:
            captured = self._captured[size] = self._make(size)
        captured.replay()
        return captured.output[: len(pieces)]

    # ---------------------------------------------------------------- inputs
    def _rows(self, size: int) -> Rows:
        ids, positions, slots = self._numbers[: 3 * size].view(3, size)
        return Rows(ids, positions, slots)

    def _fill(self, pieces: Sequence[Piece], size: int) -> None:
        memory, page = self._memory, self._memory.page_size
        padding = size - len(pieces)
        tables: list[list[int]] = []
        slots: list[int] = []
        for piece in pieces:
            count = piece.start // page + 1
            if count > self._tables.shape[1]:
                most = self._tables.shape[1] * page
                raise RequestError(f"position {piece.start} is past the {most} positions that the model was made for")
            tables.append(list(piece.pages[:count]))
            slots.append(piece.pages[count - 1] * page + piece.start % page)
        ids = [piece.tokens[0] for piece in pieces] + [0] * padding
        positions = [piece.start for piece in pieces] + [0] * padding
        slots += [memory.scratch * page] * padding
        tables += [[memory.scratch]] * padding
        if self._sent is not None:
            self._sent.synchronize()  # the copies of the step before have left the host's memory, as a rule long ago
        host, device = self._host_numbers[: 3 * size], self._numbers[: 3 * size]
        host.copy_(torch.tensor(ids + positions + slots, dtype=torch.int32))
        device.copy_(host, non_blocking=True)
        for row, table in enumerate(tables):
            if self._filled[row] == table:
                continue
            self._filled[row] = table
            count = len(table)
            self._host_tables[row, :count] = torch.tensor(table, dtype=torch.int32)
            self._tables[row, :count].copy_(self._host_tables[row, :count], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        if not self._decoder.embeds:  # it cannot be captured: before every replay instead
            self._hidden[:size] = self._decoder.embed(self._rows(size).ids)
        # Plain attention reads whole tables; only a graph, whose shapes are frozen, needs all columns.
        whole = self._capture is not None
        self._width = None if whole else max(len(table) for table in tables)

    # ---------------------------------------------------------------- computation
    def _compute(self, size: int) -> torch.Tensor:
        decoder, memory, rows = self._decoder, self._memory, self._rows(size)
        parts, attention, tables = decoder.parts, decoder.ops.decode_attention, self._tables[:size]

        def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
            return attention(
                q, memory.keys[layer], memory.values[layer], tables, rows.positions, parts.scale,
                parts.blocks[layer].window, self._width,
            )  # fmt: skip

        hidden = decoder.embed(rows.ids) if decoder.embeds else self._hidden[:size]
        return decoder(hidden, rows, memory, attend)

    def _make(self, size: int) -> Captured:
        if self._capture is not None:
            try:
                return self._capture(lambda: self._compute(size))
            except (RuntimeError, NotImplementedError) as error:
                self._capture = None
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                if reason not in _said:
                    _said.add(reason)
                    _log.warning("decode steps cannot be captured in a CUDA graph and run without one: %s", reason)
        return Plain(lambda: self._compute(size))
