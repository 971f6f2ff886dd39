"""Engine of an exported graph: the cache goes in as `past_key_values` and comes out, longer, as `present`."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from runtime.engines.rows import ROW, RowEngine
from runtime.errors import RequestError

LOGITS_BYTES = 256 << 20  # of one call; longer prompts and larger batches go through in parts
GROWTH = 128  # columns of room that a cache grows by


@dataclass
class RowCache:
    """Keys and values of a batch that is padded on the left.

    Attributes:
        sets: for each layer two buffers `[rows, heads, room, size]`; one set where the graph appends in place, else two that take
            turns, of which the first holds what is cached: as `[rows, heads, length, size]` without gaps.
        rows, length, room: sequences, columns that are cached, columns that there is memory for.
    """

    sets: list[list[torch.Tensor]] = field(default_factory=list)
    rows: int = 0
    length: int = 0
    room: int = 0


class PastPresentEngine(RowEngine):
    """Base class: subclasses run the graph and say how much of a batch goes through it at once.

    Attributes:
        cache_shapes: [heads, size] of every layer.
        dtype, logits_dtype: of the cache, and of logits as the graph writes them.
        in_place: `present` is written where `past_key_values` is, into buffers with room for more columns than they hold.
        max_length: columns that a graph takes at most.
    """

    cache_shapes: Sequence[Sequence[int]]
    dtype: torch.dtype
    logits_dtype: torch.dtype
    in_place = False
    max_length = ROW

    @abstractmethod
    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Fill `outputs` from `inputs`, all contiguous; the graph may not have all of the inputs."""

    @abstractmethod
    def part(self, batch: int, width: int, past: int) -> tuple[int, int]:
        """Rows and columns of the next calls, for `width` new columns of `batch` rows after `past`."""

    # ---------------------------------------------------------------- cache
    def new_cache(self) -> RowCache:
        return RowCache()

    def cache_bytes(self, cache: RowCache) -> int:
        return sum(buffer.nbytes for buffers in cache.sets for buffer in buffers)

    @torch.inference_mode()
    def keep_rows(self, cache: RowCache, rows: torch.Tensor) -> None:
        kept = [view[rows] for view in self._views(cache, 0, cache.length)]
        cache.rows, cache.sets = len(rows), []
        self._allocate(cache, cache.room, kept)

    def _shapes(self, rows: int, columns: int) -> list[tuple[int, int, int, int]]:
        return [(rows, heads, columns, size) for heads, size in self.cache_shapes for _ in range(2)]

    def _views(self, cache: RowCache, which: int, length: int) -> list[torch.Tensor]:
        """A set of buffers as the graph reads and writes its first columns; [] where there are none yet."""
        if self.in_place or not cache.sets:
            return [buffer for buffers in cache.sets for buffer in buffers]
        pairs = zip(cache.sets[which], self._shapes(cache.rows, length), strict=True)
        return [buffer.view(-1)[: math.prod(shape)].view(shape) for buffer, shape in pairs]

    def _allocate(self, cache: RowCache, room: int, held: Sequence[torch.Tensor]) -> None:
        """New buffers of `room` columns, with what is `held` for them."""
        shapes = self._shapes(cache.rows, room) * (1 if self.in_place else 2)
        buffers = [torch.empty(shape, dtype=self.dtype, device=self.device) for shape in shapes]
        size = 2 * len(self.cache_shapes)
        cache.sets, cache.room = [buffers[i : i + size] for i in range(0, len(buffers), size)], room
        for new, old in zip(self._views(cache, 0, cache.length), held, strict=False):
            new[:, :, : cache.length] = old[:, :, : cache.length]

    # ---------------------------------------------------------------- computing
    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        cache: RowCache | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        last_only: bool = False,
    ) -> torch.Tensor:
        """See `RowEngine.forward`.

        Raises:
            RequestError: more columns than the graph was built for.
        """
        cache = RowCache() if cache is None else cache
        (batch, width), past = input_ids.shape, cache.length
        cache.rows, end = batch, past + width
        if end > self.max_length:
            raise RequestError(
                f"{end} tokens in a row, padding included, and the engine was built for {self.max_length} (option max_length of "
                "the export)"
            )
        if attention_mask is None:
            attention_mask = torch.ones(batch, end, dtype=torch.int64, device=self.device)
        if position_ids is None:
            position_ids = torch.arange(past, end, device=self.device).expand(batch, width)
        found: list[torch.Tensor] = []
        done = 0
        while done < width:
            rows, columns = self.part(batch, width - done, cache.length)
            new, mask = slice(done, done + columns), attention_mask[:, : cache.length + columns]
            logits = self._step(cache, rows, [input_ids[:, new], mask, position_ids[:, new]], last_only)
            found = [logits] if last_only else [*found, logits]
            done += columns
        return torch.cat(found, 1) if len(found) > 1 else found[0]

    def _step(self, cache: RowCache, size: int, given: Sequence[torch.Tensor], last_only: bool) -> torch.Tensor:
        """Logits of new columns of all rows, or of their last one, `size` rows at a time; the cache is extended.

        Args:
            given: ids, mask and positions.
        """
        after = cache.length + given[0].shape[1]
        if after > cache.room:
            self._allocate(cache, min(after + GROWTH, self.max_length), self._views(cache, 0, cache.length))
        past, present = self._views(cache, 0, cache.length), self._views(cache, -1, after)
        ids, mask, positions = (tensor.contiguous() for tensor in given)
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        whole = [inputs | named("past_key_values", past), named("present", present)]
        found = []
        for start in range(0, cache.rows, size):
            inputs, outputs = whole
            if size < cache.rows:  # slices of every layer's cache cost more than a small model's step
                inputs, outputs = ({name: x[start : start + size] for name, x in each.items()} for each in whole)
            shape = (*inputs["input_ids"].shape, self.vocab_size)
            logits = torch.empty(shape, dtype=self.logits_dtype, device=self.device)
            self.run(inputs, {"logits": logits} | outputs)
            found.append((logits[:, -1:].clone() if last_only else logits).float())
        cache.sets.reverse()
        cache.length = after
        return torch.cat(found) if len(found) > 1 else found[0]


def cache_names(prefix: str, layers: int) -> list[str]:
    """What graphs call keys and values: `past_key_values.0.key`, `past_key_values.0.value`, ..."""
    return [f"{prefix}.{layer}.{part}" for layer in range(layers) for part in ("key", "value")]


def named(prefix: str, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keys and values of all layers by those names."""
    return dict(zip(cache_names(prefix, len(tensors) // 2), tensors, strict=True))
