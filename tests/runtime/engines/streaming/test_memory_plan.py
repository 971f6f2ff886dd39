"""Bounds: what is understood, what stays in memory, what is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import runtime
from runtime.decoding.memory import pool_pages
from runtime.engines.streaming import contents
from runtime.engines.streaming.plan import CACHE, RESERVE, cache_budget, cache_floor, plan, reserve_for, text
from runtime.engines.streaming.prepared_file import PreparedFile
from runtime.errors import RequestError
from runtime.system.sizes import byte_count


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        ("7", 7),
        ("2GB", 2 * 10**9),
        ("1.5 GiB", 3 << 29),
        ("800mb", 8 * 10**8),
        (" 64 kib ", 65536),
        ("1TB", 10**12),
    ],
)
def test_sizes(value: int | str, expected: int) -> None:
    assert byte_count("max_memory", value) == expected


@pytest.mark.parametrize("value", [0, -1, "0GB", True, 1.5, "2 GX", "GB", "", "1e3", "-2GB", "nan", ["2GB"], "9" * 500])
def test_what_is_no_size(value: object) -> None:
    with pytest.raises(RequestError, match="max_memory"):
        byte_count("max_memory", value)


def test_blocks_that_fit_stay_and_the_others_are_spread() -> None:
    for total in (3, 4, 7, 22):
        for slots in range(2, total):
            made = plan(1000 + 50 + 100 * slots, 50, [100] * total, reserve=1000)
            assert made.buffers == min(3, slots)
            assert len(made.streamed) == total - (slots - made.buffers)
            assert list(made.streamed) == sorted(set(made.streamed))
            assert made.bytes <= 50 + 100 * slots
        assert plan(1050 + 100 * total, 50, [100] * total, reserve=1000).streamed == ()
    streamed = plan(53, 0, [1] * 100, reserve=0).streamed
    assert {after - before for before, after in pairwise(streamed)} == {2}


def test_blocks_of_different_sizes() -> None:
    made = plan(350, 50, [100, 10, 10, 100, 100, 10], reserve=0)
    assert made.bytes <= 350


def test_too_little_says_what_is_needed() -> None:
    for blocks, least in (([100_000_000] * 5, 201_000_000), ([], 1_000_000)):
        with pytest.raises(RequestError, match="needs at least") as raised:
            plan(1000, 1_000_000, blocks, reserve=0)
        asked = str(raised.value).partition("at least ")[2].partition(",")[0]
        assert byte_count("max_memory", asked) >= least
        plan(byte_count("max_memory", asked), 1_000_000, blocks, reserve=0)
    assert text(1_000_001, up=True) == "1.01 MB"


def test_load_says_it_before_it_writes(artifacts: dict[str, Path], home: Path) -> None:
    with pytest.raises(RequestError, match="max_memory 1000 bytes"):
        runtime.load(artifacts["llama"], max_memory=1000)
    assert not home.exists()
    with pytest.raises(RequestError, match="max_memory"):
        runtime.load(artifacts["llama"], max_memory="plenty")
    assert byte_count("max_memory", "1GB") > RESERVE


def config(layers: int, heads: int, context: int = 4096) -> Any:
    found = SimpleNamespace(
        hidden_size=64 * heads, num_hidden_layers=layers, num_attention_heads=heads, max_position_embeddings=context
    )
    found.get_text_config = lambda **_: found
    return found


def test_keys_and_values_get_what_a_bound_leaves() -> None:
    small, wide = config(2, 4), config(32, 64)
    assert cache_floor(small, torch.bfloat16) == CACHE
    assert cache_floor(wide, torch.bfloat16) == 2048 * 2 * 32 * 64 * 64 * 2
    assert cache_floor(config(32, 64, context=512), torch.float32) == 512 * 2 * 32 * 64 * 64 * 4
    for shape in (small, wide):
        reserve = reserve_for(shape, torch.bfloat16)
        floor = cache_floor(shape, torch.bfloat16)
        assert reserve >= RESERVE - CACHE + floor
        assert cache_budget(reserve + 1000, 1000, shape, torch.bfloat16) == floor
        assert cache_budget(reserve + 1500, 1000, shape, torch.bfloat16) == floor + 500


@pytest.mark.parametrize("bound", ["400MB", "2GB"])
def test_calls_stay_within_the_bound(artifacts: dict[str, Path], bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.system.memory.available_bytes", lambda device: 1 << 40)
    engine = runtime.load(artifacts["llama"], max_memory=bound).engine
    size = byte_count("max_memory", bound)
    file = contents()[0].path
    weights = sum(group.size for group in PreparedFile(file, file.parent.name).groups)
    assert engine.cache_budget == size - weights - reserve_for(engine.module.config, torch.float32) + CACHE
    most = engine.cache_budget // engine.page_bytes
    assert pool_pages(engine, [engine.page_size] * 10**6, None) == most
    assert pool_pages(engine, [engine.page_size * most], None) == most
    with pytest.raises(RequestError, match="max_memory"):
        pool_pages(engine, [engine.page_size * most + 1], None)
    assert pool_pages(engine, [engine.page_size * most + 1], 2 * size) == most + 1
    assert runtime.load(artifacts["llama"]).engine.cache_budget is None
