"""The newest queries of a layer, for those who score tokens by what these look at."""

from __future__ import annotations

import torch


class QueryWindow:
    """Queries `[batch, heads, q, size]` in the order in which they came. Pieces are put together only when they are asked for."""

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Memory as allocated."""
        return sum(piece.untyped_storage().nbytes() for piece in self._pieces)

    def append(self, query: torch.Tensor, window: int, valid: torch.Tensor | None = None) -> None:
        """Add new queries; older ones than the newest `window` may be dropped.

        Args:
            query: `[batch, heads, q, size]`.
            window: at least 1.
            valid: bool `[batch, q]`, False at padding on the left; None: there is none. Padding goes before what is held, so that a
                row's newest queries are those of its newest tokens.
        """
        if valid is not None and self._pieces:
            query = self._behind_padding(query, valid)
            self._pieces = []
        self._pieces.append(query[:, :, -window:].clone())
        while sum(piece.shape[2] for piece in self._pieces[1:]) >= window:
            self._pieces.pop(0)

    def _behind_padding(self, query: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Padding of the new queries, as zeros, then all that is held, then the others: `[batch, heads, held + q, size]`."""
        held = torch.cat(self._pieces, 2)
        joined = torch.cat([held, query.masked_fill(~valid[:, None, :, None], 0)], 2)
        width, padding = held.shape[2], (~valid).sum(1, keepdim=True)
        columns = torch.arange(joined.shape[2], device=query.device).expand(len(query), -1)
        order = torch.where(columns < padding, columns + width, columns - padding)
        order = torch.where(columns < padding + width, order, columns)
        return joined.gather(2, order[:, None, :, None].expand_as(joined))

    def newest(self, window: int) -> torch.Tensor:
        """The newest `window`, at least 1, `[batch, heads, at most window, size]`; some must have been appended."""
        return torch.cat(self._pieces, 2)[:, :, -window:]

    def forget(self, window: int) -> None:
        """Drop all but the newest `window`."""
        self._pieces = [self.newest(window).clone()] if self._pieces and window else []

    def take_back(self, count: int) -> None:
        """Drop the newest `count`."""
        if self._pieces:
            held = torch.cat(self._pieces, 2)
            self._pieces = [held[:, :, : max(0, held.shape[2] - count)]]

    def select(self, indices: torch.Tensor) -> None:
        """Only these sequences (int64), in that order."""
        self._pieces = [piece[indices] for piece in self._pieces]
