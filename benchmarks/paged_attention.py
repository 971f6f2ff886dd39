"""Attention of the decoder in C alone: one layer over plain pages and over pages in few bits, at several depths.

    python benchmarks/paged_attention.py [--heads 32 --kv-heads 4 --size 64] [--depths 1024 8192] [--rows 1]

Milliseconds a layer, the best of several rounds in which every storage has its turn, and ratios to plain pages of the same run. A cell is
`rows` queries after `depth` tokens; layers lie one after another in memory, so that caches are cold as they are in a model.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from typing import Any

import torch

from runtime.kernels.cpu import library
from runtime.kernels.cpu.attention import KINDS, PAGE, Attention, Cache, Storage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--size", type=int, default=64, help="channels of a head")
    parser.add_argument("--depths", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for depth in given.depths:
        print(json.dumps({"depth": depth, "rows": given.rows, "threads": given.threads, **cell(given, depth)}))


def cell(given: argparse.Namespace, depth: int) -> dict[str, Any]:
    """{storage: milliseconds a layer}, and {storage: ratio to plain}."""
    found = library.load()
    assert found is not None
    count = -(-(depth + given.rows) // PAGE)
    shape = (given.layers, count, given.kv_heads, PAGE * given.size)
    keys, values = (torch.randn(shape).bfloat16() for _ in range(2))
    query = torch.randn(given.rows, given.heads, given.size)
    out, pages = torch.empty_like(query), torch.arange(count, dtype=torch.int32)
    sequence, position = torch.zeros(given.rows, dtype=torch.int32), torch.arange(depth, depth + given.rows)
    memory = torch.empty(found.attention_memory(given.size), dtype=torch.uint8)
    broken, kept = torch.zeros(1, dtype=torch.int32), []
    layers: dict[str, list[Attention]] = {}
    for name in ("plain", *KINDS):
        for layer in range(given.layers):
            sizes = given.kv_heads, given.size, given.size
            cache = Cache(keys[layer].data_ptr(), values[layer].data_ptr(), None, library.TYPES[torch.bfloat16], *sizes)
            if name != "plain":
                cache.storage = Storage(None, KINDS[name], KINDS[name], 32, 0, 128)
                records = torch.empty(
                    count * given.kv_heads * found.cache_record(ctypes.byref(cache)), dtype=torch.uint8
                )
                cache.stored = records.data_ptr()
                kept.append(records)
                found.cache_store(ctypes.byref(cache), pages.data_ptr(), count, broken.data_ptr(), given.threads)
            attention = Attention(cache=cache, rows=given.rows, heads=given.heads, pages_stride=count)
            for field, tensor in {
                "sequence": sequence, "position": position, "pages": pages, "query": query, "out": out, "memory": memory,
            }.items():  # fmt: skip
                setattr(attention, field, tensor.data_ptr())
            attention.scale = given.size**-0.5
            layers.setdefault(name, []).append(attention)
    best = dict.fromkeys(layers, float("inf"))
    for _ in range(given.rounds):
        for name, own in layers.items():
            start = time.perf_counter()
            for attention in own:
                found.attention(ctypes.byref(attention), given.threads)
            best[name] = min(best[name], (time.perf_counter() - start) * 1e3 / given.layers)
    return {
        "milliseconds": {name: round(value, 4) for name, value in best.items()},
        "to_plain": {name: round(value / best["plain"], 3) for name, value in best.items()},
    }


if __name__ == "__main__":
    main()
