"""Texts of a run: whether the model reads them, and whether what is evaluated was calibrated on."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.core import resources
from compress.evaluate.texts import doubt, overlap, unigram_loss
from compress.model.context import Context
from compress.recipe import load
from compress.run.session import Session


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Pieces of bundled source, most of them much shorter than a row."""
    text = resources.bundled_text("calibration").read_text(encoding="utf-8")[:30_000]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"text": part}) for part in text.split("\n\n") if part.strip()))
    return file


def opened(model: str, calibration: dict[str, Any], evaluate: dict[str, Any] | None = None) -> Context:
    path = resources.recipes_directory() / "checkpoints" / model
    stages = [{"quantize": {"method": "gptq", "scheme": "W4A16", "group_size": 128}}]
    recipe = {"name": "t", "model": str(path), "calibration": calibration, "stages": stages}
    return Session.open(load(recipe | ({} if evaluate is None else {"evaluate": evaluate})), "cpu").context


@pytest.mark.parametrize("packing", [True, False])
def test_padding_is_no_text_that_a_model_should_read(documents: Path, packing: bool) -> None:
    context = opened("stdlib-4m", {"data": str(documents), "packing": packing})
    assert context.calibration.batches[0][1].all() == packing
    assert doubt(context) == []


@pytest.mark.parametrize("packing", [True, False])
def test_a_model_of_another_text_is_doubted(documents: Path, packing: bool) -> None:
    words = documents.with_name("words.jsonl")
    words.write_text("\n".join(json.dumps({"text": f"{'zebra quilt ' * (5 + n % 7)}{n}"}) for n in range(600)))
    (sentence,) = doubt(opened("recall-1m", {"data": str(words), "packing": packing}))
    assert "cannot predict this text" in sentence
    assert "the file words.jsonl" in sentence


def test_text_that_was_calibrated_on_flatters(documents: Path) -> None:
    """By whatever path it is named, and among others; a set of its own, or what is held out, is not."""
    (documents.parent / "b.jsonl").write_bytes(documents.read_bytes())
    again = documents.parent / ".." / documents.parent.name / documents.name
    own, other = {"data": str(documents)}, {"data": str(documents.with_name("b.jsonl"))}
    (sentence,) = overlap(opened("stdlib-4m", own, {"data": str(again)}))
    assert "evaluate.data" in sentence
    assert "is the calibration text too" in sentence
    assert overlap(opened("stdlib-4m", {"data": [own, other]}, other))
    for evaluate in (other, {}, {"data": "bundled"}, None):
        assert overlap(opened("stdlib-4m", own, evaluate)) == []


def test_a_unigram_model_by_counting() -> None:
    text = torch.randint(0, 7, (200,), generator=torch.Generator().manual_seed(0))
    counts, total = Counter(text.tolist()), 0.0
    for token in text.tolist():
        total -= math.log((counts[token] - 1 + 0.5) / (len(text) - 1 + 0.5 * 11))
    assert unigram_loss(text, 11) == pytest.approx(total / len(text))


def test_a_unigram_model_does_not_know_a_text_by_heart() -> None:
    assert unigram_loss(torch.zeros(1000, dtype=torch.int64), 10) < 0.01
    even = torch.arange(10).repeat(100)
    assert unigram_loss(even, 10) == pytest.approx(math.log(10), rel=1e-2)
    assert unigram_loss(torch.arange(10), 10) >= math.log(10), "tokens that stand once are not foreseen"
