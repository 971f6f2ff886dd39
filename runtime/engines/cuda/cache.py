"""The KV cache: pages in static memory, allocated once and used again by the next pool."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from runtime.engines.base import Chunk
from runtime.engines.cuda.storage import Storage
from runtime.engines.llama_structure import Program
from runtime.engines.plain_pages import PlainPages
from runtime.kv_cache.pages import PAGE as BLOCK
from runtime.kv_cache.storage.base import Codec


@dataclass(frozen=True)
class Rows:
    """Tokens of a step, int32 `[rows]`: ids, positions in their sequences, and slots `page * page_size + place in the page`.

    Attributes:
        plain_slots: int32 `[rows]`, `place * page_size + place in the page`, for layers with stored pages; None: no such layers.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    plain_slots: torch.Tensor | None = None

    def of(self, layer: CacheLayer) -> Rows:
        """These rows, with the slots at which a layer keeps their keys and values."""
        return self if layer.stored is None or self.plain_slots is None else replace(self, slots=self.plain_slots)


class Chunks:
    """Chunks of prompts in a step, whose rows lie one after another.

    Args:
        starts: position of each chunk's first token. counts: its tokens.
        pages: int32, on the device: of each chunk's sequence the pages up to the chunk's end, one chunk after another.
    """

    def __init__(self, starts: Sequence[int], counts: Sequence[int], pages: torch.Tensor, page_size: int) -> None:
        self.starts, self.counts, self.pages = list(starts), list(counts), pages
        self._ends = [start + count for start, count in zip(starts, counts, strict=True)]
        self._widths = [-(-end // page_size) for end in self._ends]
        self._page_size = page_size
        self._tiles: dict[tuple[int, int], torch.Tensor] = {}
        self._plain: tuple[list[int], Chunks | None] | None = None

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """The pages of each chunk's sequence."""
        return self.pages.split(self._widths)

    def tiles(self, rows: int, group: int) -> torch.Tensor:
        """Tiles of so many queries of a key/value head, `group` a token; those that see most come first, which evens out the load.

        Returns:
            int32 `[tiles, 5]`: the chunk's first row, position and number of tokens, where in `pages` its own begin, and the first
            of its queries that is in the tile.
        """
        if (rows, group) not in self._tiles:
            rows_before, pages_before = ([0, *accumulate(each)][:-1] for each in (self.counts, self._widths))
            chunks = zip(rows_before, self.starts, self.counts, pages_before, strict=True)
            found = [(*each, query) for each in chunks for query in range(0, each[2] * group, rows)]
            found.sort(key=lambda tile: tile[1] + (min(tile[4] + rows, tile[2] * group) - 1) // group, reverse=True)
            self._tiles[rows, group] = torch.tensor(found, dtype=torch.int32).to(self.pages.device)
        return self._tiles[rows, group]

    def plain(self, stored: StoredLayers) -> tuple[list[int], Chunks | None]:
        """Which chunks read no stored page, and these, with the places of their pages; the same for all layers of a step."""
        if self._plain is None:
            found = [i for i, end in enumerate(self._ends) if stored.begin_of_recent(end - 1) == stored.first]
            chosen = None
            if found:
                starts, counts = ([each[i] for i in found] for each in (self.starts, self.counts))
                pages = torch.cat([self.tables[i] for i in found])
                chosen = Chunks(starts, counts, stored.places[pages.long()], self._page_size)
            self._plain = found, chosen
        return self._plain


@dataclass(frozen=True)
class StoredLayers:
    """Layers whose older pages are stored in few bits, beside the plain ones of recent tokens.

    Attributes:
        keys, values: plain pages, `[layers, places + 1, page_size, kv_heads, head_dim]`; the last place is scratch.
        codecs: of "keys" and "values".
        pools: "keys.codes", ..., "values.codes", ..., as the codecs' parts, of blocks of 32 positions:
            `[layers, pages + 1, kv_heads, blocks, 32, width]`, or `[..., blocks, width]` of what a block has once.
        places: int32 `[pages + 1]`, where in `keys` and `values` each plain page lies; of other pages any valid place.
        invalid: int32 `[1]`, not 0 once a key or value could not be stored.
        first: number of pages of a sequence that stay plain. recent: of newest tokens that a query reads plain.
    """

    keys: torch.Tensor
    values: torch.Tensor
    codecs: dict[str, Codec]
    pools: dict[str, torch.Tensor]
    places: torch.Tensor
    invalid: torch.Tensor
    first: int
    recent: int

    @classmethod
    def zeros(
        cls,
        storage: Storage,
        layers: int,
        pages: int,
        places: int,
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> StoredLayers:
        """Of so many pages and places, the last of each is scratch; `sizes`: page_size, kv_heads, head_dim."""
        page, heads, size = sizes
        codecs, pools = {"keys": storage.keys, "values": storage.values}, {}
        for side, codec in codecs.items():
            for name, part in codec.parts(size, dtype).items():
                own = (part.width,) if part.per_page else (BLOCK, part.width)
                shape = (layers, pages, heads, page // BLOCK, *own)
                pools[f"{side}.{name}"] = torch.zeros(shape, dtype=part.dtype, device=device)
        keys, values = (torch.zeros(layers, places, *sizes, dtype=dtype, device=device) for _ in range(2))
        at = torch.full((pages,), places - 1, dtype=torch.int32, device=device)
        invalid = torch.zeros(1, dtype=torch.int32, device=device)
        return cls(keys, values, codecs, pools, at, invalid, storage.first(page), storage.recent)

    def layer(self, index: int) -> StoredLayers:
        """One of them."""
        one = slice(index, index + 1)
        pools = {name: pool[one] for name, pool in self.pools.items()}
        return replace(self, keys=self.keys[one], values=self.values[one], pools=pools)

    def pools_of(self, side: str) -> dict[str, torch.Tensor]:
        """Those of "keys" or "values", by their codec's names."""
        prefix = f"{side}."
        return {name.removeprefix(prefix): pool for name, pool in self.pools.items() if name.startswith(prefix)}

    def begin_of_recent(self, position: Any) -> Any:
        """The first page after the `first` ones that a query at `position` (int, or a tensor) sees plain."""
        found = (position - self.recent) // self.keys.shape[2]
        return found.clamp(min=self.first) if isinstance(found, torch.Tensor) else max(found, self.first)


class CacheLayer(NamedTuple):
    """One layer of the cache, keys and values `[pages, page_size, kv_heads, head_dim]`.

    Attributes:
        stored: the layer's stored pages, where `keys` and `values` are the plain ones, at `stored.places`; None: all are plain.
    """

    keys: torch.Tensor
    values: torch.Tensor
    stored: StoredLayers | None = None


class Memory:
    """Keys and values of all layers, each `[pages + 1, page_size, kv_heads, head_dim]`; the last page is scratch, for padding.

    With a storage, layers whose queries see all positions have a stored page for each page, and places for those that are plain.

    Attributes:
        layers: of the cache, in order.
        scratch: the page that padding writes to.
        number: of the memories that an engine has made.
        stored: the layers with a storage together; None: there are none.
        plain: which pages are plain, of the pool that uses this memory; None where `stored` is.
        steps: `runtime.engines.cuda.steps.Steps` over this memory, whose graphs hold its addresses; made on first use.
    """

    layers: list[CacheLayer]

    def __init__(
        self,
        program: Program,
        page_size: int,
        count: int,
        device: torch.device,
        number: int = 0,
        storage: Storage | None = None,
    ) -> None:
        self._program = program
        self.device, self.page_size, self.number = device, page_size, number
        self.count = self.scratch = count
        self.steps: Any = None
        self._unchecked = False  # whether something was stored since `pop_invalid`
        self._unsent: list[int] = []  # pages whose places the device does not know
        self.stored: StoredLayers | None = None
        self.plain: PlainPages | None = None
        kept = [] if storage is None else storage.layers(program)
        # Zeros: the plain attention multiplies what it masks, and memory that was never written may hold NaN.
        self._whole = {
            i: (self._zeros(count + 1), self._zeros(count + 1)) for i in range(len(program.blocks)) if i not in kept
        }
        if storage is not None and kept:
            self._stored_at = {layer: index for index, layer in enumerate(kept)}
            sizes = page_size, program.kv_heads, program.head_dim
            places = storage.places(program, page_size, count)
            self.stored = StoredLayers.zeros(storage, len(kept), count + 1, places + 1, sizes, program.dtype, device)
        self._join()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Keys and values of the first layer, of the second, ...; plain ones."""
        return [each for layer in self.layers for each in layer[:2]]

    def restart(self) -> None:
        """For a new pool: all pages are free; keys, values and captured graphs stay."""
        self._unchecked, self._unsent = False, []
        stored = self.stored
        if stored is not None:
            stored.invalid.zero_()
            place = self.plain_bytes // stored.keys.shape[1]
            self.plain = PlainPages(self.count, self.page_size, stored.first, stored.recent, place)

    def begin(self, chunks: Sequence[Chunk]) -> list[int]:
        """Places for what chunks write; returns the pages that must be stored before their queries read."""
        plain, stored = self.plain, self.stored
        if plain is None or stored is None:
            return []
        found = plain.begin(chunks)
        self._unchecked |= bool(found)
        self._unsent += plain.placed
        if plain.most > stored.keys.shape[1] - 1:
            self._grow(plain.most)
            stored = self.stored
            assert stored is not None
        if self._unsent:
            pages = torch.tensor(self._unsent)
            stored.places[pages.to(self.device)] = plain.places[pages].to(self.device)
            self._unsent = []
        return found

    def plain_slot(self, page: int, offset: int) -> int:
        """Of a position of a page, among the places of plain pages."""
        if page == self.scratch:
            assert self.stored is not None
            return (self.stored.keys.shape[1] - 1) * self.page_size + offset
        assert self.plain is not None
        return self.plain.slot(page, offset)

    @property
    def plain_bytes(self) -> int:
        """Memory of plain pages beside stored ones."""
        return 0 if self.stored is None else self.stored.keys.nbytes + self.stored.values.nbytes

    def pop_invalid(self) -> bool:
        """Whether a key or value since the last call could not be stored (not finite, or out of range); waits for the device."""
        stored = self.stored
        if stored is None or not self._unchecked:
            return False
        self._unchecked = False
        found = bool(stored.invalid.item())
        if found:
            stored.invalid.zero_()
        return found

    # ---------------------------------------------------------------- memory
    def _zeros(self, *leading: int) -> torch.Tensor:
        program = self._program
        shape = (*leading, self.page_size, program.kv_heads, program.head_dim)
        return torch.zeros(shape, dtype=program.dtype, device=self.device)

    def _grow(self, places: int) -> None:
        """More places of plain pages. What was captured over the old ones is captured anew."""
        old = self.stored
        assert old is not None
        count = old.keys.shape[1] - 1
        most = min(self.count, max(places, count + count // 4))
        sides = []
        for side in (old.keys, old.values):
            new = self._zeros(side.shape[0], most + 1)
            new[:, :count] = side[:, :count]
            sides.append(new)
        old.places[self.scratch] = most
        self.stored = replace(old, keys=sides[0], values=sides[1])
        self.steps = None
        self._join()

    def _join(self) -> None:
        self.layers = []
        for i in range(len(self._program.blocks)):
            if i in self._whole:
                self.layers.append(CacheLayer(*self._whole[i]))
            else:
                assert self.stored is not None
                own = self.stored.layer(self._stored_at[i])
                self.layers.append(CacheLayer(own.keys[0], own.values[0], own))


class Pool:
    """Pages 0 .. count-1. When it is thrown away, its memory waits for the next pool."""

    def __init__(self, memory: Memory, count: int, release: Callable[[Memory], None]) -> None:
        self.memory = memory
        self.count = count
        weakref.finalize(self, release, memory).atexit = False
