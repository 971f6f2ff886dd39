"""Rows of a batch in an engine of native layers: a cache of full length that the engine updates in place.

The engine's contract is `export.tensorrt.native`: rows are padded on the right, every row says where its tokens are written, and
what padding wrote lies behind the row's length, where nothing reads it before it is overwritten.
"""

from __future__ import annotations

from typing import Any

import torch

from runtime.engines.tensorrt.session import DECODE, DTYPES, PREFILL, Session
from runtime.errors import RequestError

LOGITS_BYTES = 256 << 20  # of one prefill step where all positions are wanted


class NativeEngine:
    """What all caches of an engine share: sizes, and the input buffers, whose addresses never change.

    Args:
        facts: `export.json`'s, see `export.tensorrt.target`.
    """

    def __init__(self, session: Session, facts: dict[str, Any]) -> None:
        self.session = session
        limits = facts["limits"]
        self.max_batch, self.max_length = int(limits["max_batch"]), int(limits["max_length"])
        self.max_prompt = int(limits["max_prompt"])
        self.layers, self.kv_heads, self.head_dim = int(facts["layers"]), int(facts["kv_heads"]), int(facts["head_dim"])
        self.vocabulary, self.dtype = int(facts["vocabulary"]), DTYPES[facts["dtype"]]
        self.device = session.gpu.device
        self.names = [f"{layer}.{kind}" for layer in range(self.layers) for kind in ("key", "value")]
        most = self.max_batch * self.max_prompt
        self._integers = torch.zeros(3, most, dtype=torch.int64, device=self.device)
        self._rows = torch.zeros(2, self.max_batch, dtype=torch.int32, device=self.device)
        self._logits = torch.empty(self.max_batch * self.vocabulary, dtype=self.dtype, device=self.device)

    def new_rows(self, count: int) -> NativeRows:
        return NativeRows(self, count)

    def step(
        self, cache: list[torch.Tensor], ids: torch.Tensor, writes: list[int], wanted: torch.Tensor
    ) -> torch.Tensor:
        """Run one step on rows whose caches are `cache`; logits `[rows, wanted, vocabulary]`, valid until the next step.

        Args:
            ids: int64 `[rows, sequence]`, padded on the right. writes: where each row's tokens go.
            wanted: int64 `[rows, n]` on the CPU, positions of the step.
        """
        rows, sequence = ids.shape
        count = wanted.shape[1]
        starts = torch.tensor(writes, dtype=torch.int64)
        positions = starts[:, None] + torch.arange(sequence)[None]
        named = {"input_ids": ids, "position_ids": positions, "logits_indices": wanted}
        inputs = {name: _put(self._integers[i], values) for i, (name, values) in enumerate(named.items())}
        inputs["write_indices"] = _put(self._rows[0], starts.int())
        inputs["key_value_lengths"] = _put(self._rows[1], (starts + sequence).int())
        inputs |= {f"cache.{name}": tensor for name, tensor in zip(self.names, cache, strict=True)}
        if count == 1:
            logits = self._logits[: rows * self.vocabulary].view(rows, 1, self.vocabulary)
        else:
            logits = torch.empty(rows, count, self.vocabulary, dtype=self.dtype, device=self.device)
        outputs = {"logits": logits}
        outputs |= {f"cache_out.{name}": tensor for name, tensor in zip(self.names, cache, strict=True)}
        self.session.run(DECODE if sequence == 1 and count == 1 else PREFILL, inputs, outputs)
        return logits


class NativeRows:
    """Sequences that are decoded in step, and their cache."""

    def __init__(self, engine: NativeEngine, rows: int) -> None:
        self._engine = engine
        self.lengths = [0] * rows
        shape = (rows, engine.kv_heads, engine.max_length, engine.head_dim)
        # Zeros: what was never written must not be a NaN, which a factor of 0 would not remove.
        self.tensors = [torch.zeros(shape, dtype=engine.dtype, device=engine.device) for _ in engine.names]

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None, last_only: bool) -> torch.Tensor:
        """Logits float32 `[rows, sequence or 1, vocabulary]`; of padding they are zero. `ids` are padded on the left where `mask`
        (of these columns) is 0.

        Raises:
            RequestError: a row would be longer than the engine's cache.
        """
        engine, (rows, width) = self._engine, ids.shape
        real = [width] * rows if mask is None else mask.sum(1).tolist()
        full = next((i for i, n in enumerate(real) if self.lengths[i] + n > engine.max_length), None)
        if full is not None:
            raise RequestError(
                f"row {full} would have {self.lengths[full] + real[full]} tokens, and the engine was built for {engine.max_length} "
                "(option max_length of the export)"
            )
        if width == 1 and all(real):
            wanted = torch.zeros(rows, 1, dtype=torch.int64)
            found = engine.step(self.tensors, ids, self.lengths, wanted)
            self.lengths = [length + 1 for length in self.lengths]
            return found.to(torch.float32, copy=True)  # the next step writes where this one's logits are
        tokens = ids.cpu()
        packed = torch.zeros_like(tokens)
        for row, count in enumerate(real):
            packed[row, :count] = tokens[row, width - count :]
        logits = torch.zeros(rows, 1 if last_only else width, engine.vocabulary, device=engine.device)
        done = 0
        while done < max(real):
            size = self._size(real, done, last_only)
            if size:
                self._piece(slice(0, rows), packed, real, done, size, logits, last_only)
            else:  # a row that is full has no room for another row's padding: row by row there is none
                size = min(engine.max_prompt, max(real) - done)
                for row in range(rows):
                    own = min(size, real[row] - done)
                    if own > 0:
                        self._piece(slice(row, row + 1), packed, real, done, own, logits, last_only)
            done += size
        self.lengths = [length + count for length, count in zip(self.lengths, real, strict=True)]
        return logits

    def _size(self, real: list[int], done: int, last_only: bool) -> int:
        """Columns of the next piece, padding of shorter rows included; 0 where that has no room."""
        engine = self._engine
        room = min(
            engine.max_length - length - min(done, count) for length, count in zip(self.lengths, real, strict=True)
        )
        size = min(engine.max_prompt, max(real) - done, room)
        if not last_only:
            size = min(size, max(1, LOGITS_BYTES // (self.rows * engine.vocabulary * engine.dtype.itemsize)))
        return size

    def _piece(
        self,
        part: slice,
        packed: torch.Tensor,
        real: list[int],
        done: int,
        size: int,
        logits: torch.Tensor,
        last_only: bool,
    ) -> None:
        """Columns `done` to `done + size` of some rows."""
        rows = range(self.rows)[part]
        writes = [self.lengths[row] + min(done, real[row]) for row in rows]
        if last_only:
            wanted = torch.tensor([[min(max(real[row] - 1 - done, 0), size - 1)] for row in rows])
        else:
            wanted = torch.arange(size)[None].expand(len(rows), size).contiguous()
        cache = [tensor[part] for tensor in self.tensors]
        found = self._engine.step(cache, packed[part, done : done + size].contiguous(), writes, wanted)
        width = packed.shape[1]
        for index, row in enumerate(rows):
            if last_only and done < real[row] <= done + size:
                logits[row, 0] = found[index, 0]
            elif not last_only:
                own = max(0, min(size, real[row] - done))
                place = width - real[row] + done
                logits[row, place : place + own] = found[index, :own]

    @classmethod
    def join(cls, engine: NativeEngine, parts: list[NativeRows], keep: list[tuple[int, int]]) -> NativeRows:
        """The rows `(part, row)` of `keep`, in that order, in memory of their own."""
        result = cls.__new__(cls)
        result._engine = engine
        result.lengths = [parts[p].lengths[r] for p, r in keep]
        result.tensors = [torch.stack([parts[p].tensors[i][r] for p, r in keep]) for i in range(len(engine.names))]
        return result


def _put(buffer: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`values` in a buffer of the GPU, in their shape."""
    place = buffer[: values.numel()].view(values.shape)
    place.copy_(values)
    return place
