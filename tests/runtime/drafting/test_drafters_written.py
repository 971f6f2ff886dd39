"""What is said of a drafter that cannot be: at the place where it was written, and before a model is read where that can be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from llama_engines import engines
from tiny_models import llama, save

import runtime
from compress.evaluate.drafters import write_choice
from runtime.checkpoint.artifact import Artifact
from runtime.drafting.config.build import Target, check_written, choose_speculation
from runtime.drafting.config.registry import drafters
from runtime.drafting.drafters.lookup import Lookup
from runtime.drafting.speculation import Speculation
from runtime.errors import ArtifactError, RequestError
from runtime.kernels.cpu import library

needs_c = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")

WRONG: list[tuple[Any, str]] = [
    # Lists, and parts of them.
    (["lookup"], "drafter: expected a list of two drafters or more, got a list of 1"),
    ([], "drafter: expected a list of two drafters or more, got a list of 0"),
    ({"of": ["lookup"]}, "drafter.of: expected a list of two drafters or more, got a list of 1"),
    ({"of": 3}, "drafter.of: expected a list of two drafters or more, got 3"),
    (["lookup", {"method": "lookup", "longst": 2}], "drafter[1].longst: unknown key 'longst'; did you mean 'longest'?"),
    (["lookup", "sufix"], "drafter[1]: unknown drafter 'sufix'; did you mean 'suffix'? Allowed: lookup"),
    (["lookup", ["suffix", 7]], "drafter[1][1]: expected a name (lookup"),
    (["lookup", {"of": ["suffix", {"model": "/nowhere"}]}], "drafter[1].of[1].model: there is no directory '/nowhere'"),
    ({"of": ["lookup", {"method": "trie", "depth": 2}]}, "drafter.of[1].depth: it is said of the whole"),
    ({"of": ["lookup", "trie"], "method": "marged"}, "drafter.method: unknown way to compose drafters 'marged'; did you mean 'merged'?"),
    ({"of": ["lookup", "trie"], "leest": 1}, "drafter.leest: unknown key 'leest'; did you mean 'least'?"),
    ({"of": ["lookup", "trie"], "model": "x"}, "drafter.model: a composition has no model of its own"),
    # Amounts.
    ({"method": "lookup", "depth": 0}, "drafter.depth: expected an integer at least 1"),
    ({"method": "lookup", "nodes": "x", "lengths": "fixed"}, "drafter.nodes: expected an integer at least 1"),
    ({"method": "lookup", "lengths": {"fixed": {"depth": 0}}}, "drafter.lengths.fixed.depth: expected an integer"),
    ({"of": ["lookup", "trie"], "nodes": 0}, "drafter.nodes: expected an integer at least 1"),
    ({"method": "lookup", "depth": 2, "lengths": {"goodput": {"dept": 3}}}, "drafter.lengths.goodput.dept: unknown key 'dept'"),
    ({"method": "lookup", "acceptance": {"typical": {"epsilon": 2}}}, "drafter.acceptance.typical.epsilon: expected a number"),
    # Names and keys.
    ("", "drafter: unknown drafter ''. Allowed: lookup"),
    ("merged", "drafter: 'merged' is made of other drafters: {\"of\": [...], \"method\": \"merged\"}"),
    ("medusa", "drafter: 'medusa' drafts with a model: {\"model\": DIRECTORY, \"method\": \"medusa\"}"),
    ({}, "drafter: expected one of the keys method, model and of, got none"),
    ({"depth": 3}, "drafter: expected one of the keys method, model and of, got depth"),
    ({"method": 7}, "drafter.method: unknown drafter 7"),
    ({"method": "merged"}, "drafter.of: the key is missing"),
    ({"method": "medusa"}, "drafter.model: the key is missing"),
    ({"model": ".", "method": "chian"}, "drafter.method: unknown drafter with a model 'chian'; did you mean 'chain'?"),
    ({"model": True, "method": "chain", "width": 3}, "drafter.width: unknown key 'width'"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "said"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_what_cannot_be_is_said_where_it_was_written_before_a_model_is_read(
    tmp_path: Path, value: Any, said: str
) -> None:
    (tmp_path / "config.json").write_text("no model")
    with pytest.raises(RequestError) as caught:
        runtime.load(tmp_path, drafter=value)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
    with pytest.raises(RequestError) as caught:
        check_written(value, "--drafter")
    assert str(caught.value).startswith(f"--{said}")


def names_of(*sources: str) -> list[str]:
    return [method.name for method in drafters(*sources)]


def test_what_can_be_is_not_refused(tmp_path: Path) -> None:
    good: list[Any] = [
        None,
        False,
        True,
        "none",
        "OFF",
        "Adaptive_Ngram",
        tmp_path,
        str(tmp_path),
        Lookup(),
        Speculation(Lookup()),
    ]
    good += names_of("text", "target")
    good += [{"model": True, "method": name} for name in names_of("model", "heads")]
    good += [{"of": ["lookup", True, ["trie", Lookup()]], "method": name} for name in names_of("drafters")]
    good.append(
        {"method": "lookup", "longest": 4, "depth": 3, "lengths": {"fixed": {"nodes": 3}}, "acceptance": "typical"}
    )
    for value in good:
        check_written(value)


def test_the_settings_of_the_documentation_can_be() -> None:
    root = Path(__file__).parents[3]
    page = (root / "docs" / "guides" / "draft.md").read_text(encoding="utf-8")
    examples = [json.loads(text) for text in re.findall(r'`(\{"method": "(?:skip|early-exit)".*?\})`', page)]
    layers = json.loads((root / "recipes/checkpoints/stdlib-4m/config.json").read_text())["num_hidden_layers"]
    assert {example["method"] for example in examples} == set(names_of("target"))
    for example in examples:
        check_written(example)
        named = [*example.get("skip_attention", ()), *example.get("skip_mlp", ()), example.get("layer", 1)]
        assert all(0 <= layer < layers for layer in named)


# ---------------------------------------------------------------- what only a model shows
@pytest.fixture
def target(tmp_path: Path) -> Target:
    path = save(llama(), tmp_path / "target")
    save(llama(num_hidden_layers=1), path / "draft")
    return Target(Artifact(path), engines(llama())[1])


def bring(target: Target, **drafter: Any) -> None:
    target.artifact.manifest = {"draft": {"drafter": drafter}}


def refused(value: Any, target: Target) -> str:
    with pytest.raises(RequestError) as caught:
        choose_speculation(value, target)
    return str(caught.value)


@needs_c
@pytest.mark.parametrize("key", ["depth", "nodes"])
def test_amounts_that_do_not_fit_are_named_where_they_were_said(target: Target, key: str) -> None:
    many = {"depth": 128, "nodes": 600}[key]
    assert refused({"method": "lookup", key: many}, target).startswith(f"drafter.{key}: ")
    within = {"method": "lookup", "lengths": {"fixed": {key: many}}}
    assert refused(within, target).startswith(f"drafter.lengths.fixed.{key}: ")


@needs_c
def test_what_a_directory_says_is_not_laid_upon_the_caller(target: Target) -> None:
    own = f"{target.artifact.path / 'compress.json'}: draft"
    bring(target, model="draft", depth=128)
    assert refused(["lookup", True], target).startswith(f"{own}.depth: 128 drafted tokens")
    assert refused({"of": ["lookup", True], "depth": 200}, target).startswith("drafter.depth: 200 drafted tokens")
    bring(target, model="gone")
    assert refused(["lookup", True], target).startswith(f"drafter[1]: {own}.model: there is no directory")
    assert refused(True, target).startswith(f"{own}.model: there is no directory")
    file = write_choice(target.artifact.path, {"of": ["lookup", True]}, target.artifact, target.engine.device)
    assert refused(None, target).startswith(f"{file}: drafter.of[1]: {own}.model: there is no directory")


@needs_c
def test_what_a_draft_says_of_itself_is_no_key_of_the_callers(target: Target) -> None:
    draft = target.artifact.path / "draft"
    note = {"schema_version": 1, "method": "distillspec"}
    (draft / "draft.json").write_text(json.dumps({**note, "depths": [9]}))
    text = f"{draft} was not trained at several depths; use chain"
    assert refused(str(draft), target) == refused({"model": str(draft)}, target) == f"drafter: {text}"
    assert refused({"model": str(draft), "method": "nested"}, target) == f"drafter.method: {text}"
    (draft / "draft.json").write_text(json.dumps({**note, "parallel": {"mask_token": -1, "tokens": 4}}))
    with pytest.raises(ArtifactError, match=rf"^{draft / 'draft.json'}: parallel.mask_token: expected an integer"):
        choose_speculation(str(draft), target)


@needs_c
def test_the_draft_of_another_target_is_refused_with_short_fingerprints(target: Target) -> None:
    draft, own = target.artifact.path / "draft", target.artifact.checkpoint.fingerprint()
    (draft / "draft.json").write_text(json.dumps({"schema_version": 1, "method": "distillspec", "target": "ab" * 32}))
    assert refused(str(draft), target) == (
        f"drafter: {draft} is a draft of another target: it was made for fingerprint abababababab, and that of {target.artifact.path} "
        f"is {own[:12]}; `compress draft` makes one for it"
    )


# ---------------------------------------------------------------- names
def test_drafters_are_called_as_they_are_written() -> None:
    assert [method.load().name for method in drafters()] == [method.name for method in drafters()]
    assert len(names_of()) == len(set(names_of()))


@needs_c
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("copyspec", "copyspec, "),
        ("adaptive-ngram", "adaptive-ngram, "),
        ({"model": "DRAFT"}, "chain, "),
        (["lookup", {"model": "DRAFT", "method": "dynamic-tree"}], "first(lookup, dynamic-tree), "),
        ({"of": ["trie", "copyspec"], "method": "merged"}, "merged(trie, copyspec), "),
    ],
)
def test_statistics_name_drafters_as_they_are_written(target: Target, value: Any, said: str) -> None:
    written = json.loads(json.dumps(value).replace("DRAFT", str(target.artifact.path / "draft")))
    found = choose_speculation(written, target)
    assert found is not None
    assert found.describe().startswith(said)
