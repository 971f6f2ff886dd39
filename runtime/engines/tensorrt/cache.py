"""KV cache of TensorRT exports: two sets of buffers take turns as input and as (longer) output of the engine."""

from __future__ import annotations

import math
from typing import Any

import torch

from runtime.engines.tensorrt.session import DECODE, DTYPES, PREFILL, Session
from runtime.errors import RequestError

LOGITS_BYTES = 256 << 20  # of one prefill step where all positions are wanted
GROWTH = 128  # positions by which a cache grows at least


class Sizes:
    """An engine's sizes and tensors, which all its caches share.

    Args:
        session: the deserialized engine.
        facts: of `export.json`; see `export.tensorrt.profiles` for the inputs.
    """

    def __init__(self, session: Session, facts: dict[str, Any]) -> None:
        self.session = session
        limits = facts["limits"]
        self.max_batch, self.max_length = int(limits["max_batch"]), int(limits["max_length"])
        self.max_prompt = int(limits["max_prompt"])
        self.kv_heads, self.head_dim = int(facts["kv_heads"]), int(facts["head_dim"])
        self.vocabulary = int(facts["vocabulary"])
        types = {tensor["name"]: DTYPES[tensor["dtype"]] for tensor in [*facts["inputs"], *facts["outputs"]]}
        self.takes = frozenset(tensor["name"] for tensor in facts["inputs"])
        self.logits_dtype = types["logits"]
        self.names = [f"{layer}.{kind}" for layer in range(int(facts["layers"])) for kind in ("key", "value")]
        self.dtype = types["past_key_values.0.key"]
        self.device = session.gpu.device


class Rows:
    """Sequences that are decoded in step, padded on the left; `length` columns of them are cached."""

    def __init__(self, sizes: Sizes, rows: int) -> None:
        self._sizes, self.rows, self.length = sizes, rows, 0
        # Two sets of buffers; the first holds what is cached.
        self._buffers: list[list[torch.Tensor]] = [[], []]
        self._room = 0

    @property
    def nbytes(self) -> int:
        """Bytes of both sets of buffers."""
        return sum(tensor.nbytes for buffers in self._buffers for tensor in buffers)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, last_only: bool) -> torch.Tensor:
        """Logits float32 `[rows, sequence or 1, vocabulary]`.

        Args:
            ids, positions: int64 `[rows, sequence]`. mask: int64 `[rows, cached + sequence]`.

        Raises:
            RequestError: more columns than the engine was built for.
        """
        sizes, width = self._sizes, ids.shape[1]
        if self.length + width > sizes.max_length:
            raise RequestError(
                f"{self.length + width} tokens in a row, padding included, and the engine was built for {sizes.max_length} "
                "(option max_length of the export)"
            )
        found: list[torch.Tensor] = []
        done = 0
        while done < width:
            end = done + self._size(width - done, last_only)
            step = (ids[:, done:end], mask[:, : self.length + end - done], positions[:, done:end])
            logits = self._step(*(tensor.contiguous() for tensor in step))
            found = [logits[:, -1:].float()] if last_only else [*found, logits.float()]
            done = end
        return torch.cat(found, 1)

    def _size(self, left: int, last_only: bool) -> int:
        """Columns of the next chunk: a prefill where the profile has room for it, else one."""
        sizes = self._sizes
        if self.length > sizes.max_length - sizes.max_prompt:
            return 1
        size = min(left, sizes.max_prompt)
        if not last_only or size > 1:
            size = min(size, max(1, LOGITS_BYTES // (self.rows * sizes.vocabulary * sizes.logits_dtype.itemsize)))
        return size

    def _step(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        sizes, after = self._sizes, self.length + ids.shape[1]
        self._reserve(after)
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        inputs = {name: value for name, value in given.items() if name in sizes.takes}
        here, there = self._buffers
        outputs = {"logits": torch.empty(*ids.shape, sizes.vocabulary, dtype=sizes.logits_dtype, device=sizes.device)}
        for name, old, new in zip(sizes.names, here, there, strict=True):
            inputs[f"past_key_values.{name}"] = self._view(old, self.length)
            outputs[f"present.{name}"] = self._view(new, after)
        sizes.session.run(DECODE if ids.shape[1] == 1 and self.length else PREFILL, inputs, outputs)
        self._buffers = [there, here]
        self.length = after
        return outputs["logits"]

    def _view(self, buffer: torch.Tensor, length: int) -> torch.Tensor:
        """The first positions of a flat buffer as TensorRT reads and writes them: without gaps between the heads."""
        shape = (self.rows, self._sizes.kv_heads, length, self._sizes.head_dim)
        return buffer[: math.prod(shape)].view(shape)

    def _reserve(self, length: int) -> None:
        """Room for `length` positions in both sets."""
        if length <= self._room:
            return
        sizes = self._sizes
        room = min(sizes.max_length, max(length, self._room + GROWTH, self._room * 3 // 2))
        numbers = self.rows * sizes.kv_heads * room * sizes.head_dim

        def empty() -> list[torch.Tensor]:
            return [torch.empty(numbers, dtype=sizes.dtype, device=sizes.device) for _ in sizes.names]

        fresh = empty()
        for old, new in zip(self._buffers[0], fresh, strict=False):
            self._view(new, self.length).copy_(self._view(old, self.length))
        self._buffers = [fresh, empty()]
        self._room = room  # only now: memory may have run out

    @classmethod
    def join(cls, sizes: Sizes, parts: list[Rows], keep: list[tuple[int, int]]) -> Rows:
        """The rows `(part, row)` of `keep`, in that order, in memory of their own."""
        result = cls(sizes, len(keep))
        length = parts[0].length if parts else 0
        if length:
            result._reserve(length)
            result.length = length
            for index in range(len(sizes.names)):
                rows = [parts[p]._view(parts[p]._buffers[0][index], length)[r] for p, r in keep]
                result._view(result._buffers[0][index], length).copy_(torch.stack(rows))
        return result
