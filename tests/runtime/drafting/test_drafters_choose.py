"""What `drafter=` takes, and what is refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llama_engines import engines
from safetensors.torch import save_file
from tiny_models import llama, save

import runtime
from runtime.api.model import Model
from runtime.checkpoint.artifact import Artifact
from runtime.drafting.config.build import Target, choose_speculation
from runtime.drafting.config.registry import drafters
from runtime.drafting.drafters.base import Ask, Drafter
from runtime.drafting.drafters.composition import Fallback, Merged
from runtime.drafting.drafters.lookup import Lookup
from runtime.drafting.drafters.model import ModelDrafter, Parallel
from runtime.drafting.drafters.model_tree import DynamicTree
from runtime.drafting.lengths.fixed import Fixed
from runtime.drafting.lengths.goodput import Goodput
from runtime.drafting.verify.typical import Typical
from runtime.errors import RequestError
from runtime.kernels.cpu import library
from runtime.sampling.tree import Tree

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> Target:
    model = llama()
    path = save(model, tmp_path_factory.mktemp("target"))
    return Target(Artifact(path), engines(model)[1])


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return save(llama(num_hidden_layers=1), tmp_path / "draft")


def note(path: Path, **facts: Any) -> None:
    (path / "draft.json").write_text(json.dumps({"schema_version": 1, "method": "distillspec", **facts}))


@pytest.mark.parametrize("name", [method.name for method in drafters("text")])
def test_names_of_drafters_without_a_model(target: Target, name: str) -> None:
    found = choose_speculation(name, target)
    assert found is not None
    assert isinstance(found.lengths, Goodput)
    assert not found.drafter.watched
    model = Model(target.engine, None, SimpleNamespace(path=target.artifact.path), frozenset(), found)  # type: ignore[arg-type]
    plain = Model(target.engine, None, SimpleNamespace(path=target.artifact.path), frozenset())  # type: ignore[arg-type]
    texts = [[5, 6, 7, 8] * 5, [9, 10, 11]]
    assert model.generate(texts, max_new_tokens=40) == plain.generate(texts, max_new_tokens=40)
    assert name.split("-")[0] in str(model.stats["drafter"]).replace("_", "-") or name == "copyspec"


def test_settings(target: Target) -> None:
    found = choose_speculation(
        {
            "method": "lookup",
            "longest": 5,
            "lengths": "fixed",
            "depth": 3,
            "nodes": 4,
            "acceptance": {"typical": {"epsilon": 0.2}},
        },
        target,
    )
    assert found is not None
    assert isinstance(found.drafter, Lookup)
    assert found.drafter.longest == 5
    assert found.lengths == Fixed(depth=3, nodes=4)
    assert found.rule == Typical(epsilon=0.2)
    assert "typical (lossy)" in found.describe()
    assert choose_speculation(None, target) is None
    assert choose_speculation(False, target) is None
    assert choose_speculation("none", target) is None


def test_lists_and_compositions(target: Target, draft: Path) -> None:
    first = choose_speculation(["lookup", str(draft)], target)
    assert first is not None
    assert isinstance(first.drafter, Fallback)
    assert isinstance(first.drafter.drafters[1], ModelDrafter)
    merged = choose_speculation({"method": "merged", "of": ["lookup", "suffix"], "depth": 4}, target)
    assert merged is not None
    assert isinstance(merged.drafter, Merged)
    assert merged.lengths == Goodput(depth=4)


def test_models(target: Target, draft: Path) -> None:
    for value, kind in (
        (str(draft), ModelDrafter),
        (draft, ModelDrafter),
        ({"model": str(draft), "method": "dynamic-tree", "width": 3}, DynamicTree),
    ):
        found = choose_speculation(value, target)
        assert found is not None
        assert type(found.drafter) is kind
    note(draft, target=target.artifact.checkpoint.fingerprint(), parallel={"mask_token": 399, "tokens": 5})
    found = choose_speculation(draft, target)
    assert found is not None
    assert isinstance(found.drafter, Parallel)
    assert (found.drafter.mask_token, found.drafter.most) == (399, 5)


def test_a_trimmed_draft_proposes_only_what_it_keeps(target: Target, draft: Path) -> None:
    kept = torch.arange(100, 200, dtype=torch.int32)
    save_file({"kept_tokens": kept}, draft / "kept.safetensors")
    note(draft, target=target.artifact.checkpoint.fingerprint(), kept_tokens="kept.safetensors")
    found = choose_speculation(draft, target)
    assert found is not None
    text = SimpleNamespace(tokens=[5, 6, 7], prompt=3)
    tree = found.drafter.draft([Ask(found.drafter.begin(text), text, 8, 8)])[0]
    assert len(tree) == 8
    assert all(100 <= token < 200 for token in tree.tokens)
    whole = llama(num_hidden_layers=1)
    logits = whole(torch.tensor([[5, 6, 7]])).logits[0, -1, 100:200]
    assert tree.tokens[0] == 100 + int(logits.argmax())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("chain", r"drafter: 'chain' drafts with a model: \{\"model\": DIRECTORY, \"method\": \"chain\"\}, with true for"),
        ("lokup", r"drafter: unknown drafter 'lokup'; did you mean 'lookup'\? Allowed: lookup, .*; or the directory of a draft model"),
        ({"method": "lookup", "longst": 3}, "drafter.longst: unknown key 'longst'; did you mean 'longest'"),
        ({"method": "lookup", "longest": 0}, "drafter.longest: expected an integer between 1 and 64"),
        ({"method": "chain"}, "drafter.model: the key is missing: 'chain' drafts with a model"),
        ({"model": "/nowhere/at/all"}, "drafter.model: there is no directory '/nowhere/at/all'"),
        ({"method": "lookup", "acceptance": "typcal"}, "unknown acceptance 'typcal'; did you mean 'typical'"),
        ({"method": "lookup", "lengths": "longest"}, "unknown lengths 'longest'"),
        ({"method": "lookup", "depth": 128}, "drafter.depth: 128 drafted tokens do not fit the model's context of 128"),
        ({"method": "lookup", "nodes": 600}, "drafter.nodes: a tree of 600 tokens is larger than a step of this engine"),
        ({"of": ["lookup"]}, "drafter.of: expected a list of two drafters or more"),
        (17, "drafter: expected a name"),
        (True, "brings no draft"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_sentence(target: Target, value: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        choose_speculation(value, target)


def test_a_tree_larger_than_memory_is_refused(target: Target, monkeypatch: Any) -> None:
    monkeypatch.setattr("runtime.system.memory.available_bytes", lambda device: 100_000)
    with pytest.raises(RequestError, match=r"drafter.nodes: .*400 .* GB.* free"):
        choose_speculation({"method": "lookup", "nodes": 400}, target)


def other_target(path: Path) -> None:
    note(path, target="0" * 64)


def other_size(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "tokenizer.json").unlink()
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": 512}))


def other_tokens(path: Path) -> None:
    content = json.loads((path / "tokenizer.json").read_text())
    words = {place: word for word, place in content["model"]["vocab"].items()}
    content["model"]["vocab"][words[100]], content["model"]["vocab"][words[101]] = 101, 100
    (path / "tokenizer.json").write_text(json.dumps(content))


def missing_kept(path: Path) -> None:
    note(path, kept_tokens="../../kept.safetensors")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_target, "is a draft of another target: it was made for fingerprint 0000"),
        (other_size, "has 512 tokens and .* has 400: a draft must have its target's vocabulary"),
        (other_tokens, "has another vocabulary"),
        (missing_kept, "kept_tokens must name a file beside it"),
    ],
)
def test_drafts_that_do_not_fit_are_refused(
    target: Target, draft: Path, change: Callable[[Path], None], said: str
) -> None:
    change(draft)
    with pytest.raises(RequestError, match=said):
        choose_speculation(str(draft), target)


class Mine(Drafter):
    """A user's own drafter."""

    name = "mine"

    def draft(self, asks: Any) -> list[Tree]:
        return [Tree.chain([7, 8]) for _ in asks]


def test_a_drafter_of_ones_own(target: Target) -> None:
    found = choose_speculation(Mine(), target)
    assert found is not None
    assert found.drafter.watched
    wide = Mine()
    wide.vocabulary = 500
    with pytest.raises(RequestError, match=r"mine .*500 .*400"):
        choose_speculation(wide, target)


def test_encoders_and_exports_have_no_drafts(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    model = BertModel(
        BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=60)
    )
    path = save(model, tmp_path / "bert", with_tokenizer=False)
    with pytest.raises(RequestError, match=r"drafter: .*encoder"):
        runtime.load(path, drafter="lookup")
