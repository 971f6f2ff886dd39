"""What a run says about its compressed cache: how much of it steps read, and what computes attention over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import runtime
from runtime.kv_cache.kernels import cpu
from runtime.kv_cache.storage.integer import Integer
from runtime.kv_cache.storage.plain import Plain

PROMPTS = [torch.randint(0, 4096, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (300, 410)]
KEPT = {"keys": "int4", "values": "int4", "recent": 32}
QUEST = {"select": {"method": "quest", "tokens": 64, "skip_layers": 1, "recent": 8}}


def test_stats_say_how_much_of_the_cache_steps_read(bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all prompts of a call, in however many caches they were decoded."""
    model = runtime.load(bundled, device="cpu", kernels="reference", kv_cache={**KEPT, **QUEST})
    caches: list[Any] = []
    new = model.engine.new_cache
    monkeypatch.setattr(model.engine, "new_cache", lambda: caches.append(new()) or caches[-1])
    assert model.stats["kv_cache_read_share"] is None
    model.generate(PROMPTS, max_new_tokens=1, ignore_eos=True)
    assert model.stats["kv_cache_read_share"] is None, "prompts alone, which read everything"
    caches.clear()
    one = model.engine.cache_factory.need(420, 5)
    model.generate(PROMPTS, max_new_tokens=5, ignore_eos=True, cache_memory=one)
    assert len(caches) == 2
    read, held = (sum(cache.reads.totals[i] for cache in caches) for i in range(2))
    share = model.stats["kv_cache_read_share"]
    assert share == read / held
    layers = len(caches[0].layers)
    # The first layer reads everything, the others 64 tokens of some 300 or 410, or two pages and the ends.
    assert 1 / layers < share < 1 / layers + (layers - 1) / layers * 0.3
    steps = 4
    heads = caches[0].layers[0].shape[1]
    assert held == layers * heads * sum(len(prompt) + step for prompt in PROMPTS for step in range(1, steps + 1))


@pytest.mark.parametrize("policy", [False, {}, KEPT], ids=str)
def test_without_a_selection_no_share_is_said(bundled: Path, policy: Any) -> None:
    model = runtime.load(bundled, device="cpu", kv_cache=policy)
    model.generate(PROMPTS[0], max_new_tokens=3, ignore_eos=True)
    assert model.stats["kv_cache_read_share"] is None


@pytest.mark.skipif(cpu.load() is None, reason="needs a C compiler")
def test_explain_says_what_reads_the_cache(bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = runtime.load(bundled, device="cpu", kv_cache=False)
    assert not [name for name in plain.explain() if name.startswith("kv_cache")]
    lean = runtime.load(bundled, device="cpu", kv_cache=KEPT)
    layers = lean.engine.module.config.num_hidden_layers
    pages = "pages of the decoder in C, keys int4, values int4"
    found = {name: kernel for name, kernel in lean.explain().items() if name.startswith("kv_cache")}
    assert found == {f"kv_cache.{index}": pages for index in range(layers)}
    model = runtime.load(bundled, device="cpu", kernels="reference", kv_cache={**KEPT, "prefix": 2})
    wanted = {f"kv_cache.{index}": "kv-cpu" for index in range(layers)}
    assert {name: kernel for name, kernel in model.explain().items() if name.startswith("kv_cache")} == wanted
    # A storage that the kernel does not know is left to plain torch, the rest is not.
    why_not = cpu.why_not

    def no_integers(query: torch.Tensor, region: Any) -> str | None:
        known = isinstance(region.codecs["keys"], Plain)
        assert known or isinstance(region.codecs["keys"], Integer)
        return why_not(query, region) if known else "it does not know storage int4"

    monkeypatch.setattr(cpu, "why_not", no_integers)
    expected = "kv-cpu, kv-reference: it does not know storage int4"
    assert model.explain()["kv_cache.0"] == expected
    monkeypatch.setattr(cpu, "why_not", lambda query, region: "there is no C compiler")
    assert model.explain()["kv_cache.0"] == "kv-reference: there is no C compiler"
