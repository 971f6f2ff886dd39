"""A draft model under `max_memory`: what it takes comes off what its target may, or it is left out, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import llama, save

import runtime
from runtime.checkpoint.artifact import Artifact
from runtime.drafting.drafters.composition import GROWTH, Limited
from runtime.drafting.memory_budget import read_drafts
from runtime.engines.streaming.plan import CACHE
from runtime.errors import RequestError
from runtime.kernels.cpu import library

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")
MIB = 1 << 20


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return save(llama(num_hidden_layers=2), tmp_path / "draft")


@pytest.fixture
def least(artifacts: dict[str, Path]) -> int:
    """The bound under which the whole target is in memory, and the least cache."""
    return 10**9 - runtime.load(artifacts["llama"], max_memory=10**9).engine.cache_budget + CACHE


def bring(source: Path, path: Path, draft: Path) -> Path:
    """An artifact with a draft of its own."""
    shutil.copytree(source, path)
    shutil.copytree(draft, path / "draft")
    manifest = {"schema_version": 1, "files": {}, "tensors": {}, "draft": {"drafter": {"model": "draft"}}}
    (path / "compress.json").write_text(json.dumps(manifest))
    return path


def test_weights_and_cache_of_a_draft_are_counted(artifacts: dict[str, Path], draft: Path, least: int) -> None:
    bound = least + 64 * MIB
    plain = runtime.load(artifacts["llama"], max_memory=bound)
    for value in (str(draft), ["lookup", {"model": draft}]):
        model = runtime.load(artifacts["llama"], max_memory=bound, drafter=value)
        drafter: Any = model.speculation.drafter
        drafter = drafter.drafters[1] if isinstance(value, list) else drafter
        assert isinstance(drafter, Limited)
        inner: Any = drafter.drafter
        taken = plain.engine.cache_budget - model.engine.cache_budget
        position = inner.cache._engine.page_bytes // inner.cache._engine.page_size
        assert inner.weights + GROWTH * 2048 * position <= taken <= 64 * MIB
        assert drafter._positions == (taken - inner.weights) // (GROWTH * position)
    prompts = [[5, 6, 7], [9], [11, 12, 13, 14]] * 8
    assert model.generate(prompts, max_new_tokens=30) == plain.generate(prompts, max_new_tokens=30)
    assert model.speculation.off is None
    assert inner.memory_bytes <= taken


def test_many_texts_take_no_more_than_the_draft_may(artifacts: dict[str, Path], draft: Path, least: int) -> None:
    value = {"model": str(draft), "lengths": "fixed"}
    model = runtime.load(artifacts["llama"], max_memory=least + 64 * MIB, drafter=value)
    drafter: Any = model.speculation.drafter
    drafter._positions = 3 * drafter._page  # of pages: three texts
    plain = runtime.load(artifacts["llama"])
    prompts = [[5, 6, 7 + place] for place in range(12)]
    options = {"max_new_tokens": 40, "ignore_eos": True}
    assert model.generate(prompts, **options) == plain.generate(prompts, **options)
    assert model.speculation.off is None
    assert model.stats["drafted_tokens"] > 0
    assert drafter._taken == 0
    assert len(drafter.drafter.cache._free) <= 16  # pages that its memory began with


def test_a_draft_on_an_engine_without_pages_is_limited_too(
    artifacts: dict[str, Path], tmp_path: Path, least: int
) -> None:
    unknown = llama(hidden_act="mish")  # to the decoder in C
    draft = save(unknown, tmp_path / "draft")
    model = runtime.load(artifacts["llama"], max_memory=least + 64 * MIB, drafter=str(draft))
    drafter: Any = model.speculation.drafter
    assert isinstance(drafter, Limited)
    assert drafter._page == 1
    assert drafter._positions >= 2048
    plain = runtime.load(artifacts["llama"])
    assert model.generate([5, 6, 7], max_new_tokens=30) == plain.generate([5, 6, 7], max_new_tokens=30)
    assert model.speculation.off is None
    assert model.stats["drafted_tokens"] > 0


def test_what_does_not_fit_is_refused_or_left_out(
    artifacts: dict[str, Path], draft: Path, least: int, tmp_path: Path, caplog: Any
) -> None:
    with pytest.raises(RequestError, match="max_memory"):
        runtime.load(artifacts["llama"], max_memory=least, drafter=str(draft))
    path = bring(artifacts["llama"], tmp_path / "artifact", draft)
    with pytest.raises(RequestError, match="max_memory"):
        runtime.load(path, max_memory=least, drafter=True, verify=False)
    model = runtime.load(path, max_memory=least, verify=False)
    assert model.speculation is None
    assert "what drafts for it" in caplog.text
    assert model.generate([5, 6], max_new_tokens=4) == runtime.load(artifacts["llama"]).generate(
        [5, 6], max_new_tokens=4
    )
    roomy = runtime.load(path, max_memory=least + 64 * MIB, verify=False)
    assert isinstance(roomy.speculation.drafter, Limited)
    with pytest.raises(RequestError, match="max_memory"):
        runtime.load(path, max_memory=MIB, verify=False)


def test_heads_are_counted_as_they_are_computed(artifacts: dict[str, Path], tmp_path: Path) -> None:
    """In float32, with the rows of the target's head that they compute anew."""
    path = tmp_path / "heads"
    path.mkdir()
    (path / "draft.json").write_text(json.dumps({"schema_version": 1, "method": "medusa", "hidden": 64}))
    tensors = {"heads.0.weight": torch.zeros(64, 64, dtype=torch.bfloat16)}
    save_file(tensors | {"kept_tokens": torch.arange(10, dtype=torch.int32)}, path / "heads.safetensors")
    blueprint: Any = SimpleNamespace(artifact=Artifact(artifacts["llama"]), device=torch.device("cpu"))
    found = read_drafts(["lookup", {"model": str(path)}], blueprint, 10**9, False)
    assert (found.models, found.bytes) == ({}, 4 * (64 * 64 + 10 * 64))
