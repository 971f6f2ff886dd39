"""Keys and values of one layer in pages, every head of every row as long as it is: what is evicted is free for others at once.

A head's tokens lie in its pages in any order (their positions are rotated into the keys already), full pages first, so that a
length says which slots are in use. Tensors grow by an eighth at least when no page is free, and are made anew when tokens are evicted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

PAGE = 32  # tokens of a page
_NONE = -1


class PagedTokens:
    """Named tensors `[tokens, width]` for each of `rows` sequences, in pages that all share.

    A row here is one key head of one sequence: `batch * kv_heads` of them, row = sequence * kv_heads + head.

    Attributes:
        pools: {name: `[pages, PAGE, width]`}.
        table: int64 `[rows, most pages]`, -1 where a row has none.
        lengths: int64 `[rows]`, tokens held.
    """

    def __init__(self, rows: int, widths: dict[str, int], dtypes: dict[str, torch.dtype], device: torch.device) -> None:
        self.pools = {
            name: torch.empty(0, PAGE, width, dtype=dtypes[name], device=device) for name, width in widths.items()
        }
        self.table = torch.full((rows, 0), _NONE, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self._free: list[int] = []

    # ---------------------------------------------------------------- size
    @property
    def nbytes(self) -> int:
        """Memory of pools, table and lengths, as allocated."""
        tensors = [*self.pools.values(), self.table, self.lengths]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    @property
    def longest(self) -> int:
        return int(self.lengths.max()) if self.lengths.numel() else 0

    # ---------------------------------------------------------------- writing
    def append(self, tensors: dict[str, torch.Tensor], counts: torch.Tensor) -> None:
        """Put the first `counts[row]` of `tensors[name][row]` behind what the row holds.

        Args:
            tensors: {name: `[rows, t, width]`}.
            counts: int64 `[rows]`, at most t each.
        """
        self._reserve(self.lengths + counts)
        width = next(iter(tensors.values())).shape[1]
        steps = torch.arange(width, device=counts.device)
        rows, columns = (steps[None] < counts[:, None]).nonzero(as_tuple=True)
        slots = self._slots(rows, self.lengths[rows] + columns)
        for name, values in tensors.items():
            pool = self.pools[name]
            pool.view(-1, pool.shape[-1])[slots] = values[rows, columns].to(pool.dtype)
        self.lengths = self.lengths + counts

    def keep(self, places: torch.Tensor, counts: torch.Tensor) -> None:
        """Keep the slots `places[row, :counts[row]]` of each row, in that order, and free the rest, pages and all.

        Args:
            places: int64 `[rows, most]`, no slot of a row twice.
            counts: int64 `[rows]`.
        """
        self._rebuild(torch.arange(len(counts), device=counts.device), places, counts)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Only these rows, in that order; a row may come several times (beams), each with tokens of its own."""
        rows = rows.to(self.lengths.device)
        counts = self.lengths[rows]
        width = int(counts.max()) if len(counts) else 0
        places = torch.arange(max(1, width), device=rows.device).expand(len(rows), -1)
        self._rebuild(rows, places, counts)

    # ---------------------------------------------------------------- reading
    def dense(self, names: Sequence[str]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Copies `[rows, longest, width]` of the named tensors (garbage past a row's length), and bool `[rows, longest]`: in use.

        The truth that kernels are tested against; they read the pages themselves.
        """
        longest = self.longest
        columns = torch.arange(longest, device=self.lengths.device)
        used = columns[None] < self.lengths[:, None]
        rows = torch.arange(len(self.lengths), device=columns.device)[:, None].expand_as(used)
        slots = self._slots(rows, columns.expand_as(used)).masked_fill(~used, 0)
        if not longest or not self.pools[names[0]].shape[0]:
            shape = (len(self.lengths), longest)
            return [self.pools[n].new_zeros(*shape, self.pools[n].shape[-1]) for n in names], used
        return [self.pools[n].view(-1, self.pools[n].shape[-1])[slots] for n in names], used

    # ---------------------------------------------------------------- pages
    def _slots(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        if not self.table.shape[1]:
            return torch.zeros_like(places)
        return self.table[rows, (places // PAGE).clamp(max=self.table.shape[1] - 1)] * PAGE + places % PAGE

    def _reserve(self, lengths: torch.Tensor) -> None:
        """Pages for so many tokens of each row."""
        needed = -(-lengths // PAGE)
        most = int(needed.max()) if needed.numel() else 0
        if most > self.table.shape[1]:
            more = self.table.new_full((len(self.table), most - self.table.shape[1]), _NONE)
            self.table = torch.cat([self.table, more], 1)
        columns = torch.arange(self.table.shape[1], device=self.table.device)
        missing = (columns[None] < needed[:, None]) & (self.table == _NONE)
        count = int(missing.sum())
        if not count:
            return
        if count > len(self._free):
            self._grow(count - len(self._free))
        taken = [self._free.pop() for _ in range(count)]
        self.table[missing] = torch.tensor(taken, dtype=torch.int64, device=self.table.device)

    def _grow(self, count: int) -> None:
        old = next(iter(self.pools.values())).shape[0]
        count = max(count, old // 8)
        for name, pool in self.pools.items():
            grown = pool.new_empty(old + count, *pool.shape[1:])
            grown[:old] = pool
            self.pools[name] = grown
        self._free = [*range(old + count - 1, old - 1, -1), *self._free]

    def _rebuild(self, rows: torch.Tensor, places: torch.Tensor, counts: torch.Tensor) -> None:
        """Fresh pools of exactly the pages wanted: row i holds the slots `places[i, :counts[i]]` of row `rows[i]`."""
        slots = self._slots(rows[:, None].expand_as(places), places)
        fresh = PagedTokens(
            len(rows), {n: p.shape[-1] for n, p in self.pools.items()}, {n: p.dtype for n, p in self.pools.items()},
            self.lengths.device,
        )  # fmt: skip
        used = torch.arange(places.shape[1], device=places.device)[None] < counts[:, None]
        slots = slots.masked_fill(~used, 0)
        fresh._reserve(counts)
        for name, pool in self.pools.items():
            if int(counts.sum()):
                flat = pool.view(-1, pool.shape[-1])
                target = fresh.pools[name]
                where, columns = used.nonzero(as_tuple=True)
                target.view(-1, target.shape[-1])[fresh._slots(where, columns)] = flat[slots[used]]
        self.pools, self.table, self._free, self.lengths = fresh.pools, fresh.table, fresh._free, counts.clone()
