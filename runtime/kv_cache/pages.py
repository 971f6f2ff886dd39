"""Tokens of one layer in pages, every head of every row as long as it is: what is evicted is free for others at once.

A row's tokens lie in its pages front to back, so that a length says which slots are in use (their positions are rotated into the
keys already, so any order is as good). Pools grow by an eighth when no page is free and are packed together when an eighth is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

PAGE = 32  # tokens of a page
_NONE = -1
_SPARE = 8  # a pool may have one page in so many free

#: Makes the tensor of a pool: shape, dtype. Elsewhere than in memory for caches that are offloaded.
Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class PageTensor:
    """One tensor of a page: `[PAGE, width]`, or `[width]` where the whole page shares it."""

    width: int
    dtype: torch.dtype
    per_page: bool = False


class Pages:
    """Named tensors for each of `rows` sequences, in pages that all rows share.

    A row here is one key head of one sequence: `batch * kv_heads` of them, row = sequence * kv_heads + head.

    Args:
        rows: how many.
        parts: {name: what a page has of it}.
        device: of tables and, unless `allocate` says otherwise, pools.
        allocate: where pools are made.

    Attributes:
        pools: {name: `[pages, PAGE, width]` or `[pages, width]`}.
        table: int64 `[rows, most pages]`, -1 where a row has none.
        lengths: int64 `[rows]`, tokens held.
        counts: the same on the host, so that a step need not ask the device.
        longest: the largest of them.
    """

    def __init__(
        self, rows: int, parts: Mapping[str, PageTensor], device: torch.device, allocate: Allocate | None = None
    ) -> None:
        self.parts, self.device = dict(parts), device
        self._allocate = allocate or (lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device))
        self.pools = {name: self._pool(part, 0) for name, part in self.parts.items()}
        self.table = torch.full((rows, 0), _NONE, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self._free: list[int] = []
        self.counts = torch.zeros(rows, dtype=torch.int64)
        self._next: torch.Tensor | None = None  # slot of each row's next token, where it has a page for it
        self.longest = 0

    # ---------------------------------------------------------------- size
    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Memory of pools, table and lengths, as allocated."""
        tensors = [*self.pools.values(), self.table, self.lengths]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    @property
    def pages(self) -> int:
        """Pages of the pools, free ones too."""
        return next(iter(self.pools.values())).shape[0]

    # ---------------------------------------------------------------- writing
    def append(self, tensors: Mapping[str, torch.Tensor], counts: torch.Tensor | None = None) -> None:
        """Put the first `counts[row]` of `tensors[name][row]` behind what the row holds; no part may be per page.

        Args:
            tensors: {name: `[rows, t, width]`}.
            counts: int64 `[rows]`, at most t each; None: t.
        """
        width = next(iter(tensors.values())).shape[1]
        if counts is None and width == 1:
            self.append_one({name: values[:, 0] for name, values in tensors.items()})
            return
        counts = torch.full_like(self.lengths, width) if counts is None else counts
        there = torch.arange(width, device=counts.device) < counts[:, None]
        self.append_flat({name: values[there] for name, values in tensors.items()}, counts)

    def append_flat(self, tensors: Mapping[str, torch.Tensor], counts: torch.Tensor) -> None:
        """As `append`, of `[n, width]` each: the `counts[row]` tokens of row 0, of row 1, ..."""
        self._reserve(self.lengths + counts)
        rows = torch.arange(self.rows, device=counts.device).repeat_interleave(counts)
        before = counts.cumsum(0) - counts
        slots = self._slots(rows, (self.lengths - before)[rows] + torch.arange(len(rows), device=counts.device))
        for name, values in tensors.items():
            pool = self.pools[name]
            pool.view(-1, pool.shape[-1])[slots] = values.to(pool.dtype)
        self._set_lengths(self.lengths + counts)

    def append_one(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """As `append` with one token for every row, `[rows, width]`; cheap, since it is done at every step."""
        following = self._following()
        for name, values in tensors.items():
            pool = self.pools[name]
            pool.view(-1, pool.shape[-1]).index_copy_(0, following, values.to(pool.dtype))
        self._next = following + 1
        self.lengths = self.lengths + 1
        self.counts += 1
        self.longest += 1

    def append_pages(self, tensors: Mapping[str, torch.Tensor], counts: torch.Tensor) -> None:
        """Append whole pages to the rows, whose lengths must be multiples of PAGE.

        Args:
            tensors: {name: `[pages, PAGE, width]` or `[pages, width]`}, the pages of row 0 first.
            counts: int64 `[rows]`, pages of each row.
        """
        self._reserve(self.lengths + PAGE * counts)
        columns, first = torch.arange(self.table.shape[1], device=self.device), self.lengths[:, None] // PAGE
        targets = self.table[(columns >= first) & (columns < first + counts[:, None])]
        for name, values in tensors.items():
            self.pools[name][targets.to(self.pools[name].device)] = values.to(self.pools[name].device)
        self._set_lengths(self.lengths + PAGE * counts)

    def keep(self, places: torch.Tensor, counts: torch.Tensor) -> None:
        """Keep the slots `places[row, :counts[row]]` of each row, in that order, and free the pages that are left over.

        Args:
            places: int64 `[rows, most]`, no slot of a row twice; no part may be per page.
            counts: int64 `[rows]`.
        """
        steps = torch.arange(places.shape[1], device=places.device)
        # Rows that only lose their end, and tokens before the first that moves, stay where they are.
        moved = (places != steps) & (steps[None] < counts[:, None])
        rows, columns = moved.nonzero(as_tuple=True)
        if len(rows):
            sources, targets = self._slots(rows, places[rows, columns]), self._slots(rows, columns)
            for pool in self.pools.values():
                flat = pool.view(-1, pool.shape[-1])
                flat[targets] = flat[sources]
        self._release(-(-counts // PAGE))
        self._set_lengths(counts.clone())

    def select_rows(self, rows: torch.Tensor) -> None:
        """Only these rows, in that order; a row may come several times (beams), each with tokens of its own."""
        rows = rows.to(self.device)
        fresh = Pages(len(rows), self.parts, self.device, self._allocate)
        there = self.table[rows] != _NONE
        sources = self.table[rows][there]
        copies = {name: pool[sources.to(pool.device)] for name, pool in self.pools.items()}
        fresh.append_pages(copies, there.sum(1))
        fresh._set_lengths(self.lengths[rows])
        self.__dict__.update(fresh.__dict__)

    def crop(self, counts: torch.Tensor) -> None:
        """Keep the first `counts[row]` tokens of each row; none where that is below 0."""
        counts = torch.minimum(counts, self.lengths).clamp(min=0)
        self._release(-(-counts // PAGE))
        self._set_lengths(counts)

    # ---------------------------------------------------------------- reading
    def dense(self, name: str) -> torch.Tensor:
        """A copy `[rows, longest, width]` of a part that every token has, zeros past a row's length."""
        return self.spread(self.in_use(self.pools[name]))

    def in_use(self, pool: torch.Tensor) -> torch.Tensor:
        """A copy of a pool's pages in use, the pages of row 0 first: `[pages, PAGE, width]` or `[pages, width]`."""
        return self.copy_of(pool, self.table[self.table != _NONE])

    def copy_of(self, pool: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Copies of the pages `ids` (int64 `[n]`) of a pool, where the table is."""
        return pool[ids.to(pool.device)].to(self.device)

    def spread(self, pages: torch.Tensor) -> torch.Tensor:
        """What lies in pages in the order of `in_use`, `[pages, PAGE, width]`, as `[rows, longest, width]`, zeros past the ends."""
        there = self.table != _NONE
        result = pages.new_zeros(*there.shape, PAGE, pages.shape[-1])
        result[there] = pages
        result = result.flatten(1, 2)[:, : self.longest]
        return result.masked_fill(~self.used().unsqueeze(-1), 0)

    def used(self) -> torch.Tensor:
        """bool `[rows, longest]`."""
        return torch.arange(self.longest, device=self.device)[None] < self.lengths[:, None]

    # ---------------------------------------------------------------- pages
    def _pool(self, part: PageTensor, pages: int) -> torch.Tensor:
        shape = (pages, part.width) if part.per_page else (pages, PAGE, part.width)
        return self._allocate(shape, part.dtype)

    def _set_lengths(self, lengths: torch.Tensor) -> None:
        self.lengths = lengths
        self.counts = lengths.to("cpu", copy=True)
        self.longest = int(self.counts.max()) if len(lengths) else 0
        self._next = None

    def _slots(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self.table[rows, places // PAGE] * PAGE + places % PAGE

    def _following(self) -> torch.Tensor:
        """The slot of each row's next token, int64 `[rows]`; rows whose pages are full get one. Nothing is fetched from the device."""
        full = (self.counts % PAGE == 0).nonzero()[:, 0]
        columns = self.counts[full] // PAGE
        if len(full):
            self._widen(int(columns.max()) + 1)
        if self._next is None:
            last = self.lengths.clamp(max=PAGE * self.table.shape[1] - 1)
            self._next = self._slots(torch.arange(self.rows, device=self.device), last)
        if not len(full):
            return self._next
        pages = torch.tensor(self._take(len(full)), dtype=torch.int64)
        rows, columns, pages = (part.to(self.device, non_blocking=True) for part in (full, columns, pages))
        self.table[rows, columns] = pages
        return self._next.index_copy(0, rows, PAGE * pages)

    def _widen(self, columns: int) -> None:
        """At least so many columns in the table."""
        if columns > self.table.shape[1]:
            more = self.table.new_full((len(self.table), columns - self.table.shape[1]), _NONE)
            self.table = torch.cat([self.table, more], 1)

    def _take(self, count: int) -> list[int]:
        """Free pages, made where there are not enough."""
        if count > len(self._free):
            self._grow(count - len(self._free))
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        return taken

    def _reserve(self, lengths: torch.Tensor) -> None:
        """Pages for so many tokens of each row."""
        needed = -(-lengths // PAGE)
        self._widen(int(needed.max()) if needed.numel() else 0)
        columns = torch.arange(self.table.shape[1], device=self.table.device)
        missing = (columns[None] < needed[:, None]) & (self.table == _NONE)
        count = int(missing.sum())
        if count:
            self.table[missing] = torch.tensor(self._take(count), dtype=torch.int64, device=self.table.device)

    def _grow(self, count: int) -> None:
        old = self.pages
        count = max(count, old // _SPARE)
        for name, pool in self.pools.items():
            grown = self._pool(self.parts[name], old + count)
            grown[:old] = pool
            self.pools[name] = grown
        self._free = [*range(old + count - 1, old - 1, -1), *self._free]

    def _release(self, needed: torch.Tensor) -> None:
        """Free each row's pages beyond the first `needed[row]`; pools are packed together when much of them is free."""
        columns = torch.arange(self.table.shape[1], device=self.device)
        left = (columns[None] >= needed[:, None]) & (self.table != _NONE)
        self._free += self.table[left].tolist()
        self.table[left] = _NONE
        most = int(needed.max()) if len(needed) else 0
        if most < self.table.shape[1]:
            self.table = self.table[:, :most].clone()
        if len(self._free) * _SPARE > self.pages:
            there = self.table != _NONE
            sources = self.table[there]
            for name, pool in self.pools.items():
                packed = self._pool(self.parts[name], len(sources))
                packed.copy_(pool[sources.to(pool.device)])
                self.pools[name] = packed
            self.table[there] = torch.arange(len(sources), device=self.device)
            self._free = []
