"""The KV cache of the native engine: pages of all layers, as attention.h reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from runtime.engines.base import Chunk
from runtime.engines.native.layout import Arena, RaggedPages
from runtime.engines.native.parts import Parts, linears
from runtime.engines.native.recorder import Recorder
from runtime.engines.native.selection import bounds
from runtime.engines.native.storage import PageStorage, whole_layers
from runtime.engines.plain_pages import PlainPages
from runtime.errors import RequestError
from runtime.kernels.cpu import library
from runtime.kernels.cpu.decoder import PAGE, Block, Copy, Decoder, Op, Received, Step, Tokens
from runtime.kernels.cpu.library import TYPES
from runtime.kv_cache.offload import RecordFile


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

    With a storage these are the plain pages, of which there are fewer, and each page also has a record of few bits; but layers whose
    queries see a window have all their pages plain.

    Attributes:
        recorder: records the next step, once; None: nobody wants it.
        plain: which pages are plain; None: all are.
        arenas: of all layers.
        exact: the decoder with inputs as they are, for prefix tokens, which static grids would clip; None: nothing asks for it.
        file: with the pages that are stored; None: they are in memory.
        reads: tokens that steps with a selection read, and could have read, of all heads of all layers that are not windows.
    """

    def __init__(
        self,
        parts: Parts,
        count: int,
        blocks: Sequence[Block] | None = None,
        storage: PageStorage | None = None,
        exact: bool = False,
    ) -> None:
        """`blocks`: the layers; None: all of the model's. `storage`: of pages that are no longer recent; None: all stay plain. `exact`:
        there are prefix tokens that are not rounded."""
        layers = parts.blocks if blocks is None else blocks
        dtype = (storage and storage.floats) or parts.cache_dtype
        # Not touched here: the operating system gives the memory when a page is first written.
        sides = [
            torch.empty(len(layers), count, parts.kv_heads, size * PAGE, dtype=dtype)
            for size in (parts.head_dim, parts.value_dim)
        ]
        self.tensors = [each for layer in zip(*sides, strict=True) for each in layer]
        self.count = count
        self.decoder = decoder_of(parts, layers)
        self.decoder.cache_type = TYPES[dtype]
        self.blocks = self.decoder.blocks
        for i in range(len(layers)):
            self.blocks[i].keys, self.blocks[i].values = (each.data_ptr() for each in self.tensors[2 * i : 2 * i + 2])
        self.recorder: Recorder | None = None
        self.plain: PlainPages | None = None
        self.file: RecordFile | None = None
        self.reads = 0, 0
        self._storage = storage
        self._broken = torch.zeros(1, dtype=torch.int32)
        stored = [] if storage is None else storage.stored_layers(layers)
        plain = [number for number in range(len(layers)) if number not in stored]
        arenas = Arena(stored, [*range(len(stored))]), Arena(plain, plain)
        self.arenas = [arena for arena in arenas if arena.layers]
        if storage is not None and stored:
            size = storage.plain_bytes(parts, layers)
            self.plain = PlainPages(count, PAGE, storage.first, storage.recent, size)
            self.decoder.storage = storage.structure(dtype)
            self.decoder.storage.plain_at = self.plain.places.data_ptr()
            width = parts.kv_heads * storage.record_bytes(parts)
            if storage.directory is not None:
                self.file = RecordFile(storage.directory, count, width, len(stored))
                self.decoder.storage.advise = ctypes.cast(ctypes.CDLL(None).madvise, ctypes.c_void_p).value
                self.decoder.storage.mapped = self.file.layer_bytes
            memory = (
                torch.empty(len(stored), count, width, dtype=torch.uint8) if self.file is None else self.file.records
            )
            self.records = dict(zip(stored, memory, strict=True))
            for i, records in self.records.items():
                self.blocks[i].stored = records.data_ptr()
        chosen = [] if storage is None else storage.selecting_layers(layers)
        self.bounds = {i: bounds(count, parts.kv_heads, parts.head_dim, dtype) for i in chosen}
        for i, tensor in self.bounds.items():
            self.blocks[i].bounds = tensor.data_ptr()
        self.exact: Decoder | None = None
        if exact:
            self.exact = decoder_of(parts, layers)
            # Its operations are copies; experts would be shared, but static grids behind a prefix are refused for these.
            for operations in self.exact.operations:
                for _, each, _ in linears(operations, len(operations)):
                    if each.rounding.kind:
                        each.digits, each.rounding = 3, library.Rounding()
            self.exact.cache_type, self.exact.storage = self.decoder.cache_type, self.decoder.storage
            for i in range(len(layers)):
                own, shared = self.exact.blocks[i], self.blocks[i]
                own.keys, own.values, own.stored, own.bounds = shared.keys, shared.values, shared.stored, shared.bounds

    def count_reads(self, held: int, read: int) -> None:
        """Of the rows of a step that select: tokens that were there, and those that layers with bounds read."""
        heads, selecting = self.decoder.kv_heads, len(self.bounds)
        whole = len(whole_layers(self.blocks[: self.decoder.layers]))
        self.reads = (
            self.reads[0] + heads * (selecting * read + (whole - selecting) * held),
            self.reads[1] + heads * whole * held,
        )

    @property
    def plain_bytes(self) -> int:
        """Memory of plain pages beside those in few bits, at its largest; 0 where all are plain."""
        return 0 if self.plain is None else self.plain.bytes

    def begin(self, step: Step, chunks: Sequence[Chunk], drafts: bool = False) -> torch.Tensor | None:
        """Before a step: plain pages for what it writes, and in `step` the pages that are stored in few bits from it on.

        `drafts`: all that the step writes will be written again.

        Returns:
            What `step` points to.
        """
        if self.plain is None:
            return None
        if self.file is not None:
            self.file.reserve(1 + max(max(chunk.pages) for chunk in chunks))
        pages = torch.tensor(self.plain.begin(chunks, drafts), dtype=torch.int32)
        step.stored, step.broken, step.stored_count = pages.data_ptr(), self._broken.data_ptr(), len(pages)
        return pages

    def copy(
        self,
        pages: Sequence[int],
        into: Sequence[int],
        source: torch.Tensor,
        target: torch.Tensor,
        held: int = 0,
        left: int = 0,
        counts: torch.Tensor | None = None,
        layouts: tuple[RaggedPages | None, RaggedPages | None] = (None, None),
    ) -> None:
        """What is at positions of a sequence's pages, `source`, also to positions of `into`, `target`, one after another, in all layers.

        Args:
            source, target: int64 `[n]`, or of each head, as it counts, `[layers, kv_heads, n]`.
            held: slots that are taken in `pages`, where `target` is all that will be in `into`, in `left` slots; 0: what is copied is
                plain, and stays so.
            counts: int64 `[layers, kv_heads]`, of each head how many count; None: all.
            layouts: of `pages` and of `into`; None: all heads see the same pages.
        """
        source, target = source.contiguous(), target.contiguous()
        places = [torch.tensor(each, dtype=torch.int32) for each in (pages, into)]
        plain = self.plain if held else None
        if plain is not None:
            plain.write(into, left)
            if self.file is not None:
                self.file.reserve(1 + max(into))
        order = Copy(
            ctypes.pointer(self.decoder), *(each.data_ptr() for each in places), *map(_address, layouts),
            source.shape[-1], source.shape[-1] if source.dim() > 1 else 0, held - 1, left - 1,
            None if counts is None else counts.data_ptr(), source.data_ptr(), target.data_ptr(), self._broken.data_ptr(),
        )  # fmt: skip
        found = library.load()
        assert found is not None
        found.decoder_copy(ctypes.byref(order), torch.get_num_threads())
        if plain is not None:
            plain.replace(pages, into, left)
            self.check()

    def receive(
        self,
        pages: Sequence[int],
        slots: Sequence[int],
        queries: torch.Tensor,
        sums: torch.Tensor,
        layout: RaggedPages | None = None,
        hidden: torch.Tensor | None = None,
    ) -> None:
        """Add what every token of a sequence gets of the attention of some of its queries.

        Args:
            slots: of these queries' own tokens, ascending; below 0 where these are gone.
            queries: float32 `[layers, slots, heads, head_dim]`, rotated.
            sums: float32 `[layers, kv_heads, n]`, n a multiple of PAGE above all positions, as heads count them.
            layout: of the pages; None: all heads see the same pages.
            hidden: int64 `[layers, kv_heads]`, before these positions queries see nothing; None: they see all.
        """
        found, threads = library.load(), torch.get_num_threads()
        assert found is not None
        places, numbers = torch.tensor(pages, dtype=torch.int32), torch.tensor(slots, dtype=torch.int64)
        memory = torch.empty(found.received_memory(sums.shape[-1], threads), dtype=torch.uint8)
        order = Received(
            ctypes.pointer(self.decoder), places.data_ptr(), _address(layout), len(numbers), sums.shape[-1],
            None if hidden is None else hidden.data_ptr(), numbers.data_ptr(), queries.data_ptr(), sums.data_ptr(),
            memory.data_ptr(),
        )  # fmt: skip
        found.decoder_received(ctypes.byref(order), threads)
        if self.file is not None:
            self.file.forget()

    def tokens(
        self, pages: Sequence[int], layer: int, source: torch.Tensor, held: int, layout: RaggedPages | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of tokens of a sequence, float32 `[kv_heads, n, head_dim]` and `[kv_heads, n, value_dim]`.

        Args:
            source: int64 `[kv_heads, n]`, their positions, as heads count.
            held: slots that are taken in `pages`.
            layout: as of `receive`.
        """
        found, decoder = library.load(), self.decoder
        assert found is not None
        places, source = torch.tensor(pages, dtype=torch.int32), source.contiguous()
        keys, values = (torch.empty(*source.shape, size) for size in (decoder.head_dim, decoder.value_dim))
        order = Tokens(
            ctypes.pointer(decoder), places.data_ptr(), _address(layout), layer, source.shape[1], held - 1,
            source.data_ptr(), keys.data_ptr(), values.data_ptr(),
        )  # fmt: skip
        found.decoder_tokens(ctypes.byref(order), torch.get_num_threads())
        if self.file is not None:
            self.file.forget()
        return keys, values

    def check(self) -> None:
        """After stored pages were read and written: RequestError where a key or value is none that the storage can hold."""
        if self.file is not None:
            self.file.forget()
        if self._broken.item():
            self._broken.zero_()
            raise RequestError(
                f"kv_cache ({self._storage}): a key or value is not finite, or beyond the 65504 that integers hold; compute in a wider "
                "dtype (float32, bfloat16), or take keys: fp8 or plain (values likewise) where it is only large"
            )


def _address(layout: RaggedPages | None) -> int | None:
    return None if layout is None else ctypes.addressof(layout.ragged)
