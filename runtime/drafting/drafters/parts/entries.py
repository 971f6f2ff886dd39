"""Keys and values of one text for a block that sees the last so many of them."""

from __future__ import annotations

import torch

from runtime.drafting.drafters.parts.mtp_block import BlockSizes

_FIRST = 64  # entries that there is room for at first


class Entries:
    """A cache that grows at its end, is cut back there, and forgets at its beginning what nothing sees any more.

    Args:
        sizes: of the block.
        window: entries that each one sees, its own included. Memory is that of four times as many at most.
    """

    def __init__(self, sizes: BlockSizes, window: int, dtype: torch.dtype, device: torch.device) -> None:
        self._window = window
        shape = (2, sizes.kv_heads, 0, sizes.head_dim)
        self._memory = torch.empty(shape, dtype=dtype, device=device)
        self.count = 0

    @property
    def nbytes(self) -> int:
        return self._memory.numel() * self._memory.element_size()

    def reserve(self, more: int) -> None:
        """Room for so many more, so that adding them (and taking them back) moves nothing."""
        room = self._memory.shape[2]
        if self.count + more <= room:
            return
        kept = min(self.count, self._window)
        old = self._memory[:, :, self.count - kept : self.count]
        if self.count >= 2 * self._window and kept + more <= room:
            self._memory[:, :, :kept] = old.clone()
        else:
            kinds, heads, _, dim = self._memory.shape
            self._memory = old.new_empty(kinds, heads, max(_FIRST, 2 * room, kept + more), dim)
            self._memory[:, :, :kept] = old
        self.count = kept

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """`[new, kv_heads, head_dim]` each, after room was made for them."""
        end = self.count + len(keys)
        self._memory[0, :, self.count : end] = keys.transpose(0, 1)
        self._memory[1, :, self.count : end] = values.transpose(0, 1)
        self.count = end

    def drop(self, count: int) -> None:
        """Take the last so many back."""
        self.count -= count

    def attend(self, queries: torch.Tensor) -> torch.Tensor:
        """What queries of the last entry find, `[kv_heads, heads of each, head_dim]` as they are themselves."""
        keys, values = self._memory[:, :, max(0, self.count - self._window) : self.count]
        weights = torch.softmax(queries @ keys.transpose(1, 2), -1, dtype=torch.float32)
        return weights.to(values.dtype) @ values
