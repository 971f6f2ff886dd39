"""Attention of pieces: the one call for all of them is used only where it computes the same as one by one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from runtime.engines.cuda import decoder
from runtime.engines.cuda.cache import CacheLayer
from runtime.engines.cuda.decoder import ChunkAttention, chunk_attention


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float, window: int) -> torch.Tensor:
    """One query, one head at a time, in float64."""
    out = torch.empty(q.shape, dtype=torch.float64)
    for i in range(q.shape[0]):
        first, last = max(0, start + i + 1 - window) if window else 0, start + i + 1
        for head in range(q.shape[1]):
            own = head * k.shape[1] // q.shape[1]
            weights = (k[first:last, own].double() @ q[i, head].double() * scale).softmax(0)
            out[i, head] = weights @ v[first:last, own].double()
    return out


@pytest.mark.parametrize("start", [0, 13])
@pytest.mark.parametrize("window", [0, 1, 7, 500])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("most", [1 << 25, 64])
def test_a_piece(start: int, window: int, heads: tuple[int, int], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.engines.cuda.stored_pages.MOST_SCORES", most)
    torch.manual_seed(0)
    q, (k, v) = torch.randn(10, heads[0], 8), torch.randn(2, start + 10, heads[1], 8)
    found = chunk_attention(q, k, v, start, 0.3, window)
    torch.testing.assert_close(found.double(), plain(q, k, v, start, 0.3, window), rtol=1e-5, atol=1e-5)


@pytest.fixture
def fresh() -> Iterator[None]:
    decoder.is_exact.cache_clear()
    yield
    decoder.is_exact.cache_clear()


def stand_in(off: int = 0) -> Any:
    """`varlen_attn` on a CPU, by its documentation and with its signature; its windows are wider by `off`."""
    signature = inspect.signature(varlen_attn)

    def compute(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
        max_q: int, max_k: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool, num_splits: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        counts, lengths = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
        assert (max(counts), max(lengths)) == (max_q, max_k)
        assert enable_gqa == (query.shape[1] != key.shape[1])
        assert window_size[1] == 0
        assert num_splits == 1, "a step's longest sequence would decide how the keys of all are split"
        window = window_size[0] + 1 + (off if window_size[0] >= 0 else 0)
        parts = zip(query.split(counts), key.split(lengths), value.split(lengths), strict=True)
        return torch.cat([chunk_attention(q, k, v, len(k) - len(q), scale, window) for q, k, v in parts])

    def bound(*arguments: Any, **options: Any) -> torch.Tensor:
        signature.bind(*arguments, **options)
        return compute(*arguments, **options)

    return bound


@pytest.mark.usefixtures("fresh")
def test_it_is_tried_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(decoder, "varlen_attn", stand_in())
    assert decoder.is_exact(cpu, torch.bfloat16, 4, 2, 16, False)
    assert decoder.is_exact(cpu, torch.bfloat16, 4, 2, 16, True)
    assert not decoder.is_exact(cpu, torch.float32, 4, 2, 16, False)
    decoder.is_exact.cache_clear()
    monkeypatch.setattr(decoder, "varlen_attn", stand_in(off=1))
    assert decoder.is_exact(cpu, torch.bfloat16, 4, 2, 16, False)
    assert not decoder.is_exact(cpu, torch.bfloat16, 4, 2, 16, True)
    decoder.is_exact.cache_clear()

    def fails(*arguments: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("not on this device")

    monkeypatch.setattr(decoder, "varlen_attn", fails)
    assert not decoder.is_exact(cpu, torch.bfloat16, 4, 2, 16, False)


def test_all_pieces_at_once_and_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "varlen_attn", stand_in())
    torch.manual_seed(0)
    starts, counts, page = [0, 5, 20], [7, 1, 13], 8
    keys, values = torch.randn(2, 15, page, 2, 16).to(torch.bfloat16)
    tables = torch.randperm(15).view(3, 5)
    places = [torch.arange(start + count) for start, count in zip(starts, counts, strict=True)]
    slots = torch.cat([table[at // page] * page + at % page for table, at in zip(tables, places, strict=True)])
    q = torch.randn(sum(counts), 4, 16).to(torch.bfloat16)
    for window in (0, 4):
        attention = ChunkAttention(starts, counts, slots, 0.25)
        found = attention(q, CacheLayer(keys, values), window)
        k, v = keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots]
        assert torch.equal(found, attention.together(q, k, v, window))
        row = 0
        for start, count, table in zip(starts, counts, tables, strict=True):
            mine = [tensor[table].flatten(0, 1)[: start + count] for tensor in (keys, values)]
            wanted = plain(q[row : row + count], *mine, start, 0.25, window)
            torch.testing.assert_close(found[row : row + count].double(), wanted, rtol=3e-2, atol=3e-2)
            row += count
