"""Heavy channels against what a few lines compute from the model's own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kv_models import llama, rows
from transformers.models.llama import modeling_llama

from compress.kv_cache import view
from compress.kv_cache.calibrate import HeavyChannels
from compress.kv_cache.view import CalibrationView
from runtime.errors import RequestError


def _queries_and_keys(
    model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of every layer what rotary embedding gives: `[batch, heads, n, size]`, `[batch, kv_heads, n, size]`."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    rotate = modeling_llama.apply_rotary_pos_emb
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *a, **k: seen.append(rotate(*a, **k)) or seen[-1])
        model(ids)
    return seen


def _brute_force(rank: str, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """`[kv_heads, size]`, from every pair of a query and a key."""
    own = torch.arange(query.shape[1]) // (query.shape[1] // key.shape[1])
    pairs = query[:, :, :, None] * key[:, own][:, :, None]  # [batch, heads, queries, keys, size]
    by_head = pairs.abs().mean((0, 2, 3)) if rank == "product" else pairs.var(3, correction=0).mean((0, 2))
    return torch.stack([by_head[own == head].mean(0) for head in range(key.shape[1])])


@pytest.mark.parametrize("rank", ["product", "variance"])
def test_channels_are_those_of_brute_force(rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama(), rows(10, 24)
    monkeypatch.setattr(view, "TOKENS", 100)  # several batches
    heavy = HeavyChannels(rank)
    CalibrationView(model, None, ids).observe(heavy)
    expected = [_brute_force(rank, *pair) for pair in _queries_and_keys(model, ids, monkeypatch)]
    for found, wanted in zip(heavy.means(), expected, strict=True):
        torch.testing.assert_close(found.float(), wanted, rtol=1e-4, atol=1e-5)
    chosen = heavy.chosen()
    assert chosen == [[sorted(head.topk(4).indices.tolist()) for head in layer] for layer in expected]
    assert [[len(head) for head in layer] for layer in heavy.chosen(7)] == [[7, 7], [7, 7]]
    assert all(0.25 < share < 1 for share in heavy.share(chosen))
    assert model.config._attn_implementation == "sdpa"  # as it was


def test_more_channels_than_a_head_has_are_refused() -> None:
    heavy = HeavyChannels()
    CalibrationView(llama(), None, rows(1)).observe(heavy)
    with pytest.raises(RequestError, match="channels"):
        heavy.chosen(17)
