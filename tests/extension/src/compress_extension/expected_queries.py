"""KV score by the attention that a head's mean query pays, calibrated per head (after Expected Attention, arXiv 2510.00636)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from runtime.config.settings import Share, calibrated
from runtime.kv_cache.observation import Observation
from runtime.kv_cache.scores.base import Windowed


@dataclass(frozen=True)
class ExpectedQueries(Windowed):
    """Attention of the mean query, rotated to the newest position, times the value's length after the output projection.

    A head's mean query before rotation is calibrated; the mean of the window's own is mixed with it. The rotation of the newest position
    is read off the newest query, before and after it.

    Attributes:
        queries: `[layers][kv_heads][query heads of each][size]`, mean queries before rotation.
        trust: share of the calibrated mean in the mix.
    """

    name: ClassVar[str] = "expected-queries"
    wants: ClassVar[frozenset[str]] = frozenset(["hidden"])
    queries: tuple[tuple[tuple[tuple[float, ...], ...], ...], ...] = calibrated(((((0.0,),),),), per_head=True)
    trust: Share = 0.5

    @staticmethod
    def calibrate(view: Any) -> dict[str, Any]:
        """{"queries": (means, facts)} of a `compress.kv_cache.view.CalibrationView`."""
        from compress.kv_cache.statistics import Observer

        class MeanQueries(Observer):
            def __init__(self) -> None:
                self.sums: dict[int, Any] = {}

            def attention(self, call: Any) -> None:
                found = call.inputs.queries(call.query.shape[-1]).double().sum((0, 2)).cpu()
                self.sums[call.layer] = self.sums.get(call.layer, 0) + found.unflatten(0, (call.key.shape[1], -1))

        observer = MeanQueries()
        view.observe(observer)
        means = [observer.sums[layer] / view.rows.numel() for layer in sorted(observer.sums)]
        facts = {"norms": [round(float(mean.norm(dim=-1).mean()), 4) for mean in means]}
        return {"queries": ([mean.tolist() for mean in means], facts)}

    def __call__(self, seen: Observation) -> torch.Tensor:
        newest = seen.newest(self.observe)
        assert newest.inputs is not None, "asked for by `wants`"
        size = seen.keys.shape[-1]
        plain, turned = newest.inputs.queries(size).float(), newest.queries.float()
        known = torch.tensor(self.queries[seen.layer], device=plain.device).flatten(0, 1)
        mean = self.trust * known + (1 - self.trust) * plain.mean(2)
        before, after = (_pairs(states[:, :, -1]) for states in (plain, turned))
        rotation = (after * before.conj()).sum(1, keepdim=True)
        expected = torch.view_as_real(_pairs(mean) * rotation / rotation.abs().clamp(min=1e-9))
        expected = torch.cat([expected[..., 0], expected[..., 1]], -1).unflatten(1, (seen.keys.shape[1], -1))
        logits = (expected @ seen.keys.float().transpose(-1, -2) * seen.scale).masked_fill(
            ~seen.held.unsqueeze(2), float("-inf")
        )
        output = (
            newest.inputs.module.o_proj.weight.float().unflatten(1, (seen.keys.shape[1], -1, size)).abs().mean((0, 2))
        )
        lengths = (seen.values.float().abs() * output[:, None]).sum(-1)
        return seen.finish(self.pooled(logits.softmax(-1).nan_to_num(0.0).mean(2) * lengths), newest.queries.shape[2])


def _pairs(states: torch.Tensor) -> torch.Tensor:
    """The two halves of heads as complex numbers, which rotary embeddings turn."""
    return torch.complex(*states.contiguous().chunk(2, -1))
