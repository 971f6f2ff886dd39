"""Offload to a disk inside the native engine: nothing is lost, memory is bounded, and what cannot be is said."""

from __future__ import annotations

import errno
import gc
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_engines import model_of, native
from policy_models import native_model, texts, torch_model
from speculation_cases import trees_change_nothing

from runtime.config.settings import ConfigError
from runtime.engines.base import Chunk
from runtime.engines.native.storage import why_modules_store
from runtime.errors import CompressError
from runtime.kernels.cpu import library
from runtime.kernels.cpu.attention import PAGE
from runtime.kv_cache.policy.policy import Policy

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")

QUEST = {"method": "quest", "tokens": 100, "skip_layers": 1}
#: What the same policy gives in memory, but that pages which are offloaded must be older than `recent`.
POLICIES: dict[str, dict[str, Any]] = {
    "floats": {"recent": 64},
    "floats, nothing recent": {"recent": 0},
    "int4 after a prefix": {"keys": "int4", "values": "int4", "recent": 70, "prefix": 5},
    "read by quest": {"recent": 64, "select": QUEST},
    "int8, read by quest": {"keys": "int8", "values": "int8", "recent": 64, "select": QUEST},
    "evicting": {"recent": 64, "evict": {"score": "tova", "tokens": 160, "interval": 40}},
    "evicting by sums": {"recent": 64, "evict": {"score": "h2o", "tokens": 160, "interval": 40}},
}


@pytest.fixture(scope="module")
def module() -> Any:
    return model_of("grouped", head_dim=32, max_position_embeddings=2048)


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_lost(module: Any, policy: str, tmp_path: Path) -> None:
    prompts = texts(300, 20, 129, 64, 700)
    prompts += [prompts[0][:250], prompts[4][:640] + prompts[2]]
    wanted = native_model(module, POLICIES[policy]).generate(prompts, max_new_tokens=90, ignore_eos=True)
    model = native_model(module, {**POLICIES[policy], "offload": {"to": "disk", "directory": str(tmp_path)}})
    assert model.generate(prompts, max_new_tokens=90, ignore_eos=True) == wanted
    for prompt, expected in zip(prompts, wanted, strict=True):  # once more, on the pages of the first call
        assert model.generate(prompt, max_new_tokens=90, ignore_eos=True) == expected
    assert not list(tmp_path.iterdir()), "the file has no name"


@pytest.mark.parametrize("policy", ["floats", "read by quest", "evicting"])
def test_what_is_written_is_what_modules_write(module: Any, policy: str, tmp_path: Path) -> None:
    settings = {**POLICIES[policy], "offload": {"to": "disk", "directory": str(tmp_path)}}
    slow = torch_model(module, settings)
    (prompt,) = texts(300)
    found = native_model(module, settings).generate(prompt, max_new_tokens=90, ignore_eos=True)
    # Of what is stored elsewhere modules keep whole chunks of 32 tokens where they evict.
    assert found == slow.generate(prompt, max_new_tokens=90, ignore_eos=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_drafts_change_nothing(module: Any, policy: str) -> None:
    settings = {**POLICIES[policy], "offload": "disk"}
    trees_change_nothing(lambda: native_model(module, settings), texts(300, 40, 129, seed=4), 120)


@pytest.mark.parametrize("policy", ["floats", "int8, read by quest"])
def test_bits_are_those_of_a_cache_in_memory(module: Any, policy: str) -> None:
    (text,) = texts(400, seed=1)
    found = []
    for offload in ({}, {"offload": "disk"}):
        engine = native(module)
        assert engine.hold(Policy.parse({**POLICIES[policy], **offload})) is None
        pool, pages, retention = engine.new_pages(8), list(range(8)), engine.retention(300)
        found.append(
            torch.cat(
                [
                    engine.read(pool, [Chunk(text[start : start + 50], start, pages, retention=retention)], every=True)
                    for start in range(0, 400, 50)
                ]
            )
        )
    assert torch.equal(*found)


# ---------------------------------------------------------------- memory
def _memory(field: str) -> int:
    """Bytes of this process, of /proc."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))  # type: ignore[union-attr]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak of resident memory")
@pytest.mark.parametrize("select", [None, {"method": "quest", "ratio": 0.1, "skip_layers": 0}])
def test_memory_is_bounded_where_the_cache_is_larger(select: Any) -> None:
    module = model_of("grouped", head_dim=128, num_key_value_heads=8, num_hidden_layers=8, max_position_embeddings=4096)
    engine = native(module)
    policy = {"recent": 32, "offload": "disk"} | ({} if select is None else {"select": select})
    assert engine.hold(Policy.parse(policy)) is None
    tokens = 2000
    (text,) = texts(tokens + 20)
    pages = list(range(-(-len(text) // PAGE)))
    pool, retention = engine.new_pages(len(pages)), engine.retention(tokens)
    before, peaks = 0, []
    for start in [*range(0, tokens, 250), *range(tokens, tokens + 20)]:
        end = min(start + 250, tokens) if start < tokens else start + 1
        if start == tokens:
            gc.collect()
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pytest.skip("the peak of resident memory cannot be reset here")
        before = _memory("VmRSS")
        engine.read(pool, [Chunk(text[start:end], start, pages, retention=retention)])
        peaks.append(_memory("VmHWM") - before)
    layer = tokens * 8 * 256 * 4
    assert pool.file is not None
    assert 8 * layer < sum(each.nbytes for each in pool.file.records)
    # While decoding a layer's pages, and the next one's, are in memory; of a selection those that were chosen, and what lies beside them.
    assert max(peaks[-19:]) < (2.3 if select is None else 1.3) * layer
    assert engine.page_bytes < 0.35 * 8 * layer / tokens * PAGE


# ---------------------------------------------------------------- what cannot be
def test_a_full_disk_is_a_sentence(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = native_model(module, {"recent": 32, "offload": {"to": "disk", "directory": str(tmp_path)}})
    (prompt,) = texts(300)

    def full(handle: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(CompressError, match=rf"offload: {tmp_path} cannot hold .*No space left") as caught:
            model.generate(prompt, max_new_tokens=2)
    assert caught.value.exit_code == 1
    assert model.generate(prompt, max_new_tokens=20) == native_model(module, {}).generate(prompt, max_new_tokens=20)


def test_a_directory_that_is_not_there_is_said(module: Any, tmp_path: Path) -> None:
    policy = Policy.parse({"recent": 32, "offload": {"to": "disk", "directory": str(tmp_path / "nothing")}})
    with pytest.raises(ConfigError, match=r"offload: .*nothing"):
        native(module).hold(policy)


def test_the_host_is_for_gpus() -> None:
    assert "offload pages to the host" in (why_modules_store(Policy.parse({"recent": 32, "offload": "host"})) or "")
