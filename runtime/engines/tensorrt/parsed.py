"""Rows of a batch in an engine that came through the ONNX parser: keys and values go in and come out longer, from one buffer into
another and back."""

from __future__ import annotations

from typing import Any

import torch

from runtime.engines.tensorrt.native import LOGITS_BYTES
from runtime.engines.tensorrt.session import DECODE, DTYPES, PREFILL, Session
from runtime.errors import RequestError

GROWTH = 128  # positions by which a cache grows at least


class ParsedEngine:
    """What all caches of an engine share; see `export.tensorrt.profiles.parsed_profiles` for what its inputs are."""

    def __init__(self, session: Session, facts: dict[str, Any]) -> None:
        self.session = session
        limits = facts["limits"]
        self.max_batch, self.max_length = int(limits["max_batch"]), int(limits["max_length"])
        self.max_prompt = int(limits["max_prompt"])
        self.layers, self.kv_heads, self.head_dim = int(facts["layers"]), int(facts["kv_heads"]), int(facts["head_dim"])
        self.vocabulary = int(facts["vocabulary"])
        types = {tensor["name"]: DTYPES[tensor["dtype"]] for tensor in [*facts["inputs"], *facts["outputs"]]}
        self.takes = frozenset(tensor["name"] for tensor in facts["inputs"])
        self.logits_dtype = types["logits"]
        self.names = [f"{layer}.{kind}" for layer in range(self.layers) for kind in ("key", "value")]
        self.dtype = types[f"past_key_values.{self.names[0]}"]
        self.device = session.gpu.device

    def new_rows(self, count: int) -> ParsedRows:
        return ParsedRows(self, count)


class ParsedRows:
    """Sequences that are decoded in step, padded on the left; `length` columns of them are cached."""

    def __init__(self, engine: ParsedEngine, rows: int) -> None:
        self._engine, self.rows, self.length = engine, rows, 0
        # Two sets of buffers; the first holds what is cached.
        self._buffers: list[list[torch.Tensor]] = [[], []]
        self._room = 0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for buffers in self._buffers for tensor in buffers)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, last_only: bool) -> torch.Tensor:
        """Logits float32 `[rows, sequence or 1, vocabulary]`.

        Args:
            ids, positions: int64 `[rows, sequence]`. mask: int64 `[rows, cached + sequence]`.

        Raises:
            RequestError: more columns than the engine was built for.
        """
        engine, width = self._engine, ids.shape[1]
        if self.length + width > engine.max_length:
            raise RequestError(
                f"{self.length + width} tokens in a row, padding included, and the engine was built for {engine.max_length} "
                "(option max_length of the export)"
            )
        found = []
        done = 0
        while done < width:
            size = self._size(width - done, last_only)
            end = done + size
            tokens, places = ids[:, done:end].contiguous(), positions[:, done:end].contiguous()
            logits = self._step(tokens, mask[:, : self.length + size].contiguous(), places)
            if not last_only or end == width:
                found.append(logits[:, -1:].float() if last_only else logits.float())
            done = end
        return torch.cat(found, 1)

    def _size(self, left: int, last_only: bool) -> int:
        """Columns of the next piece: a prefill where the profile has room for it, else one."""
        engine = self._engine
        if self.length > engine.max_length - engine.max_prompt:
            return 1
        size = min(left, engine.max_prompt)
        if not last_only or size > 1:
            size = min(size, max(1, LOGITS_BYTES // (self.rows * engine.vocabulary * engine.logits_dtype.itemsize)))
        return size

    def _step(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        engine, after = self._engine, self.length + ids.shape[1]
        self._reserve(after)
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        inputs = {name: value for name, value in given.items() if name in engine.takes}
        here, there = self._buffers
        outputs = {
            "logits": torch.empty(*ids.shape, engine.vocabulary, dtype=engine.logits_dtype, device=engine.device)
        }
        for name, old, new in zip(engine.names, here, there, strict=True):
            inputs[f"past_key_values.{name}"] = self._view(old, self.length)
            outputs[f"present.{name}"] = self._view(new, after)
        engine.session.run(DECODE if ids.shape[1] == 1 and self.length else PREFILL, inputs, outputs)
        self._buffers = [there, here]
        self.length = after
        return outputs["logits"]

    def _view(self, buffer: torch.Tensor, length: int) -> torch.Tensor:
        """The first positions of a flat buffer as TensorRT reads and writes them: without gaps between the heads."""
        shape = (self.rows, self._engine.kv_heads, length, self._engine.head_dim)
        return buffer[: shape[0] * shape[1] * shape[2] * shape[3]].view(shape)

    def _reserve(self, length: int) -> None:
        """Room for `length` positions in both sets."""
        if length <= self._room:
            return
        engine = self._engine
        room = min(engine.max_length, max(length, self._room + GROWTH, self._room * 3 // 2))
        numbers = self.rows * engine.kv_heads * room * engine.head_dim

        def empty() -> torch.Tensor:
            return torch.empty(numbers, dtype=engine.dtype, device=engine.device)

        fresh = [empty() for _ in engine.names]
        for old, new in zip(self._buffers[0], fresh, strict=False):
            self._view(new, self.length).copy_(self._view(old, self.length))
        self._buffers = [fresh, [empty() for _ in engine.names]]
        self._room = room  # only now: memory may have run out

    @classmethod
    def join(cls, engine: ParsedEngine, parts: list[ParsedRows], keep: list[tuple[int, int]]) -> ParsedRows:
        """The rows `(part, row)` of `keep`, in that order, in memory of their own."""
        result = cls(engine, len(keep))
        length = parts[0].length if parts else 0
        if length:
            result._reserve(length)
            result.length = length
            for index in range(len(engine.names)):
                rows = [parts[p]._view(parts[p]._buffers[0][index], length)[r] for p, r in keep]
                result._view(result._buffers[0][index], length).copy_(torch.stack(rows))
        return result
