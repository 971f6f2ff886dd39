"""The KV cache of the native engine: pages of all layers, as attention.h reads them."""

from __future__ import annotations

import ctypes
import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.engines.base import Chunk
from runtime.engines.native.layout import Arena, RaggedPages
from runtime.engines.native.parts import Parts
from runtime.engines.native.recorder import Recorder
from runtime.engines.native.selection import bounds
from runtime.engines.native.storage import PageStorage, whole_layers
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


@dataclass
class _Stay:
    """A sequence that runs.

    Attributes:
        next: from this page on it needs pages plain, and the first ones of the policy.
        counted: pages that are counted as needed by it.
        prompt: pages of its prompt, on which others may begin too.
    """

    next: int
    counted: int
    prompt: int


class PlainPages:
    """Places of plain pages, and which pages have been stored in few bits.

    A query at position p sees a page as it is stored where the page ends at p - recent or before, whatever else is computed with it. So
    a page is stored when such a query comes, and its plain one is given up when no query to come can see it.

    Attributes:
        places: int32 `[pages]`, of each page that is plain (kv_store.h reads it).
        most: places that were ever taken. most_needed: that sequences needed at once; others are kept for those to come.
    """

    def __init__(self, count: int, storage: PageStorage, size: int) -> None:
        """`size`: bytes of a place."""
        self.places = torch.zeros(count, dtype=torch.int32)
        self.most = self.most_needed = 0
        self._first, self._recent, self._size = storage.first, storage.recent, size
        self._at: dict[int, int] = {}
        self._free: list[int] = []  # a heap: the lowest first, so that few places are ever touched
        self._stored: set[int] = set()
        self._lost: set[int] = set()  # pages that are neither stored nor plain any more
        self._stays: dict[int, _Stay] = {}  # of sequences, by the first page that is theirs
        self._needed: dict[int, int] = {}  # by so many sequences
        self._idle: OrderedDict[int, None] = OrderedDict()  # pages with places that none needs, the longest so first
        self._idle_bytes = math.inf  # that they may take

    @property
    def bytes(self) -> int:
        """Memory of the places that sequences needed at once."""
        return self.most_needed * self._size

    # ---------------------------------------------------------------- a step
    def begin(self, chunks: Sequence[Chunk], drafts: bool = False) -> list[int]:
        """Places for what chunks write; returns the pages that must be stored in few bits in this step.

        `drafts`: all that is written will be written again.
        """
        found: dict[int, bool] = {}
        if not drafts:
            for chunk in chunks:
                self._pass(chunk)
        for chunk in chunks:
            begin = chunk.slot + chunk.cached
            end = begin + len(chunk.tokens)
            for index in range(begin // PAGE, (end - 1) // PAGE + 1):
                page = chunk.pages[index]
                if index * PAGE >= begin:  # new, or written again
                    self._stored.discard(page)
                    self._lost.discard(page)
                if page not in self._at:
                    self._take(page)
            for index in range(self._begin_of_recent(begin), (begin - 1) // PAGE + 1):
                if chunk.pages[index] not in self._at:
                    raise RuntimeError("a page that a step reads plain is not there")  # a mistake in this file
            # What is drafted may be taken back: a page that it fills is stored again.
            final = 0 if drafts else end if chunk.outputs == 1 and chunk.parents is None else chunk.slot
            index = (end - 1 - self._recent) // PAGE - 1
            while index >= self._first and chunk.pages[index] not in self._stored:
                page = chunk.pages[index]
                found[page] = found.get(page, False) or (index + 1) * PAGE <= final
                index -= 1
        self._stored.update(page for page, final in found.items() if final)
        self.most_needed = max(self.most_needed, len(self._at) - len(self._idle))
        return list(found)

    def _begin_of_recent(self, position: int) -> int:
        """The first page that a query at `position` sees plain, of those after the first ones that always are."""
        return max(self._first, (position - self._recent) // PAGE)

    def _pass(self, chunk: Chunk) -> None:
        """Count the pages that are new to a sequence, and give up those that neither it nor one that begins on its last full page needs."""
        stay, pages = self._stays.setdefault(self._key(chunk.pages), _Stay(self._first, 0, 0)), chunk.pages
        for page in pages[stay.counted :]:
            self._need(page)
        stay.counted = len(pages)
        end = self._begin_of_recent(chunk.slot // PAGE * PAGE)
        while stay.next < end and pages[stay.next] in self._stored:
            page = pages[stay.next]
            if self._spare(page):
                if stay.next < stay.prompt:
                    self._idle[page] = None
                else:
                    heapq.heappush(self._free, self._at.pop(page))
            stay.next += 1
        self._trim()

    def _take(self, page: int) -> None:
        if not self._free:
            self._free.append(self.most)
            self.most += 1
        self._at[page] = place = heapq.heappop(self._free)
        self.places[page] = place

    # ---------------------------------------------------------------- sequences that lose tokens
    def write(self, pages: Sequence[int], held: int) -> None:
        """Places for the pages of a sequence of so many tokens that will not be stored."""
        for index, page in enumerate(pages[: -(-held // PAGE)]):
            if not self._is_stored(index, held) and page not in self._at:
                self._take(page)

    def replace(self, pages: Sequence[int], into: Sequence[int], held: int) -> None:
        """What stays of a sequence, so many tokens, is in other pages now, or in the same at the same place."""
        old = self._stays.pop(self._key(pages), None)
        self._stays[into[0]] = _Stay(self._first, len(into), 0)
        for index, page in enumerate(into):
            self._need(page)
            self._lost.discard(page)
            (self._stored.add if self._is_stored(index, held) else self._stored.discard)(page)
        self.most_needed = max(self.most_needed, len(self._at) - len(self._idle))
        if old is not None:
            self._give_up(old, pages)

    def _is_stored(self, index: int, held: int) -> bool:
        return index >= self._first and (index + 1) * PAGE + self._recent < held

    # ---------------------------------------------------------------- sequences that share pages
    def usable(self, pages: Sequence[int]) -> int:
        """After how many of these pages, which other sequences compute or have computed, one can begin."""
        count = next((place for place, page in enumerate(pages) if page in self._lost), len(pages))
        while count and any(
            page in self._stored and page not in self._at for page in pages[self._begin_of_recent(count * PAGE) : count]
        ):
            count -= 1
        return count

    def enter(self, pages: Sequence[int], shared: int) -> None:
        """A sequence of these pages will begin after the first `shared`: until it leaves, what it sees plain is kept for it."""
        begin = min(shared, self._begin_of_recent(shared * PAGE))
        self._stays[pages[shared]] = _Stay(max(begin, self._first), len(pages), len(pages))
        for page in (*pages[: min(begin, self._first)], *pages[begin:]):
            self._need(page)

    def leave(self, pages: Sequence[int]) -> None:
        """The sequence of these pages is gone; another may begin on what it has computed."""
        stay = self._stays.pop(self._key(pages), None)
        if stay is not None:  # it has computed something
            self._give_up(stay, pages)

    def _give_up(self, stay: _Stay, pages: Sequence[int]) -> None:
        first = min(self._first, stay.counted)
        for page in (*pages[:first], *pages[max(self._first, stay.next) : stay.counted]):
            if self._spare(page):
                self._idle[page] = None
        self._trim()

    def keep(self, memory: float) -> None:
        """Bytes that places may take of pages that no sequence needs."""
        self._idle_bytes = memory
        self._trim()

    def _key(self, pages: Sequence[int]) -> int:
        """Of a sequence: the first page that it does not share, where it has entered; else its first page."""
        return next((page for page in reversed(pages) if page in self._stays), pages[0])

    def _need(self, page: int) -> None:
        self._needed[page] = self._needed.get(page, 0) + 1
        self._idle.pop(page, None)

    def _spare(self, page: int) -> bool:
        """One sequence less needs a page; whether it has a place that none needs any more."""
        self._needed[page] -= 1
        if self._needed[page]:
            return False
        del self._needed[page]
        return page in self._at

    def _trim(self) -> None:
        while len(self._idle) * self._size > self._idle_bytes:
            page, _ = self._idle.popitem(last=False)
            heapq.heappush(self._free, self._at.pop(page))
            if page not in self._stored:
                self._lost.add(page)


class Pool:
    """Pages of keys and values: for each layer `[pages, kv_heads, head_dim, PAGE]` and `[pages, kv_heads, PAGE, value_dim]`.

    With a storage these are the plain pages, of which there are fewer, and each page also has a record of few bits; but layers whose
    queries see a window have all their pages plain.

    Attributes:
        recorder: records the next step, once; None: nobody wants it.
        plain: which pages are plain; None: all are.
        arenas: of all layers.
        file: with the pages that are stored; None: they are in memory.
        reads: tokens that steps with a selection read, and could have read, of all heads of all layers that are not windows.
    """

    def __init__(
        self, parts: Parts, count: int, blocks: Sequence[Block] | None = None, storage: PageStorage | None = None
    ) -> None:
        """`blocks`: the layers; None: all of the model's. `storage`: of pages that are no longer recent; None: all stay plain."""
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
            self.plain = PlainPages(count, storage, storage.plain_bytes(parts, layers))
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
