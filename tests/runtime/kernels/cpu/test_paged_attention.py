"""attention.h against attention in torch: capped scores, sinks, values of another width than keys, windows, pages stored in few bits."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from runtime.kernels.cpu import library
from runtime.kernels.cpu.attention import KINDS, PAGE, Attention, Cache, Storage
from runtime.kv_cache.pages import PAGE as CODEC_PAGE
from runtime.kv_cache.storage.fp8 import Float8
from runtime.kv_cache.storage.integer import Integer
from runtime.system import instruction_sets

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")

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
    stored: tuple[str, str] | None = None,
    group: int = 32,
    first: int = 0,
    recent: int = 0,
    tree: tuple[int, list[list[int]]] | None = None,
) -> torch.Tensor:
    """Attention in C of `query` `[rows, heads, head_dim]`; keys and values of each sequence `[tokens, kv_heads, dim]`.

    `tree`: the position where branches begin, and the slots of each row's own branch.
    """
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
    found = library.load(isa)
    assert found is not None
    cache = Cache(key.data_ptr(), value.data_ptr(), None, library.TYPES[dtype], kv_heads, head_dim, value_dim)
    if stored is not None:
        kinds = [library.TYPES[dtype] if kind == "plain" else KINDS[kind] for kind in stored]
        cache.storage = Storage(None, *kinds, group, first, recent)
        records = torch.empty(count * kv_heads * found.cache_record(ctypes.byref(cache)), dtype=torch.uint8)
        cache.stored = records.data_ptr()
        full = [page for own, k in zip(pages, keys, strict=True) for page in own[: len(k) // PAGE]]
        settled, broken = torch.tensor(full, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        found.cache_store(ctypes.byref(cache), settled.data_ptr(), len(full), broken.data_ptr(), threads)
        assert not broken.item()
    memory = torch.empty(found.attention_memory(value_dim), dtype=torch.uint8)
    attention = Attention(
        cache=cache,
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
        memory=memory.data_ptr(),
    )
    if tree is not None:
        begin, branches = tree
        slots = torch.tensor([slot for own in branches for slot in own], dtype=torch.int32)
        base = torch.full((rows,), begin)
        path = torch.tensor([0, *itertools.accumulate(len(own) for own in branches)][:-1])
        attention.base, attention.path, attention.slots = base.data_ptr(), path.data_ptr(), slots.data_ptr()
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
    lengths, kv_heads = [1, 63, 64, 65, 1100], 2
    keys = [torch.randn(n, kv_heads, head_dim, generator=generator).mul(2).to(dtype) for n in lengths]
    values = [torch.randn(n, kv_heads, value_dim, generator=generator).to(dtype) for n in lengths]
    # The last tokens of each sequence, as many as there are, a prefill chunk of the longest among them.
    places = [(s, p) for s, n in enumerate(lengths) for p in range(max(0, n - (41 if n == 1100 else 2)), n)]
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


@pytest.mark.parametrize("isa", _SETS)
@pytest.mark.parametrize(("dtype", "shared", "size"), [(torch.bfloat16, 8, 64), (torch.float32, 3, 80)])
def test_a_branch_of_a_tree_sees_what_it_would_see_alone(isa: str, dtype: torch.dtype, shared: int, size: int) -> None:
    """Bit for bit. Two branches take turns in memory, over the end of a page."""
    generator = torch.Generator().manual_seed(size)
    base, depth = 120, 9
    keys, values = (torch.randn(base + 2 * depth, 2, size, generator=generator).to(dtype) for _ in range(2))
    query = torch.randn(2, 2 * shared, size, generator=generator)
    branches = [[base + 2 * step + branch for step in range(depth)] for branch in range(2)]
    position, pages = base + depth - 1, _pages([len(keys)], generator)
    for threads in (1, 2):
        found = _attend(
            query, [keys], [values], [0, 0], [position] * 2, pages, isa=isa, threads=threads, tree=(base, branches)
        )
        for row, own in enumerate(branches):
            seen = [*range(base), *own]
            alone = _attend(query[row : row + 1], [keys[seen]], [values[seen]], [0], [position], pages, isa=isa)
            assert torch.equal(found[row : row + 1], alone)


def _codec(kind: str, keys: bool, group: int) -> Integer | Float8 | None:
    if kind == "plain":
        return None
    if kind == "fp8":
        return Float8()
    return Integer(int(kind[3:]), "channel" if keys else "token", 0 if keys else group)


def _as_stored(states: torch.Tensor, codec: Integer | Float8 | None, pages: range) -> torch.Tensor:
    """`[tokens, heads, size]` as a codec of runtime.kv_cache gives these pages back, in float32."""
    result = states.float().clone()
    for grid in range(pages.start * 2, pages.stop * 2) if codec is not None else ():
        place = slice(grid * CODEC_PAGE, (grid + 1) * CODEC_PAGE)
        packed = codec.encode(states[place].transpose(0, 1))
        result[place] = codec.decode(packed.parts, states.shape[-1], torch.float32).transpose(0, 1)
    return result


@pytest.mark.parametrize("isa", _SETS)
@pytest.mark.parametrize(
    ("dtype", "shared", "size", "stored", "group", "first", "recent"),
    [
        (torch.bfloat16, 8, 64, ("int4", "int4"), 32, 0, 128),
        (torch.float32, 4, 80, ("int8", "int4"), 32, 1, 0),  # the last group of a token is narrower
        (torch.float16, 1, 96, ("int2", "int2"), 0, 0, 70),
        (torch.bfloat16, 3, 128, ("fp8", "fp8"), 32, 2, 64),
        (torch.float32, 4, 256, ("plain", "int8"), 64, 0, 1),
        (torch.bfloat16, 1, 64, ("int4", "plain"), 32, 0, 128),
        (torch.float16, 8, 128, ("fp8", "int2"), 16, 0, 0),
    ],
)
def test_pages_in_few_bits_are_those_of_the_storage(
    isa: str,
    dtype: torch.dtype,
    shared: int,
    size: int,
    stored: tuple[str, str],
    group: int,
    first: int,
    recent: int,
) -> None:
    generator = torch.Generator().manual_seed(size + shared)
    lengths, kv_heads = [64, 65, 700], 2
    keys = [torch.randn(n, kv_heads, size, generator=generator).mul(2).to(dtype) for n in lengths]
    values = [torch.randn(n, kv_heads, size, generator=generator).to(dtype) for n in lengths]
    values[-1][70] = 0.0  # a token on a grid of one point
    # A prefill chunk over the borders where what a row sees turns from plain to stored.
    places = [(0, 63), (1, 64), *((2, p) for p in [*range(180, 215), 640, 699])]
    query = torch.randn(len(places), kv_heads * shared, size, generator=generator)
    sequence, position = [s for s, _ in places], [p for _, p in places]
    pages = _pages(lengths, generator)
    kinds = {"isa": isa, "stored": stored, "group": group, "first": first, "recent": recent}
    found = _attend(query, keys, values, sequence, position, pages, **kinds)
    codecs = [_codec(kind, side == 0, group) for side, kind in enumerate(stored)]
    for row, (s, p) in enumerate(places):
        settled = range(first, max(first, (p - recent) // PAGE))
        key, value = (
            _as_stored(states[s], codec, settled) for states, codec in zip((keys, values), codecs, strict=True)
        )
        # Queries and weights meet integer codes in two digits, 2^-16 of the largest, and in three beside float32 pages.
        atol = 3e-5 if dtype == torch.float32 else 5e-4
        torch.testing.assert_close(found[row], _reference(query[row], key, value, p), atol=atol, rtol=3e-4)
    assert torch.equal(found, _attend(query, keys, values, sequence, position, pages, threads=2, **kinds))
    row = len(places) - 1
    alone = _attend(query[row:], keys[-1:], values[-1:], [0], position[row:], pages[-1:], **kinds)
    assert torch.equal(found[row:], alone)
