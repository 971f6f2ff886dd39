"""Run by test_cuda_kernels.py with TRITON_INTERPRET=1: the engine's kernels against plain torch, prints one line a check."""

from __future__ import annotations

import random
import sys
from typing import Any

import cuda_models
import prefill_cases
import torch
from triton_interpreter import repair, watch, wide_sums

from runtime.engines.base import Chunk
from runtime.engines.cuda import (
    chunk_attention,
    ops,
    page_store,
    paged_attention,
    rotary_store,
    stored_attention,
    stored_pages,
)
from runtime.engines.cuda.cache import CacheLayer, Chunks, Rows, StoredLayers
from runtime.engines.cuda.storage import Storage
from runtime.formats.scheme import Scheme
from runtime.kv_cache.policy.policy import Policy
from runtime.kv_cache.storage.base import Codec
from runtime.kv_cache.storage.fp8 import Float8
from runtime.kv_cache.storage.integer import Integer
from runtime.kv_cache.storage.plain import Plain


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    limit = prefill_cases.LIMIT[wanted.dtype]
    torch.testing.assert_close(found, wanted, rtol=limit, atol=limit)


def attention(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
    page: int,
    positions: list[int],
    window: int,
    parts: int | None,
) -> None:
    torch.manual_seed(0)
    width = max(positions) // page + 1
    count = width * len(positions) + 1
    keys, values = torch.randn(2, count, page, kv_heads, size).to(dtype)
    tables = torch.randperm(count)[: width * len(positions)].view(len(positions), width).int()
    for row, position in enumerate(positions):  # nothing behind the position may matter
        pages = tables[row].long()
        place = torch.arange(width * page)
        behind = place[place > position]
        keys[pages[behind // page], behind % page] = float("nan")
        values[pages[behind // page], behind % page] = float("nan")
        tables[row, position // page + 1 :] = 1 << 30
    q = torch.randn(len(positions), heads + 1, size).to(dtype)[:, :heads]  # rows with something between them
    at = torch.tensor(positions, dtype=torch.int32)
    layer, shares = CacheLayer(keys, values), paged_attention.splits
    if parts is not None:
        paged_attention.splits = lambda _: parts
    found = paged_attention.decode_attention(q, layer, tables, at, size**-0.5, window)
    near(found, ops.decode_attention(q, layer, tables.clamp(max=count - 1), at, size**-0.5, window))
    alone = paged_attention.decode_attention(q[1:2], layer, tables[1:2], at[1:2], size**-0.5, window)
    paged_attention.splits = shares
    assert torch.equal(alone[0], found[1]), "a sequence depends on what is beside it"


def prefill(case: prefill_cases.ChunkCase) -> None:
    """Chunks side by side against float64, and the longest again in parts, each by itself."""
    made = case.make()
    q, layer, chunks, scale, wanted = made
    found = chunk_attention.chunk_attention(q, layer, chunks, scale, case.window)
    torch.testing.assert_close(found.double(), wanted, rtol=case.limit, atol=case.limit)
    count, which = max((count, i) for i, count in enumerate(chunks.counts))
    mine, start = q.split(chunks.counts)[which], chunks.starts[which]
    parts, first = [], 0
    for last in sorted({*random.Random(0).sample(range(1, count), 2), count}):
        pages = chunks.tables[which][: -(-(start + last) // case.page)]
        part = Chunks([start + first], [last - first], pages, case.page)
        parts.append(chunk_attention.chunk_attention(mine[first:last], layer, part, scale, case.window))
        first = last
    assert torch.equal(torch.cat(parts), found.split(chunks.counts)[which]), "numbers depend on cuts or neighbours"


def stored_prefill(recent: int, spans: list[tuple[int, int]]) -> None:
    """Chunks over stored pages beside some that read plain ones only, which no other changes."""
    torch.manual_seed(0)
    page, (starts, counts) = 32, map(list, zip(*spans, strict=True))
    widths = [-(-sum(span) // page) for span in spans]
    tables = torch.randperm(40)[: sum(widths)].split(widths)
    storage = Storage(Integer(4, "channel"), Integer(4, "token"), 0, recent)
    layers = StoredLayers.zeros(storage, 1, 40, 40, (page, 2, 32), torch.float32, torch.device("cpu"))
    layers.keys.normal_()
    layers.values.normal_()
    layers.places.copy_(torch.randperm(40))
    stored_pages.store(layers, torch.cat(tables).int())
    layer = CacheLayer(layers.keys[0], layers.values[0], layers)
    q = torch.randn(sum(counts), 4, 32)
    arguments = q, layer, Chunks(starts, counts, torch.cat(tables).int(), page), 0.2, 0
    found = chunk_attention.chunk_attention(*arguments)
    near(found, ops.chunk_attention(*arguments))
    alone = chunk_attention.chunk_attention(
        q[: counts[0]], layer, Chunks(starts[:1], counts[:1], tables[0].int(), page), 0.2, 0
    )
    assert torch.equal(alone, found[: counts[0]]), "a chunk depends on what is beside it"


def stored(
    dtype: torch.dtype,
    keys: Codec,
    values: Codec,
    sizes: tuple[int, int, int],
    page: int,
    prefix: int,
    recent: int,
    positions: list[int],
    parts: int | None,
) -> None:
    """Pages that are stored are those of the codec; queries find in them, and in the plain ones, what plain torch does."""
    torch.manual_seed(0)
    heads, kv_heads, size = sizes
    width = max(positions) // page + 1
    count = width * len(positions)
    storage = Storage(keys, values, prefix, recent)
    shape = (page, kv_heads, size)
    first, other = (StoredLayers.zeros(storage, 2, count, count, shape, dtype, torch.device("cpu")) for _ in range(2))
    first.keys.copy_(torch.randn_like(first.keys) * torch.linspace(0.1, 4, size))
    first.values.copy_(torch.randn_like(first.values))
    first.keys[0, 0] = 0.5  # a range of nothing
    other.keys.copy_(first.keys)
    other.values.copy_(first.values)
    first.places.copy_(torch.randperm(count))
    other.places.copy_(first.places)
    tables = torch.randperm(count).view(len(positions), width).int()
    old = [
        int(page_) for row, at in enumerate(positions) for page_ in tables[row, first.first : first.begin_of_recent(at)]
    ]
    pages = torch.tensor(old, dtype=torch.int32)
    page_store.store(first, pages)
    stored_pages.store(other, pages)
    for name, pool in first.pools.items():
        assert torch.equal(pool, other.pools[name]), f"{name} of stored pages"
    assert not first.invalid.item()
    layer = first.layer(1)
    for side in (layer.keys, layer.values):  # where they were plain is used by others now
        side[0, first.places[pages.long()].long()] = float("nan")
    for row, at in enumerate(positions):  # nothing behind the position may matter
        behind = torch.arange(at + 1, width * page)
        for side in (layer.keys, layer.values):
            side[0, first.places[tables[row, behind // page].long()].long(), behind % page] = float("nan")
    held = CacheLayer(layer.keys[0], layer.values[0], layer)
    q = torch.randn(len(positions), heads + 1, size).to(dtype)[:, :heads]
    at = torch.tensor(positions, dtype=torch.int32)
    shares = paged_attention.splits
    if parts is not None:
        paged_attention.splits = lambda _: parts
    found = stored_attention.decode_attention(q, held, tables, at, size**-0.5, 0)
    near(found, ops.decode_attention(q, held, tables, at, size**-0.5, 0))
    alone = stored_attention.decode_attention(q[1:2], held, tables[1:2], at[1:2], size**-0.5, 0)
    paged_attention.splits = shares
    assert torch.equal(alone[0], found[1]), "a sequence depends on what is beside it"
    if keys.name != "plain" and old:
        first.keys[0, first.places[old[0]], 1] = float("inf")
        page_store.store(first, pages[:1])
        assert first.invalid.item(), "what a codec cannot hold is said"


def rotation(dtype: torch.dtype, heads: int, kv_heads: int, size: int, rotary: int, norms: bool) -> None:
    torch.manual_seed(0)
    rows, page, pages = 5, 16, 4
    joined = torch.randn(rows, (heads + 2 * kv_heads) * size).to(dtype)
    q, k, v = joined.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
    weights = (torch.randn(size).to(dtype), torch.randn(size).to(dtype)) if norms else None
    rotations = torch.randn(60, rotary)
    positions = torch.tensor([0, 59, 3, 3, 17], dtype=torch.int32)
    slots = torch.tensor([0, 63, 5, 40, 41], dtype=torch.int32)
    rows_at = Rows(positions, positions, slots)
    caches = torch.randn(2, 2, pages, page, kv_heads, size).to(dtype)
    caches[1] = caches[0]
    out = [
        module.rotate_and_store((q, k, v), weights, 1e-5, rotations, rows_at, CacheLayer(*caches[i]))  # type: ignore[attr-defined]
        for i, module in enumerate((ops, rotary_store))
    ]
    near(out[1], out[0])
    near(caches[1], caches[0])
    untouched = torch.ones(pages * page, dtype=torch.bool)
    untouched[slots.long()] = False
    assert torch.equal(caches[1].flatten(1, 2)[:, untouched], caches[0].flatten(1, 2)[:, untouched])


def whole(name: str) -> None:
    """The engine with all kernels, against transformers."""
    which = cuda_models.engine(cuda_models.build(name), buckets=(2,), capture=None)
    assert which.decoder.ops.name == "triton", which.decoder.ops
    ids = random.Random(0).choices(range(101), k=38)
    pool = which.new_pages(4)
    which.step(pool, [Chunk(ids[:35], 0, [3, 0, 2])])
    which.step(pool, [Chunk(ids[35:36], 35, [3, 0, 2])])
    logits, _ = which.verify(pool, [Chunk(ids[36:], 36, [3, 0, 2], outputs=2)])
    with torch.inference_mode():
        wanted = cuda_models.build(name)(torch.tensor([ids])).logits[0, -2:]
    torch.testing.assert_close(logits, wanted, rtol=2e-4, atol=2e-4)


def whole_stored(policy: dict[str, Any]) -> None:
    """The engine with all kernels and stored pages, against the engine in plain torch."""
    ids, tables = random.Random(0).choices(range(101), k=103), [3, 0, 2, 4, 1]
    found = []
    for computing in (None, ops.TORCH):
        which = cuda_models.engine(
            cuda_models.build("Qwen3"), buckets=(1, 2), capture=None, page_size=32, computing=computing
        )
        assert which.hold(Policy.parse(policy)) is None
        pool = which.new_pages(5)
        parts = [which.read(pool, [Chunk(ids[:94], 0, tables)])]
        parts += [which.step(pool, [Chunk([ids[at]], at, tables)]) for at in range(94, 100)]  # past the end of a page
        parts.append(which.verify(pool, [Chunk(ids[100:], 100, tables, outputs=3)])[0])
        found.append(torch.cat(parts))
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 2e-3


def mixture(name: str, scheme: Scheme) -> None:
    """The engine over packed experts, against the modules: logits, and tokens where the best two are apart."""
    draw, steps = random.Random(0), 4
    ids = draw.choices(range(101), k=14)
    model = cuda_models.packed(cuda_models.build(name), scheme)
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0, -steps - 1 :].float()
    which = cuda_models.engine(model, buckets=(1, 2), capture=None)
    assert len(which.parts.mixtures) == 2
    assert all(each.stacks is not None for each in which.parts.mixtures)
    pool, end = which.new_pages(2), len(ids) - steps
    found = [which.step(pool, [Chunk(ids[:end], 0, [1])])]
    found += [which.step(pool, [Chunk([ids[at]], at, [1])]) for at in range(end, len(ids) - 2)]
    found.append(which.verify(pool, [Chunk(ids[-2:], len(ids) - 2, [1], outputs=2)])[0])
    logits = torch.cat(found)
    assert float((logits - wanted).norm() / wanted.norm()) < 1e-2
    best, second = wanted.topk(2, dim=-1).values.unbind(-1)
    assert bool(((logits.argmax(-1) == wanted.argmax(-1)) | (best - second < 1e-2 * best.abs())).all())


def main() -> None:
    repair()
    watch()
    torch.set_num_threads(1)
    assert ops.choose(torch.device("cpu")).name == "triton"
    float32, half, bfloat = torch.float32, torch.float16, torch.bfloat16
    for case in [
        (float32, 4, 2, 16, 16, [0, 5, 100, 31, 32], 0, None),
        (float32, 4, 4, 64, 64, [63, 64, 500], 0, 4),
        (float32, 32, 1, 16, 32, [200, 3], 0, 8),
        (float32, 3, 1, 80, 128, [300, 127], 0, 1),
        (float32, 6, 2, 24, 16, [250, 9, 40], 33, None),
        (float32, 6, 2, 24, 64, [250, 9, 40], 1, 2),
        (half, 8, 2, 128, 64, [130, 400], 0, None),
        (bfloat, 8, 2, 128, 64, [130, 400], 200, None),
    ]:
        attention(*case)  # type: ignore[arg-type]
        print("attention", *case)
    for chunk_case in prefill_cases.CASES:
        with wide_sums():
            prefill(chunk_case)
        print("prefill", chunk_case)
    for recent in (0, 64):
        with wide_sums():
            stored_prefill(recent, [(5, 20), (0, 130), (40, 70), (100, 1)])
        print("prefill over stored pages", recent)
    for case in [
        (float32, 4, 2, 16, 16, False),
        (float32, 3, 1, 80, 32, True),
        (bfloat, 8, 2, 128, 128, True),
        (half, 4, 4, 64, 64, False),
    ]:
        rotation(*case)  # type: ignore[arg-type]
        print("rotation", *case)
    int2, int4, int8 = (Integer(bits, "channel") for bits in (2, 4, 8))
    for stored_case in [
        (float32, int4, Integer(4, "token"), (4, 2, 32), 64, 0, 64, [5, 63, 64, 200, 330], None),
        (bfloat, int4, Integer(4, "token", 32), (8, 2, 128), 64, 64, 70, [130, 400, 260], None),
        (bfloat, int4, Integer(4, "token", 32), (3, 1, 96), 32, 20, 10, [130, 300], 1),
        (half, int8, Integer(8, "token"), (4, 4, 48), 64, 0, 0, [300, 127], 4),
        (bfloat, Float8(), Float8(), (6, 2, 80), 32, 0, 128, [250, 9, 40], None),
        (float32, Plain(), Integer(2, "token", 16), (2, 1, 64), 128, 128, 64, [500, 3], 8),
        (bfloat, int2, Integer(8, "token", 64), (8, 1, 128), 64, 0, 33, [64, 400], 2),
        (half, int8, Plain(), (16, 1, 256), 64, 64, 64, [400, 300], None),
    ]:
        stored(*stored_case)  # type: ignore[arg-type]
        print("stored", *stored_case)
    for policy in ({"keys": "int4", "values": "int4", "recent": 32}, {"keys": "fp8", "values": "int8", "recent": 0}):
        whole_stored(policy)
        print("whole", policy)
    for name in sys.argv[1:]:
        whole(name)
        print("engine", name)
    for name, scheme in (("Mixtral", cuda_models.W4), ("Qwen3Moe", cuda_models.W8)):
        mixture(name, scheme)
        print("mixture", name, scheme)


if __name__ == "__main__":
    main()
