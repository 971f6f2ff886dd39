"""What a layer keeps of each token for its score, beside keys and values, and as long as these stay."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from runtime.kv_cache.pages import Pages, Part


class Notes:
    """Pages of numbers of tokens: "mass", what each has gathered; "place", where in its sequence it came; "given", whether in a prompt.

    Args:
        shape: (batch, kv_heads).
        parts: which of them, and how.
        device: where.
    """

    def __init__(self, shape: tuple[int, int], parts: Mapping[str, Part], device: torch.device) -> None:
        self.shape = shape
        self.pages = Pages(shape[0] * shape[1], dict(parts), device)

    @property
    def nbytes(self) -> int:
        """Memory as allocated."""
        return self.pages.nbytes

    def dense(self, name: str) -> torch.Tensor | None:
        """A copy of one of them, `[batch, kv_heads, longest]`; None: it is not kept."""
        return self.pages.dense(name)[..., 0].view(*self.shape, -1) if name in self.pages.parts else None

    def begin(self, first: torch.Tensor, added: torch.Tensor, count: int, given: bool, one: bool) -> None:
        """Those of new tokens.

        Args:
            first: int64 `[rows]`, places of each row's first new one.
            added: int64 `[rows]`, how many of each row are new.
            count: at most so many.
            given: they come in a prompt.
            one: each row has exactly one.
        """
        rows, device = self.pages.rows, self.pages.device
        fresh = {
            "mass": torch.zeros(rows, count, 1, device=device),
            "place": (first[:, None] + torch.arange(count, device=device)).unsqueeze(-1),
            "given": torch.full((rows, count, 1), given, device=device),
        }
        if one:
            self.pages.append_one({name: fresh[name][:, 0] for name in self.pages.parts})
        else:
            self.pages.append({name: fresh[name] for name in self.pages.parts}, added)

    def set_mass(self, mass: torch.Tensor) -> None:
        """What has been gathered of every token by now, float32 `[batch, kv_heads, longest]`."""
        lengths = self.pages.lengths
        others = {name: self.pages.dense(name) for name in self.pages.parts if name != "mass"}
        self.pages.crop(torch.zeros_like(lengths))
        self.pages.append({"mass": mass.flatten(0, 1).unsqueeze(-1), **others}, lengths)

    def take_back(self, count: int) -> None:
        """Drop the newest `count` of every row."""
        self.pages.crop(self.pages.lengths - count)

    def select_rows(self, rows: torch.Tensor, batch: int) -> None:
        """Only these rows, int64, in that order: `batch` sequences."""
        self.pages.select_rows(rows)
        self.shape = (batch, self.shape[1])
