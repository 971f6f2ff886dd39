"""Channels of each head that contribute most to attention scores, for the selection of Double Sparsity."""

from __future__ import annotations

from typing import Literal

import torch

from compress.kv_cache.attention import AttentionCall
from compress.kv_cache.statistics import Observer
from compress.kv_cache.view import CalibrationView, Found
from runtime.errors import RequestError

LEAST = 4
Rank = Literal["product", "variance"]


class HeavyChannels(Observer):
    """Observes how much each channel c of a key head contributes to attention scores (Double Sparsity, arXiv 2408.07092).

    By "product" that is the mean of |q_c k_c| over all pairs of a query and a key in a row, as the paper has it; query heads that share
    a key head share its channels, and are averaged. By "variance" it is the mean of q_c^2 times the variance of k_c over the row: what
    all keys have in common changes no order among them.

    Attributes:
        sums: float64 `[kv_heads, size]` of every layer.
        rows: how many were seen.
    """

    def __init__(self, rank: Rank = "product") -> None:
        self.rank = rank
        self.sums: dict[int, torch.Tensor] = {}
        self.rows = 0

    def attention(self, call: AttentionCall) -> None:
        batch, kv_heads, count, size = call.key.shape
        query, key = call.query.float().view(batch, kv_heads, call.groups, count, size), call.key.float()
        # The mean over pairs is the product of the means, so that no pair is ever made.
        if self.rank == "product":
            found = query.abs().mean((2, 3)) * key.abs().mean(2)
        else:
            found = query.square().mean((2, 3)) * key.var(2, correction=0)
        self.sums[call.layer] = self.sums.get(call.layer, 0) + found.double().sum(0).cpu()

    def batch_done(self, ids: torch.Tensor) -> None:
        self.rows += len(ids)

    def means(self) -> list[torch.Tensor]:
        """float64 `[kv_heads, size]` of every layer."""
        return [self.sums[layer] / max(1, self.rows) for layer in sorted(self.sums)]

    def chosen(self, count: int | None = None) -> list[list[list[int]]]:
        """`[layer][kv_head][count]`: the heaviest channels in ascending order; of equal ones the lower.

        Args:
            count: channels a head; None: an eighth of them, at least 4.

        Raises:
            RequestError: a head has not so many channels.
        """
        result = []
        for layer, means in enumerate(self.means()):
            size = means.shape[1]
            wanted = min(size, max(LEAST, size // 8)) if count is None else count
            if not 1 <= wanted <= size:
                raise RequestError(f"channels must be 1 to {size}, the size of a head of layer {layer}, not {wanted}")
            heaviest = means.argsort(dim=1, descending=True, stable=True)[:, :wanted]
            result.append(heaviest.sort(1).values.tolist())
        return result

    def share(self, chosen: list[list[list[int]]]) -> list[float]:
        """How much of the sum of all channels the chosen ones hold, layer by layer."""
        shares = []
        for means, heads in zip(self.means(), chosen, strict=True):
            held = means.gather(1, torch.tensor(heads)).sum() / means.sum().clamp(min=1e-30)
            shares.append(round(float(held), 4))
        return shares


def calibrate(view: CalibrationView) -> Found:
    """Heavy channels of a `CalibrationView`."""
    heavy = HeavyChannels(view.options.rank)
    view.observe(heavy)
    chosen = heavy.chosen(view.options.channels)
    return {"channels": (chosen, {"rank": heavy.rank, "share": heavy.share(chosen)})}
