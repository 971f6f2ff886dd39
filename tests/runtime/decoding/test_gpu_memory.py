"""Size of the KV cache's pool on a GPU, whose free memory is made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_reference import PagedReference, hashed

import runtime
from runtime.decoding import memory
from runtime.errors import RequestError

FREE = 100_000  # bytes: 1000 pages
PAGE = 100


class Gpu(PagedReference):
    """The reference engine as if it were on a GPU that keeps the memory of the last pool."""

    left = 0

    @property
    def spare_pages(self) -> int:
        return self.left


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_memory(free: int, reserved: int = 0, allocated: int = 0) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * 10**9))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)

    set_memory(FREE)
    return set_memory


def engine(**changes: Any) -> Gpu:
    made = Gpu(hashed(), **changes)
    made.device = torch.device("cuda:0")
    assert made.page_bytes == PAGE
    return made


def test_a_gpu_gives_most_of_what_is_free(free: Callable[..., None]) -> None:
    assert memory.most_pages(engine(), 1, None) == 850
    free(200 * 10**9)
    assert memory.most_pages(engine(), 1, None) == 170 * 10**9 // PAGE, "no cap of 2 GB"


def test_what_the_allocator_holds_unused_is_free(free: Callable[..., None]) -> None:
    free(40_000, reserved=90_000, allocated=30_000)
    assert memory.most_pages(engine(), 1, None) == 850


def test_a_cpu_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = PagedReference(hashed())
    monkeypatch.setattr(memory, "available_bytes", lambda device: FREE)
    assert memory.most_pages(on_cpu, 1, None) == 250
    assert memory.most_pages(on_cpu, 700, None) == 700
    monkeypatch.setattr(memory, "available_bytes", lambda device: 64 * 10**9)
    assert memory.most_pages(on_cpu, 1, None) == 2 * 10**9 // PAGE


@pytest.mark.usefixtures("free")
def test_what_can_never_fit_is_refused() -> None:
    assert memory.most_pages(engine(), 850, None) == 850
    with pytest.raises(RequestError, match="free memory"):
        memory.most_pages(engine(), 851, None)


def test_the_memory_of_an_earlier_pool_is_used_again(free: Callable[..., None]) -> None:
    """It is not free any more, and graphs are captured over it."""
    free(15_000)
    made = engine()
    made.left = 850
    assert memory.most_pages(made, 1, None) == 850
    assert memory.most_pages(made, 850, None) == 850
    made.left = 10
    assert memory.most_pages(made, 20, None) == int(0.85 * (15_000 + 10 * PAGE)) // PAGE, "too small: made anew"


@pytest.mark.usefixtures("free")
def test_bounds_go_before_shares() -> None:
    made = engine()
    assert memory.most_pages(made, 1, 30_000) == 300
    made.cache_budget = 20_000
    assert memory.most_pages(made, 1, None) == 200
    made.cache_budget = 10**9
    assert memory.most_pages(made, 1, None) == 850
    with pytest.raises(RequestError, match="cache_memory"):
        memory.most_pages(made, 900, None)


def test_load_bounds_the_shared_cache(tiny_artifact: Path) -> None:
    model = runtime.load(tiny_artifact, drafter=False, cache_memory="1MB")
    assert model.engine.cache_budget == 10**6
    prompt = [5, 6, 7]
    assert model.generate(prompt, max_new_tokens=4) == runtime.load(tiny_artifact, drafter=False).generate(
        prompt, max_new_tokens=4
    )
    pages = model.engine.page_bytes
    assert memory.most_pages(model.engine, 1, None) == 10**6 // pages
    small = runtime.load(tiny_artifact, drafter=False, cache_memory=pages)
    with pytest.raises(RequestError, match="cache_memory"):
        small.generate([5] * 100, max_new_tokens=4)


def test_load_refuses_it_where_caches_grow(tiny_artifact: Path) -> None:
    with pytest.raises(RequestError, match="cache_memory"):
        runtime.load(tiny_artifact, drafter=False, kernels="reference", cache_memory="1MB")
    with pytest.raises(RequestError, match="cache_memory"):
        runtime.load(tiny_artifact, drafter=False, cache_memory="much")
