"""attention.h against attention in torch: capped scores, sinks, values of another width than keys, windows."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from runtime.kernels.cpu import library
from runtime.kernels.cpu.attention import PAGE, Attention, Cache
from runtime.system import instruction_sets

_SETS = instruction_sets.available()


def _pages(lengths: list[int], generator: torch.Generator) -> list[list[int]]:
    """Scattered pages for sequences of these lengths."""
    counts = [-(-length // PAGE) for length in lengths]
    free = iter(torch.randperm(sum(counts) + 3, generator=generator).tolist())
    return [list(itertools.islice(free, count)) for count in counts]


def _attend(
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    sequence: list[int],
    position: list[int],
    pages: list[list[int]],
    *,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    threads: int = 1,
    isa: str | None = None,
) -> torch.Tensor:
    """Attention in C of `query` `[rows, heads, head_dim]`; keys and values of each sequence `[tokens, kv_heads, dim]`."""
    kv_heads, head_dim, value_dim = keys[0].shape[1], keys[0].shape[2], values[0].shape[2]
    count = max(max(own) for own in pages) + 1
    dtype = keys[0].dtype
    key = torch.full(
        (count, kv_heads, head_dim, PAGE), float("nan"), dtype=dtype
    )  # what no token has written means nothing
    value = torch.full((count, kv_heads, PAGE, value_dim), float("nan"), dtype=dtype)
    for own, k, v in zip(pages, keys, values, strict=True):
        for place in range(len(k)):
            key[own[place // PAGE], :, :, place % PAGE] = k[place]
            value[own[place // PAGE], :, place % PAGE] = v[place]
    width = max(len(own) for own in pages)
    table = torch.tensor([own + [0] * (width - len(own)) for own in pages], dtype=torch.int32)
    rows, heads = query.shape[:2]
    out = torch.empty(rows, heads, value_dim)
    numbers = torch.tensor(sequence, dtype=torch.int32), torch.tensor(position)
    attention = Attention(
        cache=Cache(key.data_ptr(), value.data_ptr(), library.TYPES[dtype], kv_heads, head_dim, value_dim),
        rows=rows,
        heads=heads,
        window=window,
        pages_stride=width,
        sequence=numbers[0].data_ptr(),
        position=numbers[1].data_ptr(),
        pages=table.data_ptr(),
        query=query.contiguous().data_ptr(),
        out=out.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        scale=head_dim**-0.5,
        softcap=softcap,
    )
    found = library.load(isa)
    assert found is not None
    found.attention(ctypes.byref(attention), threads)
    return out


def _reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position: int,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """One row, `[heads, head_dim]` to `[heads, value_dim]`, in float64."""
    seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
    shared = query.shape[0] // key.shape[1]
    k, v = (states[seen].double().repeat_interleave(shared, 1) for states in (key, value))
    scores = torch.einsum("hd,phd->hp", query.double(), k) * query.shape[1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None]], 1)
    weights = scores.softmax(-1)[:, : len(k)]
    return torch.einsum("hp,phd->hd", weights, v).float()


@pytest.mark.parametrize("isa", _SETS)
@pytest.mark.parametrize(
    ("dtype", "shared", "head_dim", "value_dim", "window", "softcap", "sinks"),
    [
        (torch.float32, 1, 64, 64, 0, 0.0, False),
        (torch.bfloat16, 4, 80, 80, 0, 30.0, True),
        (torch.float16, 8, 128, 128, 70, 0.0, True),
        (torch.bfloat16, 3, 96, 64, 0, 50.0, False),  # latent attention: keys are wider
        (torch.float32, 5, 24, 40, 3, 2.0, True),
        (torch.float16, 1, 256, 256, 0, 0.0, True),
    ],
)
def test_attention_in_c_is_that_of_torch(
    isa: str, dtype: torch.dtype, shared: int, head_dim: int, value_dim: int, window: int, softcap: float, sinks: bool
) -> None:
    generator = torch.Generator().manual_seed(head_dim + shared)
    lengths, kv_heads = [1, 63, 64, 65, 200], 2
    keys = [torch.randn(n, kv_heads, head_dim, generator=generator).mul(2).to(dtype) for n in lengths]
    values = [torch.randn(n, kv_heads, value_dim, generator=generator).to(dtype) for n in lengths]
    # The last tokens of each sequence, as many as there are, a prefill chunk of the longest among them.
    places = [(s, p) for s, n in enumerate(lengths) for p in range(max(0, n - (11 if n == 200 else 2)), n)]
    query = torch.randn(len(places), kv_heads * shared, head_dim, generator=generator)
    logits = torch.randn(kv_heads * shared, generator=generator).mul(3) if sinks else None
    sequence, position = [s for s, _ in places], [p for _, p in places]
    pages = _pages(lengths, generator)
    kinds = {"window": window, "sinks": logits, "softcap": softcap}
    found = _attend(query, keys, values, sequence, position, pages, isa=isa, **kinds)
    for row, (s, p) in enumerate(places):
        wanted = _reference(query[row], keys[s], values[s], p, **kinds)
        torch.testing.assert_close(found[row], wanted, atol=2e-5, rtol=2e-5)
    assert torch.equal(found, _attend(query, keys, values, sequence, position, pages, isa=isa, threads=2, **kinds))
    row = len(places) - 1  # alone it is the same, bit for bit
    alone = _attend(query[row:], keys[-1:], values[-1:], [0], position[row:], pages[-1:], isa=isa, **kinds)
    assert torch.equal(found[row:], alone)
