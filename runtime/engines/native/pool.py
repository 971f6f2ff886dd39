"""The KV cache of the native engine: pages of all layers, as attention.h reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from runtime.engines.base import Chunk
from runtime.engines.native.parts import Parts
from runtime.engines.native.plain_pages import PlainPages
from runtime.engines.native.storage import PageStorage
from runtime.errors import RequestError
from runtime.kernels.cpu.decoder import PAGE, Block, Decoder, Op, Step
from runtime.kernels.cpu.library import TYPES


class Recorder:
    """What every layer of one step leaves in the residual stream; `Pool.recorder` of the step's pool."""

    def __init__(self) -> None:
        self._states: dict[tuple[int, int], torch.Tensor] = {}

    def fill(self, chunks: Sequence[Chunk], states: torch.Tensor) -> None:
        """The step is done: float32 `[layers, tokens of all chunks, hidden]`."""
        for chunk, mine in zip(chunks, states.split([len(chunk.tokens) for chunk in chunks], 1), strict=True):
            self._states[_place(chunk.pages, chunk.start)] = mine

    def of(self, pages: Sequence[int], start: int) -> torch.Tensor | None:
        """`[layers, tokens, hidden]` of the chunk of these pages that began at `start`; None: there was none."""
        return self._states.get(_place(pages, start))


def _place(pages: Sequence[int], start: int) -> tuple[int, int]:
    return start, pages[start // PAGE]  # what is written to belongs to one sequence


def decoder_of(parts: Parts, blocks: Sequence[Block]) -> Decoder:
    """A decoder with other blocks; it keeps the copies of these and of their operations that it points to."""
    decoder = Decoder()
    ctypes.pointer(decoder)[0] = parts.decoder
    decoder.layers = len(blocks)
    own = (Block * len(blocks))(*blocks)
    decoder.operations = [(Op * block.count)(*block.ops[: block.count]) for block in blocks]
    for block, operations in zip(own, decoder.operations, strict=True):
        block.ops = operations
    decoder.blocks = own
    return decoder


class Pool:
    """Pages of keys and values: for each layer `[pages, kv_heads, head_dim, PAGE]` and `[pages, kv_heads, PAGE, value_dim]`.

    With a storage these are the plain pages, of which there are fewer, and each page also has a record of few bits.

    Attributes:
        recorder: records the next step, once; None: nobody wants it.
        plain: which pages are plain; None: all are.
    """

    def __init__(
        self, parts: Parts, count: int, blocks: Sequence[Block] | None = None, storage: PageStorage | None = None
    ) -> None:
        """`blocks`: the layers; None: all of the model's. `storage`: of pages that are no longer recent; None: all stay plain."""
        layers = parts.blocks if blocks is None else blocks
        dtype = (storage and storage.floats) or parts.cache_dtype
        sizes = (parts.head_dim, parts.value_dim) * len(layers)
        # Not touched here: the operating system gives the memory when a page is first written.
        self.tensors = [torch.empty(count, parts.kv_heads, size * PAGE, dtype=dtype) for size in sizes]
        self.count = count
        self.decoder = decoder_of(parts, layers)
        self.decoder.cache_type = TYPES[dtype]
        self.blocks = self.decoder.blocks
        for i in range(len(layers)):
            self.blocks[i].keys, self.blocks[i].values = (each.data_ptr() for each in self.tensors[2 * i : 2 * i + 2])
        self.recorder: Recorder | None = None
        self.plain: PlainPages | None = None
        self._broken = torch.zeros(1, dtype=torch.int32)
        if storage is not None and not storage.is_plain:
            self.plain = PlainPages(count, storage)
            self.decoder.storage = storage.structure(dtype)
            self.decoder.storage.plain_at = self.plain.places.data_ptr()
            width = parts.kv_heads * storage.record_bytes(parts)
            self.records = [torch.empty(count, width, dtype=torch.uint8) for _ in layers]
            for i, records in enumerate(self.records):
                self.blocks[i].stored = records.data_ptr()

    @property
    def plain_bytes(self) -> int:
        """Memory of plain pages beside those in few bits, at its largest; 0 where all are plain."""
        return 0 if self.plain is None else self.plain.most * sum(each[0].nbytes for each in self.tensors)

    def begin(self, step: Step, chunks: Sequence[Chunk]) -> torch.Tensor | None:
        """Before a step: plain pages for what it writes, and in `step` the pages that are stored in few bits from it on.

        Returns:
            What `step` points to.
        """
        if self.plain is None:
            return None
        pages = torch.tensor(self.plain.begin(chunks), dtype=torch.int32)
        step.stored, step.broken, step.stored_count = pages.data_ptr(), self._broken.data_ptr(), len(pages)
        return pages

    def check(self) -> None:
        """After a step: RequestError where a key or value is none that the storage can hold."""
        if self._broken.item():
            self._broken.zero_()
            raise RequestError(
                "kv_cache: a key or value is not finite, or beyond 65504, which the storage of the policy cannot hold; compute in a "
                "wider dtype (float32, bfloat16), or take keys and values: plain"
            )
