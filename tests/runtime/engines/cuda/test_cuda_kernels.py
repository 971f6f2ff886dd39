"""The engine's kernels: right in triton's interpreter, and without spills when compiled for GPUs that are not here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_python import python

pytest.importorskip("triton")
HERE = Path(__file__).parent


@pytest.mark.slow
def test_interpreted_kernels_equal_plain_torch() -> None:
    """Triton decides at import whether it compiles or interprets: a process of its own."""
    paths = os.pathsep.join([str(HERE), str(HERE.parents[3] / "benchmarks"), *filter(None, sys.path)])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    names = ["Qwen3", "Mistral, window", "Qwen3Moe, one dense layer"]
    command = [python(TRITON_INTERPRET="1"), str(HERE / "interpreted.py"), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 36


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def attention(
    heads: int, kv_heads: int, size: int, window: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], Any]:
    from runtime.engines.cuda import paged_attention
    from runtime.engines.cuda.cache import CacheLayer

    cache, numbers = meta(9, 64, kv_heads, size, dtype=dtype), meta(4, dtype=torch.int32)
    q, tables = meta(4, heads, size, dtype=dtype), meta(4, 128, dtype=torch.int32)
    return lambda: paged_attention.decode_attention(q, CacheLayer(cache, cache), tables, numbers, size**-0.5, window)


def prompt(
    heads: int, kv_heads: int, size: int, window: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], Any]:
    from runtime.engines.cuda import chunk_attention
    from runtime.engines.cuda.cache import CacheLayer, Chunks

    cache, q = meta(9, 64, kv_heads, size, dtype=dtype), meta(512, heads, size, dtype=dtype)
    chunks = Chunks([512], [512], meta(16, dtype=torch.int32), 64)
    return lambda: chunk_attention.chunk_attention(q, CacheLayer(cache, cache), chunks, size**-0.5, window)


def stored(policy: dict[str, Any], heads: int = 32, kv_heads: int = 8, size: int = 128) -> Callable[[], Any]:
    """A step over stored pages, and the storing of some."""
    from runtime.engines.cuda import page_store, stored_attention
    from runtime.engines.cuda.cache import CacheLayer, StoredLayers
    from runtime.engines.cuda.storage import Storage
    from runtime.kv_cache.policy.policy import Policy

    tier = Policy.parse(policy).tiers[0]
    storage, sizes = Storage(tier.keys, tier.values, 0, 128), (64, kv_heads, size)
    layers = StoredLayers.zeros(storage, 4, 100, 9, sizes, torch.bfloat16, torch.device("meta"))
    layer, numbers = layers.layer(1), meta(4, dtype=torch.int32)
    q, tables = meta(4, heads, size), meta(4, 128, dtype=torch.int32)

    def call() -> None:
        page_store.store(layers, numbers)
        held = CacheLayer(layer.keys[0], layer.values[0], layer)
        stored_attention.decode_attention(q, held, tables, numbers, size**-0.5, 0)

    return call


def rotation(heads: int, kv_heads: int, size: int, norms: bool) -> Callable[[], Any]:
    from runtime.engines.cuda import rotary_store
    from runtime.engines.cuda.cache import CacheLayer, Rows

    q, k, v = meta(4, (heads + 2 * kv_heads) * size).split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
    cache, numbers = meta(9, 64, kv_heads, size), meta(4, dtype=torch.int32)
    weights = (meta(size), meta(size)) if norms else None
    angles = meta(128, size, dtype=torch.float32)
    rows, layer = Rows(numbers, numbers, numbers), CacheLayer(cache, cache)
    return lambda: rotary_store.rotate_and_store((q, k, v), weights, 1e-5, angles, rows, layer)


@pytest.mark.sampled(17, 6)
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("call", "registers"),
    [
        (attention(32, 8, 128), 128),  # Llama 8B
        (attention(32, 8, 128, window=4096), 168),  # Mistral 7B
        (attention(14, 2, 64), 96),  # Qwen2 0.5B
        (attention(32, 8, 128, dtype=torch.float32), 96),
        (stored({"keys": "int4", "values": "int4"}), 168),
        (stored({"keys": "int2", "values": "int2"}), 168),
        (stored({"keys": "int8", "values": "int8"}), 184),
        (stored({"keys": "fp8", "values": "fp8"}), 168),
        (stored({"keys": "plain", "values": "int4"}, heads=14, kv_heads=2, size=64), 128),
        (rotation(32, 8, 128, norms=False), 40),
        (rotation(32, 8, 128, norms=True), 40),
    ],
    ids=[
        "llama",
        "mistral",
        "qwen",
        "float32",
        "int4",
        "int2",
        "int8",
        "fp8",
        "plain keys",
        "rotary",
        "rotary with norms",
    ],
)
def test_compiles_without_spills(call: Callable[[], Any], registers: int, capability: int) -> None:
    from gpu_launches import build, record, resources

    for launch in record(call):
        found = resources(build(launch, capability), capability)
        assert found["spill_bytes"] == 0, (launch.kernel, found)
        assert found["registers"] <= registers, (launch.kernel, found)
        assert found["shared"] <= 48 * 1024, (launch.kernel, found)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("call", "registers"),
    [
        (prompt(32, 8, 128), 208),  # Llama 8B
        (prompt(32, 8, 128, window=4096), 232),  # Mistral 7B
        (prompt(16, 16, 64, dtype=torch.float16), 184),
        (prompt(64, 8, 128, dtype=torch.float16), 208),  # Llama 70B
        (prompt(14, 2, 64), 188),  # Qwen2 0.5B
        (prompt(16, 8, 256), 176),
        (prompt(32, 8, 128, dtype=torch.float32), 224),
    ],
    ids=["llama", "mistral", "heads of 64", "groups of 8", "qwen", "heads of 256", "float32"],
)
@pytest.mark.sampled(2, 5)
def test_prompts_are_attended_without_spills(call: Callable[[], Any], registers: int, capability: int) -> None:
    """Keys and values are copied two blocks ahead, on tensor cores that take weights out of registers."""
    from gpu_launches import build, main_loop, record, resources

    (launch,) = record(call)
    kernel = build(launch, capability)
    found = resources(kernel, capability)
    assert found["spill_bytes"] == 0, found
    assert found["registers"] <= registers, found
    assert found["shared"] <= 163 << 10, found  # what a program may have on sm_80
    ptx, names = kernel.asm["ptx"], [each.partition(".")[0] for each in main_loop(kernel)]
    pending = [int(each, 0) for each in re.findall(r"cp\.async\.wait_group\s+(\w+)", ptx)]
    assert names.count("LDGSTS") >= 4, "keys and values are copied ahead"
    assert pending.count(2) >= 2, "each loop waits for what it multiplies next, not for what comes after"
    half = launch.arguments["q"].dtype != torch.float32
    assert names.count({80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}[capability] if half else "HMMA") >= 8
    if capability == 90 and half:
        assert names.count("STS") == 0, "weights go through shared memory"
        assert names.count("BAR") <= 2
