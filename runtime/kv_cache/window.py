"""Windows of a layer's newest queries, and notes on its tokens, that scores ask for."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from runtime.kv_cache.pages import Pages, Part


class Notes(Pages):
    """Numbers of each token that a score asks for, in pages that live as long as its keys and values.

    "mass": what the token has gathered; "place": its position in its sequence; "given": whether it came in a prompt.

    Args:
        shape: (batch, kv_heads).
        parts: which of them, and how.
        device: where.
    """

    def __init__(self, shape: tuple[int, int], parts: Mapping[str, Part], device: torch.device) -> None:
        super().__init__(shape[0] * shape[1], parts, device)
        self.heads = shape[1]

    def of(self, name: str) -> torch.Tensor | None:
        """A copy of one of them, `[batch, kv_heads, longest]`; None: it is not kept."""
        return self.dense(name)[..., 0].unflatten(0, (-1, self.heads)) if name in self.parts else None

    def begin(self, first: torch.Tensor, added: torch.Tensor, count: int, given: bool, one: bool) -> None:
        """Those of new tokens.

        Args:
            first: int64 `[rows]`, position of each row's first new one.
            added: int64 `[rows]`, how many of each row are new.
            count: at most so many.
            given: they come in a prompt.
            one: each row has exactly one.
        """
        rows, device = self.rows, self.device
        fresh = {
            "mass": torch.zeros(rows, count, 1, device=device),
            "place": (first[:, None] + torch.arange(count, device=device)).unsqueeze(-1),
            "given": torch.full((rows, count, 1), given, device=device),
        }
        if one:
            self.append_one({name: fresh[name][:, 0] for name in self.parts})
        else:
            self.append({name: fresh[name] for name in self.parts}, added)

    def set_mass(self, mass: torch.Tensor) -> None:
        """What has been gathered of every token by now, float32 `[batch, kv_heads, longest]`."""
        lengths = self.lengths
        others = {name: self.dense(name) for name in self.parts if name != "mass"}
        self.crop(torch.zeros_like(lengths))
        self.append({"mass": mass.flatten(0, 1).unsqueeze(-1), **others}, lengths)


class QueryWindow:
    """Queries `[batch, heads, q, size]` in the order in which they came. Chunks are concatenated only when they are asked for."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Memory as allocated."""
        return sum(chunk.untyped_storage().nbytes() for chunk in self._chunks)

    def append(self, query: torch.Tensor, window: int, valid: torch.Tensor | None = None) -> None:
        """Add new queries; older ones than the newest `window` may be dropped.

        Args:
            query: `[batch, heads, q, size]`.
            window: at least 1.
            valid: bool `[batch, q]`, False at padding on the left; None: there is none. Padding goes before the other queries, so that a
                row's newest queries are those of its newest tokens.
        """
        if valid is not None and self._chunks:
            query = self._behind_padding(query, valid)
            self._chunks = []
        self._chunks.append(query[:, :, -window:].clone())
        while sum(chunk.shape[2] for chunk in self._chunks[1:]) >= window:
            self._chunks.pop(0)

    def _behind_padding(self, query: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Padding of the new queries, as zeros, then the older queries, then the other new ones: `[batch, heads, older + q, size]`."""
        older = torch.cat(self._chunks, 2)
        joined = torch.cat([older, query.masked_fill(~valid[:, None, :, None], 0)], 2)
        width, padding = older.shape[2], (~valid).sum(1, keepdim=True)
        columns = torch.arange(joined.shape[2], device=query.device).expand(len(query), -1)
        order = torch.where(columns < padding, columns + width, columns - padding)
        order = torch.where(columns < padding + width, order, columns)
        return joined.gather(2, order[:, None, :, None].expand_as(joined))

    def newest(self, window: int) -> torch.Tensor:
        """The newest `window`, at least 1, `[batch, heads, at most window, size]`; some must have been appended."""
        return torch.cat(self._chunks, 2)[:, :, -window:]

    def forget(self, window: int) -> None:
        """Drop all but the newest `window`."""
        self._chunks = [self.newest(window).clone()] if self._chunks and window else []

    def take_back(self, count: int) -> None:
        """Drop the newest `count`."""
        if self._chunks:
            older = torch.cat(self._chunks, 2)
            self._chunks = [older[:, :, : max(0, older.shape[2] - count)]]

    def select(self, indices: torch.Tensor) -> None:
        """Only these sequences (int64), in that order."""
        self._chunks = [chunk[indices] for chunk in self._chunks]
