"""Drafters that do not fit: what nobody asked for is left out or made plainer, what was asked for is refused with the reason."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafter_cases import Words
from llama_engines import engines
from safetensors.torch import save_file
from tiny_models import gpt2, llama, save

from runtime.api.model import Model
from runtime.checkpoint.artifact import Artifact
from runtime.drafting.config.build import Target, choose_speculation
from runtime.drafting.draft_cache import ModuleDraftCache
from runtime.drafting.drafters.base import Ask
from runtime.drafting.drafters.cascade import Cascade
from runtime.drafting.drafters.composition import Limited
from runtime.drafting.drafters.confident import Confident
from runtime.drafting.drafters.hierarchy import Hierarchy
from runtime.drafting.drafters.model import Candidates, ModelDrafter
from runtime.drafting.lengths.fixed import Fixed
from runtime.drafting.lengths.goodput import Goodput
from runtime.drafting.speculation import Speculation
from runtime.drafting.verify.typical import Typical
from runtime.engines.torch.engine import TorchEngine
from runtime.errors import RequestError
from runtime.kernels.cpu import library

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")
CPU = torch.device("cpu")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A target with a draft in its directory."""
    save(llama(), tmp_path / "target")
    save(llama(num_hidden_layers=2), tmp_path / "target" / "draft")
    return tmp_path / "target"


def target_of(path: Path, lean: bool = True, **drafter: Any) -> Target:
    """The target of a directory that brings this drafter."""
    artifact = Artifact(path)
    artifact.manifest = {"draft": {"drafter": drafter}} if drafter else None
    return Target(artifact, engines(llama())[int(lean)])


def note(path: Path, **facts: Any) -> None:
    (path / "draft.json").write_text(json.dumps({"schema_version": 1, "method": "distillspec", **facts}))


def head(path: Path, hidden: int = 64) -> None:
    """Let a draft foresee what is accepted."""
    tensors = {"mix": torch.zeros(hidden, hidden), "mix_bias": torch.zeros(hidden)}
    save_file(
        tensors | {"out": torch.zeros(2, hidden + 2), "out_bias": torch.zeros(2)}, path / "accept_head.safetensors"
    )
    note(path, accept_head={})


def model(target: Target, speculation: Speculation | None) -> Model:
    return Model(target.engine, None, target.artifact, frozenset(), speculation)


# ---------------------------------------------------------------- what an artifact brings
@pytest.mark.parametrize(
    "drafter",
    [{"method": "skip", "skip_mlp": [1]}, {"method": "early-exit"}, {"of": ["lookup", {"method": "early-exit"}]}],
)
def test_a_brought_drafter_that_does_not_fit_the_engine_is_left_out(path: Path, caplog: Any, drafter: Any) -> None:
    target = target_of(path, lean=False, **drafter)
    with caplog.at_level(logging.WARNING, "compress.speculation"):
        assert choose_speculation(None, target) is None
    assert "compress.json: draft is not used: " in caplog.text
    assert "decoder in C" in caplog.text
    for value in (True, drafter):
        with pytest.raises(RequestError, match="decoder in C"):
            choose_speculation(value, target)
    assert choose_speculation(None, target_of(path, **drafter)) is not None


@pytest.mark.parametrize("kind", ["nested", "confident", "dynamic-tree"])
def test_a_brought_draft_is_a_chain_where_its_method_does_not_fit(
    path: Path, monkeypatch: Any, caplog: Any, kind: str
) -> None:
    drafter = {"model": "draft", "nodes": 5, "depth": 4}
    if kind == "nested":
        note(path / "draft", depths=[1, 2], layers=2)
    elif kind == "confident":
        head(path / "draft")
    else:
        drafter |= {"method": kind, "width": 3}
    target = target_of(path, **drafter)
    for value in (None, True):
        found = choose_speculation(value, target)
        assert found is not None
        assert type(found.drafter) is not ModelDrafter
        assert isinstance(found.drafter, {"nested": Cascade, "confident": Confident}.get(kind, ModelDrafter))
    monkeypatch.setattr("runtime.engines.choose.fused_engine", lambda engine: engine)  # as without a C compiler
    found = choose_speculation(None, target)
    assert found is not None
    assert type(found.drafter) is ModelDrafter
    assert found.lengths == Goodput(depth=4, nodes=5)
    assert "is used as a chain: " in caplog.text
    with pytest.raises(RequestError):
        choose_speculation(True, target)
    target.artifact.manifest = {"draft": {"drafter": {**drafter, "model": "nowhere"}}}
    with pytest.raises(RequestError, match="directory"):
        choose_speculation(None, target)
    note(path / "draft", target="0" * 64)
    target.artifact.manifest = {"draft": {"drafter": drafter}}
    with pytest.raises(RequestError, match="another target"):
        choose_speculation(None, target)


# ---------------------------------------------------------------- compositions
@pytest.mark.parametrize("key", ["nodes", "depth", "lengths", "acceptance"])
def test_a_part_of_a_composition_has_no_amounts_of_its_own(path: Path, key: str) -> None:
    part = {"method": "lookup", key: {"depth": 3, "nodes": 3, "lengths": "fixed", "acceptance": "typical"}[key]}
    with pytest.raises(
        RequestError, match=rf"drafter\[0\].{key}: it is said of the whole, not of a part: {{'of': \[...\], '{key}'"
    ):
        choose_speculation([part, "suffix"], target_of(path))
    with pytest.raises(RequestError, match=rf"drafter.of\[1\].{key}: it is said of the whole"):
        choose_speculation({"of": ["suffix", part]}, target_of(path))
    with pytest.raises(RequestError, match=r"drafter.of\[1\].of\[0\].longst: unknown key 'longst'"):
        choose_speculation({"of": ["suffix", {"of": [{"method": "lookup", "longst": 3}, "trie"]}]}, target_of(path))


def test_a_composition_with_the_artifacts_own_draft_says_what_that_says(path: Path) -> None:
    target = target_of(path, model="draft", lengths="fixed", depth=3, nodes=3, acceptance={"typical": {"epsilon": 0.2}})
    for value in (["lookup", True], {"of": ["lookup", ["suffix", True]]}):
        found = choose_speculation(value, target)
        assert found is not None
        assert found.lengths == Fixed(depth=3, nodes=3)
        assert found.rule == Typical(epsilon=0.2)
    found = choose_speculation({"of": ["lookup", True], "depth": 5, "acceptance": "exact"}, target)
    assert found is not None
    assert found.lengths == Goodput(depth=5)
    assert "exact" in found.describe()
    plain = choose_speculation(["lookup", "suffix"], target)
    assert plain is not None
    assert plain.lengths == Goodput()


# ---------------------------------------------------------------- settings that nothing reads
@pytest.mark.parametrize("method", ["dynamic-tree", "large-tree", "confident"])
def test_settings_that_a_method_does_not_read_are_refused(path: Path, method: str) -> None:
    value = {"model": str(path / "draft"), "method": method, "confidence": 0.5}
    with pytest.raises(RequestError, match=r"drafter\.confidence: unknown key 'confidence'"):
        choose_speculation(value, target_of(path))
    found = choose_speculation({**value, "method": "chain"}, target_of(path))
    assert found is not None


def test_a_tree_larger_than_a_pass_of_transformers_is_refused(path: Path) -> None:
    target = target_of(path, lean=False)
    with pytest.raises(RequestError, match=r"5000 .*512"):
        choose_speculation({"method": "lookup", "nodes": 5000}, target)
    found = choose_speculation({"method": "lookup", "nodes": 500}, target)
    assert found is not None


def test_what_is_said_twice_is_refused(path: Path) -> None:
    value = {"method": "lookup", "depth": 8, "lengths": {"goodput": {"depth": 4}}}
    with pytest.raises(RequestError, match=r"drafter.depth: .*lengths.goodput.depth"):
        choose_speculation(value, target_of(path))
    with pytest.raises(RequestError, match="expected a mapping of settings"):
        choose_speculation({"method": "lookup", "lengths": {"fixed": 5}}, target_of(path))


# ---------------------------------------------------------------- memory
def test_a_tree_larger_than_memory_is_refused_however_it_is_asked_for(path: Path, monkeypatch: Any) -> None:
    target = target_of(path)
    target.engine.cache_budget = 100_000
    for value in ({"method": "lookup", "nodes": 400}, Speculation(Hierarchy(), lengths=Fixed(nodes=400))):
        with pytest.raises(
            RequestError,
            match=r"drafter(.lengths)?.nodes: .*400 .*max_memory .*0.0001 GB",
        ):
            choose_speculation(value, target)
    monkeypatch.setattr("runtime.system.memory.available_bytes", lambda device: 10_000)
    for value in ("lookup", ["lookup", "suffix"], Hierarchy(), Speculation(Hierarchy())):
        with pytest.raises(
            RequestError,
            match=r"drafter(.lengths.nodes)?: .*16 .*1e-05 GB .*nodes",
        ):
            choose_speculation(value, target)


def test_a_tree_larger_than_the_cache_of_a_call_is_refused(path: Path) -> None:
    target = target_of(path)
    drafting = model(target, choose_speculation({"method": "lookup", "nodes": 100}, target))
    page = target.engine.page_bytes
    with pytest.raises(
        RequestError,
        match=r"drafter: .*100 .*cache_memory .*nodes",
    ):
        drafting.generate([5, 6, 7], max_new_tokens=4, cache_memory=page)
    assert drafting.generate([5, 6, 7], max_new_tokens=4, cache_memory=2 * page)
    assert model(target, None).generate([5, 6, 7], max_new_tokens=4, cache_memory=page)


# ---------------------------------------------------------------- token ids
def test_ids_beyond_the_vocabulary_are_refused_wherever_they_come_from(path: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "corpus.npy", np.array([5, 6, 5000]))
    named = {"method": "hierarchy", "statistics": str(tmp_path / "corpus.npy")}
    own = Hierarchy(statistics=[5, 5000])
    for value in (named, ["lookup", named], own, [own, "lookup"], Speculation(own)):
        with pytest.raises(RequestError, match=r"drafter(\[[01]\])?: hierarchy .*5001 .*400"):
            choose_speculation(value, target_of(path))


# ---------------------------------------------------------------- drafts with limits
@pytest.mark.parametrize("lean", [True, False])
def test_a_text_beyond_the_drafts_context_is_not_drafted_for(path: Path, monkeypatch: Any, lean: bool) -> None:
    """And the drafter is not switched off by it."""
    short = gpt2(n_positions=20)  # has no more positions than these
    draft = save(llama(max_position_embeddings=20) if lean else short, path / "short")
    target = target_of(path)
    found = choose_speculation({"model": str(draft), "lengths": "fixed", "depth": 4, "nodes": 4}, target)
    assert found is not None
    assert isinstance(found.drafter, Limited)
    drafting, plain = model(target, found), model(target, None)
    texts = [[5, 6, 7], [9] * 15, [4, 5, 6, 7] * 8]
    fed: list[int] = []
    real = found.drafter.drafter.cache.feed

    def feed(slots: Any, tokens: Any) -> Any:
        fed.extend(len(slot.tokens) + len(new) for slot, new in zip(slots, tokens, strict=True))
        return real(slots, tokens)

    monkeypatch.setattr(found.drafter.drafter.cache, "feed", feed)
    assert drafting.generate(texts, max_new_tokens=40) == plain.generate(texts, max_new_tokens=40)
    assert found.off is None
    assert drafting.stats["drafted_tokens"] > 0
    assert max(fed) == 20
    assert found.describe().startswith("chain, ")
    assert drafting.generate(texts[2], max_new_tokens=10) == plain.generate(texts[2], max_new_tokens=10)
    assert drafting.stats["drafted_tokens"] == 0


def test_a_draft_as_long_as_its_target_has_no_limit(path: Path) -> None:
    found = choose_speculation(path / "draft", target_of(path))
    assert found is not None
    assert type(found.drafter) is ModelDrafter


def test_drafts_whose_cache_takes_no_tokens_back_are_refused(tmp_path: Path, path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 400, "max_position_embeddings": 128,
    }  # fmt: skip
    windowed = Gemma2ForCausalLM(Gemma2Config(**sizes, sliding_window=8))
    recurrent = Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **sizes, num_experts=2, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts_per_tok=1,
            linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention"],
        )
    )  # fmt: skip
    place = save(recurrent, tmp_path / "recurrent")
    with pytest.raises(
        RequestError, match=r"drafter: .*recurrent cannot draft on .*: it has layers of linear_attention"
    ):
        choose_speculation(str(place), target_of(path))
    # The decoder in C has no rings: what leaves a window is still there.
    assert choose_speculation(str(save(windowed, tmp_path / "windowed")), target_of(path)) is not None


def test_texts_that_do_not_fit_a_drafts_memory_wait_for_room() -> None:
    """What a text had is given back when it ends or outgrows the rest."""
    inner = ModelDrafter(cache=ModuleDraftCache(TorchEngine(llama(), CPU)), candidates=Candidates(400))
    limited = Limited(inner, None, positions=40)
    texts = [Words(list(range(4, 24)), 20), Words(list(range(4, 19)), 15)]
    states = [limited.begin(text) for text in texts]

    def lengths() -> list[int]:
        trees = limited.draft([Ask(state, text, 4, 4) for state, text in zip(states, texts, strict=True)])
        return [len(tree) for tree in trees]

    assert lengths() == [4, 0]  # 24 positions and 19
    one = inner.memory_bytes
    texts[0].tokens += [5] * 17
    assert lengths() == [0, 4]
    assert 0 < inner.memory_bytes < one
    assert [state.positions for state in states] == [0, 19]
    limited.end(states[0])
    texts[0] = Words([4], 1)
    states[0] = limited.begin(texts[0])
    assert lengths() == [4, 4]
    for state in states:
        limited.end(state)
    assert inner.memory_bytes == 0
