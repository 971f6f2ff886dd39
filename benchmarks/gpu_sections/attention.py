"""Attention over pages beside torch's: of prompts, and of a decode step over plain pages, those in few bits and compressed caches.

Heads are Llama-3-8B's (32 of queries, 8 of keys, 128 channels). For decode steps, torch's scaled_dot_product_attention reads the same
keys and values, contiguous, of sequences of one length, which is the easier task. For prompts it and torch's varlen_attn are timed with
the gathering of keys and values that they need, varlen_attn without it too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from gpu_sections.bench import Bench, Row, said

HEADS, KV_HEADS, SIZE, PAGE = 32, 8, 128, 64
#: (batch, tokens in the cache of each sequence)
CELLS = ((1, 1024), (1, 32768), (16, 1024), (16, 8192), (64, 2048))
#: Chunks of prompts in a step: (number, position of the first token, tokens)
PROMPTS = ((1, 0, 2048), (1, 30720, 2048), (8, 0, 256), (8, 1000, 24))
STORAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp8": {"keys": "fp8", "values": "fp8", "recent": 64},
    "int8": {"keys": "int8", "values": "int8", "recent": 64},
    "int4": {"keys": "int4", "values": "int4", "recent": 64},
    "int2": {"keys": "int2", "values": "int2", "recent": 64},
}


def heads(bench: Bench) -> tuple[int, int, int]:
    """Of queries, of keys, and their channels."""
    return bench.pick((HEADS, KV_HEADS, SIZE), (4, 2, 32))


def check(bench: Bench) -> None:
    """Every kernel over the cache against plain torch: ragged lengths, windows, every storage."""
    dtype = torch.bfloat16
    for window in bench.pick((0, 700), (0, 33)):
        bench.case(f"paged attention, window {window}", attention_error(bench, window), 0.02)
        bench.case(f"attention of prompts, window {window}", prompt_error(bench, window), 0.02)
    for norms in (False, True):
        bench.case(f"rotation, {'with' if norms else 'without'} norms", rotation_error(bench, norms), 0.02)
    for name, policy in STORAGES.items():
        if policy:
            bench.case(f"paged attention, {name}", stored_attention_error(bench, policy), 0.02)
        for length in bench.pick((64, 1024, 8192), (96,)):
            try:
                bench.case(f"cache {name}, {length} tokens", stored_error(bench, policy, length, dtype), 0.02)
            except Exception as error:
                bench.fail(f"cache {name}, {length} tokens: {said(error)}")
                bench.recover()


def attention_error(bench: Bench, window: int) -> float:
    """Largest error of decode attention over sequences of many lengths."""
    from runtime.engines.cuda import ops
    from runtime.engines.cuda.cache import CacheLayer

    (count, kv_heads, size), device = heads(bench), bench.device
    lengths = bench.pick([0, 63, 64, 1000, 3001], [0, 63, 64, 130])
    width = max(lengths) // PAGE + 1
    generator = torch.Generator().manual_seed(0)
    pages = len(lengths) * width
    keys, values = torch.randn(2, pages, PAGE, kv_heads, size, generator=generator).to(device, torch.bfloat16).unbind(0)
    positions = torch.tensor(lengths, dtype=torch.int32, device=device)
    tables = torch.randperm(pages, generator=generator).view(len(lengths), width).to(device, torch.int32)
    q = torch.randn(len(lengths), count, size, generator=generator).to(device, torch.bfloat16)
    arguments = (q, CacheLayer(keys, values), tables, positions, size**-0.5, window)
    found, wanted = ops.choose(device).decode_attention(*arguments), ops.decode_attention(*arguments)
    return float((found.float() - wanted.float()).abs().max())


def prompts(bench: Bench, spans: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, Any, Any]:
    """Queries, a layer of the cache and `Chunks` of tokens (position of the first, number)."""
    from runtime.engines.cuda.cache import CacheLayer, Chunks

    (count, kv_heads, size), device = heads(bench), bench.device
    starts, counts = zip(*spans, strict=True)
    total = sum(math.ceil(sum(span) / PAGE) for span in spans)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    pages = torch.randperm(total, generator=generator, device=device).int()
    layer = CacheLayer(random(total, PAGE, kv_heads, size), random(total, PAGE, kv_heads, size))
    return random(sum(counts), count, size), layer, Chunks(starts, counts, pages, PAGE)


def prompt_error(bench: Bench, window: int) -> float:
    """Largest error of attention of chunks of many lengths."""
    from runtime.engines.cuda import ops

    spans = bench.pick([(0, 300), (63, 1), (1000, 65), (2990, 17)], [(0, 70), (63, 1), (90, 17)])
    arguments = (*prompts(bench, spans), heads(bench)[-1] ** -0.5, window)
    found, wanted = ops.choose(bench.device).chunk_attention(*arguments), ops.chunk_attention(*arguments)
    return float((found.float() - wanted.float()).abs().max())


def stored_layer(bench: Bench, policy: dict[str, Any], pages: int) -> Any:
    """A layer of the fused engine's cache with random plain pages, each at the place of its own number, and none stored yet."""
    from runtime.engines.cuda.cache import CacheLayer, StoredLayers
    from runtime.engines.cuda.storage import Storage
    from runtime.kv_cache.policy.policy import Policy

    plan = Policy.parse(policy).plan().storage
    (_, kv_heads, size), (tier,) = heads(bench), plan.tiers
    storage, sizes = Storage(tier.keys, tier.values, 0, plan.recent), (PAGE, kv_heads, size)
    layers = StoredLayers.zeros(storage, 1, pages, pages, sizes, torch.bfloat16, bench.device)
    generator = torch.Generator(bench.device).manual_seed(0)
    for side in (layers.keys, layers.values):
        side.normal_(generator=generator)
    layers.places.copy_(torch.arange(pages))
    return CacheLayer(layers.keys[0], layers.values[0], layers)


def stored_attention_error(bench: Bench, policy: dict[str, Any]) -> float:
    """Largest error of decode attention over sequences of many lengths whose older pages the kernel has stored."""
    from runtime.engines.cuda import ops

    (count, _, size), device = heads(bench), bench.device
    lengths = bench.pick([0, 63, 64, 1000, 3001], [0, 63, 64, 200])
    width = max(lengths) // PAGE + 1
    generator = torch.Generator().manual_seed(0)
    tables = torch.randperm(len(lengths) * width, generator=generator).view(len(lengths), width).to(device, torch.int32)
    positions = torch.tensor(lengths, dtype=torch.int32, device=device)
    q = torch.randn(len(lengths), count, size, generator=generator).to(device, torch.bfloat16)
    out = []
    for which in (ops.choose(device), ops.TORCH):
        layer = stored_layer(bench, policy, tables.numel())
        which.store(layer.stored, tables.flatten())
        out.append(which.decode_attention(q, layer, tables, positions, size**-0.5, 0).float())
    return float((out[0] - out[1]).abs().max())


def rotation_error(bench: Bench, norms: bool) -> float:
    """Largest relative error of rotated queries and stored keys and values."""
    from runtime.engines.cuda import ops
    from runtime.engines.cuda.cache import CacheLayer, Rows

    (count, kv_heads, size), device, rows = heads(bench), bench.device, 5
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    joined = random(rows, (count + 2 * kv_heads) * size).bfloat16()
    qkv = joined.split([count * size, kv_heads * size, kv_heads * size], dim=-1)
    weights = (random(size).bfloat16(), random(size).bfloat16()) if norms else None
    rotations, places = random(300, size), torch.tensor([0, 299, 3, 4, 17], dtype=torch.int32, device=device)
    out = []
    for which in (ops.TORCH, ops.choose(device)):
        layer = CacheLayer(*torch.zeros(2, 5, PAGE, kv_heads, size, dtype=torch.bfloat16, device=device))
        out.append(
            (which.rotate_and_store(qkv, weights, 1e-5, rotations, Rows(places, places, places), layer), *layer[:2])
        )
    return max(
        float((a - b).norm() / b.norm()) for b, a in zip(*((t.float() for t in each) for each in out), strict=True)
    )


def cache(bench: Bench, rows: int, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Queries `[rows, queries of a key head, size]`, keys and values `[rows, length, size]`."""
    count, kv_heads, size = heads(bench)
    generator = torch.Generator(bench.device).manual_seed(0)
    shapes = ((rows, count // kv_heads, size), (rows, length, size), (rows, length, size))
    return tuple(torch.randn(shape, generator=generator, device=bench.device).to(dtype) for shape in shapes)


def stored_error(bench: Bench, policy: dict[str, Any], length: int, dtype: torch.dtype) -> float:
    """Relative error of attention over stored pages, against plain torch over what they hold."""
    from kv_speed import stored

    from runtime.kv_cache.kernels import triton_attention
    from runtime.kv_cache.region import Queries, region_attention

    q, keys, values = cache(bench, 3, length, dtype)
    region, queries = stored(policy, keys, values), Queries(q, q.shape[-1] ** -0.5)
    reason = triton_attention.why_not(q, region)
    if reason is not None:
        raise RuntimeError(reason)
    found, wanted = triton_attention.run(queries, region)[0], region_attention(queries, region)[0]
    return float((found - wanted).norm() / wanted.norm())


def timing(bench: Bench) -> None:
    """Each depth and batch of a step, the fused engine's kernel and every storage beside torch's attention; then prompts."""
    bandwidth, operations = bench.limits()
    for batch, length in bench.pick(CELLS, ((2, 64),)):
        if bench.enough(f"batch {batch}, {length} tokens"):
            bench.add(cell(bench, batch, length, bandwidth))
    for number, start, count in bench.pick(PROMPTS, ((2, 40, 30),)):
        if bench.enough(f"{number} chunks of {count} tokens after {start}"):
            bench.add(prompt_cell(bench, number, start, count, operations))


def prompt_cell(bench: Bench, number: int, start: int, count: int, operations: float) -> Row:
    """Seconds of one layer's attention for so many chunks of prompts."""
    from torch.nn.attention.bias import causal_lower_right

    from runtime.engines.cuda import ops

    (many, _, size), end = heads(bench), start + count
    row: Row = {"chunks": number, "start": start, "tokens": count}
    q, layer, chunks = prompts(bench, [(start, count)] * number)
    tables, mask = chunks.tables, causal_lower_right(count, end)

    def gathered() -> list[torch.Tensor]:
        every = torch.stack(tables)
        return [side[every].flatten(1, 2)[:, :end] for side in layer[:2]]

    def sdpa() -> torch.Tensor:
        sides = [q.view(number, count, many, size), *gathered()]
        query, keys, values = (side.transpose(1, 2) for side in sides)
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)

    ends = [torch.arange(number + 1, dtype=torch.int32, device=bench.device) * each for each in (count, end)]

    def varlen(keys: torch.Tensor, values: torch.Tensor) -> Any:
        from torch.nn.attention.varlen import varlen_attn

        sides = keys.flatten(0, 1), values.flatten(0, 1)
        return varlen_attn(q, *sides, *ends, count, end, window_size=(-1, 0), enable_gqa=True, num_splits=1)

    call = partial(ops.choose(bench.device).chunk_attention, q, layer, chunks, size**-0.5, 0)
    bench.ours(row, "fused engine, prompts", lambda: bench.seconds([call] * 4))
    bench.peer(row, "sdpa, gathering", lambda: bench.seconds([sdpa] * 4))
    bench.peer(row, "varlen_attn, gathering", lambda: bench.seconds([lambda: varlen(*gathered())] * 4))
    bench.peer(row, "varlen_attn", lambda: bench.seconds([partial(varlen, *gathered())] * 4))
    if row["fused engine, prompts"]:
        needed = number * 4 * many * size * (count * start + count * (count + 1) // 2)
        row["share of the bf16 operations"] = needed / row["fused engine, prompts"] / operations
    return row


def cell(bench: Bench, batch: int, length: int, bandwidth: float) -> Row:
    """Seconds of one layer's attention for one new token of each sequence."""
    from kv_speed import stored

    from runtime.engines.cuda import ops
    from runtime.engines.cuda.cache import CacheLayer
    from runtime.kv_cache.kernels import triton_attention
    from runtime.kv_cache.region import Queries

    (count, kv_heads, size), device, dtype = heads(bench), bench.device, torch.bfloat16
    row: Row = {"batch": batch, "tokens": length}
    q, keys, values = cache(bench, batch * kv_heads, length, dtype)
    plain = keys.nbytes + values.nbytes
    dense = [each.view(batch, kv_heads, -1, size) for each in (q, keys, values)]  # heads of a key head are its queries
    row["sdpa"] = bench.seconds([partial(functional.scaled_dot_product_attention, *dense)] * 4)
    pages = math.ceil(length / PAGE)
    layers = [
        CacheLayer(*torch.randn(2, batch * pages, PAGE, kv_heads, size, device=device, dtype=dtype))
        for _ in range(min(8, bench.copies(plain)))
    ]
    tables = torch.randperm(batch * pages, device=device).view(batch, pages).int()
    at = torch.full((batch,), length - 1, dtype=torch.int32, device=device)
    queries = q.view(batch, count, size)
    attend = ops.choose(device).decode_attention
    calls = [partial(attend, queries, layer, tables, at, size**-0.5, 0) for layer in layers]
    bench.ours(row, "fused engine", lambda: bench.seconds(calls))
    sizes = {"fused engine": plain}
    for name, policy in STORAGES.items():
        if policy:
            layer = stored_layer(bench, policy, batch * pages)
            ops.choose(device).store(layer.stored, tables.flatten())
            sizes[f"fused engine, {name}"] = sum(pool.nbytes for pool in layer.stored.pools.values())
            call = partial(attend, queries, layer, tables, at, size**-0.5, 0)
            bench.ours(row, f"fused engine, {name}", lambda c=call: bench.seconds([c] * 4))
        region = stored(policy, keys, values)
        sizes[f"cache {name}"] = sum(pool.nbytes for pool in region.pools.values())
        call = partial(triton_attention.run, Queries(q, size**-0.5), region)
        bench.ours(row, f"cache {name}", lambda c=call: bench.seconds([c] * 4))
    row["bytes"] = sizes
    for name, read in sizes.items():
        if row[name]:
            row[f"{name}, times as fast as sdpa"] = row["sdpa"] / row[name]
            row[f"{name}, share of the copy bandwidth"] = read / row[name] / bandwidth
    return row
