"""Trimmed vocabularies, and the directory that a draft is written to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import distill_runs as runs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from teachers import teacher_of

import runtime
from compress.core.files import sha256
from compress.distill.draft import vocab_trim
from compress.distill.draft.cut import cut
from compress.distill.draft.write import write_draft
from compress.distill.train.teacher import teacher_rows
from runtime.errors import RequestError

CONTENT = {"method": "cut", "target": "x", "facts": {}}


def test_expected_counts_are_sums_of_probabilities() -> None:
    model, rows = runs.target(), runs.rows(7)
    found = vocab_trim.expected_counts(teacher_of(model), rows)
    with torch.no_grad():
        expected = torch.softmax(model(input_ids=rows.ids).logits.double(), -1)[rows.trained].sum(0)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert float(found.sum()) == pytest.approx(float(rows.trained.sum()), rel=1e-5)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.data())
def test_the_most_frequent_tokens_are_kept(frequencies: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(frequencies)))
    always = data.draw(st.sets(st.integers(0, len(frequencies) - 1), max_size=size))
    kept = vocab_trim.choose(torch.tensor(frequencies), size, always)
    assert kept.dtype == torch.int32
    ranked = sorted(range(len(frequencies)), key=lambda token: (token not in always, -frequencies[token], token))
    assert kept.tolist() == sorted(ranked[:size])
    total = sum(frequencies)
    share = sum(frequencies[token] for token in kept.tolist()) / total if total else 0.0
    assert vocab_trim.coverage(torch.tensor(frequencies), kept) == pytest.approx(share)


@pytest.mark.parametrize(
    ("size", "always", "message"),
    [(2, (4,), "token 4 cannot be kept"), (2, (-1,), "token -1")],
)
def test_what_cannot_be_kept_is_refused(size: int, always: tuple[int, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        vocab_trim.choose(torch.tensor([1, 2, 3, 4]), size, always)


def test_counts_of_the_targets_own_texts_cover_more() -> None:
    """What the paper finds: a target's own texts say better than others what it will emit."""
    model = runs.target()
    teacher = teacher_of(model)
    prompts = runs.rows(40, 4, seed=1).ids
    counted = (
        teacher_rows(teacher, prompts, 12, seed=0),
        teacher_rows(teacher, prompts, 12, seed=1),
        runs.rows(40, 16, seed=2),
    )
    own, fresh, other = (rows.ids.roll(-1, 1)[rows.trained].bincount(minlength=61) for rows in counted)
    assert vocab_trim.coverage(fresh, vocab_trim.choose(own, 20)) > vocab_trim.coverage(
        fresh, vocab_trim.choose(other, 20)
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_draft_is_a_checkpoint_with_a_note(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    draft = cut(runs.target(tie_word_embeddings=tied), range(2))
    kept = torch.tensor([0, 5, 60])
    facts = {"acceptance": 0.5, "curve": [1, 2]}
    path = tmp_path / "draft"
    more = {"depths": [1, 2], "parallel": {"mask_token": 0, "tokens": 4}}
    write_draft(path, draft, {"method": "distillspec", "target": "f" * 64, "facts": facts, **more}, kept)
    content = json.loads((path / "draft.json").read_text())
    assert content["files"].keys() == {file.name for file in path.iterdir()} - {"draft.json"}
    for name, expected in content.pop("files").items():
        assert expected == {"bytes": (path / name).stat().st_size, "sha256": sha256(path / name)}
    assert content == {
        "schema_version": 1, "method": "distillspec", "target": "f" * 64, "vocabulary": 61, "layers": 2, "depths": [1, 2],
        "parallel": {"mask_token": 0, "tokens": 4}, "kept_tokens": "kept_tokens.safetensors", "facts": facts,
    }  # fmt: skip
    stored = load_file(path / "kept_tokens.safetensors")["kept_tokens"]
    assert stored.dtype == torch.int32
    assert stored.tolist() == [0, 5, 60]
    assert {parameter.dtype for parameter in draft.parameters()} == {torch.float32}
    ids = runs.rows(2).ids
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(parameter.bfloat16())
        expected = draft(input_ids=ids).logits
        assert AutoModelForCausalLM.from_pretrained(path).dtype == torch.bfloat16
        back = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        assert torch.equal(back(input_ids=ids).logits, expected)
    loaded = runtime.load(path, dtype="float32")
    torch.testing.assert_close(loaded.logits(ids), expected, atol=1e-4, rtol=1e-4)
    assert not any(file.suffix in (".bin", ".pt") for file in path.iterdir())


def test_a_plain_draft_says_no_more_than_it_is(tmp_path: Path) -> None:
    path = tmp_path / "draft"
    write_draft(path, cut(runs.target(), range(1)), CONTENT, dtype=torch.float32)
    content = json.loads((path / "draft.json").read_text())
    assert not {"kept_tokens", "depths", "parallel"} & content.keys()
    assert not (path / "kept_tokens.safetensors").exists()
    assert json.loads((path / "config.json").read_text())["dtype"] == "float32"


def test_only_drafts_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft: Any = cut(runs.target(), range(1))
    write_draft(tmp_path / "draft", draft, CONTENT | {"facts": {"run": 1}})
    (tmp_path / "draft" / "stale").write_text("of before")
    write_draft(tmp_path / "draft", draft, CONTENT | {"facts": {"run": 2}})
    assert json.loads((tmp_path / "draft" / "draft.json").read_text())["facts"] == {"run": 2}
    assert not (tmp_path / "draft" / "stale").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("text")
    with pytest.raises(RequestError, match="not empty"):
        write_draft(tmp_path / "mine", draft, CONTENT)
    with pytest.raises(RequestError, match="fingerprint"):
        write_draft(tmp_path / "new", draft, CONTENT | {"target": ""})

    def failing(*arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("compress.core.files.sync_directory", failing)
    with pytest.raises(KeyboardInterrupt):
        write_draft(tmp_path / "draft", draft, CONTENT | {"facts": {"run": 3}})
    assert json.loads((tmp_path / "draft" / "draft.json").read_text())["facts"] == {"run": 2}
    assert not (tmp_path / "new").exists()


def test_facts_must_be_json(tmp_path: Path) -> None:
    draft: Any = cut(runs.target(), range(1))
    with pytest.raises(TypeError):
        write_draft(tmp_path / "draft", draft, CONTENT | {"facts": {"tensor": torch.ones(1)}})
    assert not (tmp_path / "draft").exists()
