"""Held-out part of a user's text: what is evaluated is in no row of calibration or training, whatever else changes."""

from __future__ import annotations

import itertools
import json
import sys
import types

import pytest
import torch
from test_calibration import TOKENIZER, WORDS, make_tokenizer, recipe, words

from compress import data
from compress.data.held_out import choose, held_out, rest
from compress.recipe import load
from runtime.errors import RequestError


def sides(found, tokenizer=TOKENIZER, vocabulary=503):
    """Ids that are calibrated and evaluated on."""
    text = data.load(found.calibration, tokenizer, vocabulary)
    apart = data.load_evaluation(found.evaluate, tokenizer, vocabulary, found.calibration)
    ids = {int(i) for rows, mask in text.batches for i in rows[mask] if i >= WORDS}
    return ids, {int(i) for i in apart.ids.flatten() if i >= WORDS}, text, apart


def documents(path, count, length=10):
    """A file of documents with words of their own."""
    texts = [words(length * n, length) for n in range(count)]
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    else:
        path.write_text(("\n\n" if path.stem == "paragraphs" else "<|endoftext|>").join(texts))
    return path


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", ["a.txt", "paragraphs.txt", "a.jsonl", "a.parquet"])
def test_evaluated_text_is_in_no_calibration_row(tmp_path, name, packing):
    path = documents(tmp_path / name, 50)
    found = recipe(path, {"sequence_length": 8}, samples=1000, packing=packing)
    ours, theirs, text, apart = sides(found)
    assert not ours & theirs
    assert len(ours) > 300, "three quarters are calibrated on, of which padding cuts some"
    assert 80 < len(theirs) < 140
    assert max(theirs) - min(theirs) > 300, "it is spread through the text"
    assert (text.kind, apart.kind, apart.rows, apart.tokens) == ("named", "held out", len(apart.ids), apart.ids.numel())
    assert apart.description == f"the held-out part of the file {name}, {apart.rows} rows of 8 tokens"


def test_a_long_document_is_cut_into_pieces(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text(words(0, 480))
    ours, theirs, _, apart = sides(recipe(path, {"sequence_length": 8}, samples=1000))
    assert not ours & theirs
    assert len(ours) + len(theirs) > 460
    starts = sorted(apart.ids[:, 0].tolist())
    assert starts[-1] - starts[0] > 300


def test_seeds_and_samples_are_judged_on_the_same_text(tmp_path):
    path = documents(tmp_path / "a.jsonl", 50)
    rows = [sides(recipe(path, {"sequence_length": 8}, seed=seed, samples=n))[3] for seed, n in ((0, 4), (1, 9))]
    assert rows[0].sha256 == rows[1].sha256
    few = sides(recipe(path, {"sequence_length": 8, "samples": 3}))[3]
    assert torch.equal(few.ids, rows[0].ids[:3])
    assert few.ids.max() - few.ids[few.ids >= WORDS].min() > 200, "the first rows are spread, too"


def test_two_tokenizers_see_the_same_held_out_text(tmp_path):
    path = documents(tmp_path / "a.jsonl", 50)
    plain, marked = (
        sides(recipe(path, {"sequence_length": 8}), one)[1] for one in (TOKENIZER, make_tokenizer(bos=True))
    )
    assert len(plain ^ marked) < 8, "but for what does not fill the last row"


def test_training_rows_leave_it_alone(tmp_path):
    path = documents(tmp_path / "a.jsonl", 50)
    found = load({
        "name": "t", "model": "m", "calibration": {"data": str(path)}, "evaluate": {"sequence_length": 8},
        "stages": [
            {"prune": {"method": "magnitude", "sparsity": 0.5}},
            {"recover": {"method": "finetune", "samples": 1000, "sequence_length": 16}},
        ],
    })  # fmt: skip
    trained, _ = data.load_training(found, found.stages[1], TOKENIZER, 503)
    apart = data.load_evaluation(found.evaluate, TOKENIZER, 503, found.calibration).ids
    ids = torch.cat([rows for rows, _ in trained.batches])
    assert not set(ids[ids >= WORDS].tolist()) & set(apart[apart >= WORDS].tolist())
    # Stages that are looked at without the evaluation keep to it, too.
    assert found.model_copy(update={"evaluate": None}).calibration.shared


def test_texts_that_are_there_twice_are_not_on_both_sides(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(words(10 * (n % 25), 10)) for n in range(100)))
    ours, theirs, _, _ = sides(recipe(path, {"sequence_length": 8}, samples=1000))
    assert ours
    assert theirs
    assert not ours & theirs


@pytest.mark.parametrize(
    ("calibration", "evaluate", "kinds"),
    [
        ("bundled", {}, ("bundled", "bundled")),
        ("mine", {}, ("named", "held out")),
        ("mine", {"data": "bundled"}, ("named", "bundled")),
        ("mine", {"data": "mine"}, ("named", "named")),
        ("bundled", {"data": "mine"}, ("bundled", "named")),
    ],
)
def test_kinds(tmp_path, calibration, evaluate, kinds):
    path = documents(tmp_path / "mine.txt", 50)
    section = {name: str(path) if value == "mine" else value for name, value in evaluate.items()}
    found = recipe(path if calibration == "mine" else calibration, {"sequence_length": 8, "samples": 4, **section})
    _, _, text, apart = sides(found)
    assert (text.kind, apart.kind) == kinds
    whole = recipe(path if calibration == "mine" else calibration)
    same = data.load(whole.calibration, TOKENIZER, 503).sha256 == text.sha256
    assert same == (kinds[1] != "held out"), "text is left out only where it is evaluated on"


@pytest.mark.parametrize("content", ["w1 w2 w3", words(0, 12), "w1\n" * 9])
def test_too_little_text_for_both(tmp_path, content):
    path = tmp_path / "short.txt"
    path.write_text(content)
    found = recipe(path, {"sequence_length": 8})
    with pytest.raises(
        RequestError, match=r"calibration\.data: the .*short\.txt.* name another text in evaluate\.data"
    ) as caught:
        sides(found)
    assert "\n" not in str(caught.value)
    only = recipe(path, {"sequence_length": 8, "data": str(path)}, sequence_length=2)
    assert data.load(only.calibration, TOKENIZER, 503).rows


def test_nothing_but_one_text(tmp_path):
    path = tmp_path / "same.jsonl"
    path.write_text("\n".join([json.dumps(words(0, 20))] * 50))
    with pytest.raises(
        RequestError, match=r"calibration\.data: the file same\.jsonl without its held-out part holds no text"
    ):
        sides(recipe(path, {"sequence_length": 8}))


def test_an_endless_stream(monkeypatch):
    monkeypatch.setattr("compress.data.rows.ENOUGH_TOKENS", 100)
    monkeypatch.setattr("compress.data.held_out.READ", 2000)
    seen = []

    class Endless:
        def __iter__(self):
            for number in itertools.count():
                seen.append(number)
                yield {"text": words(10 * (number % 45), 10)}

    loaded = types.SimpleNamespace(load_dataset=lambda *a, **k: Endless())
    monkeypatch.setitem(sys.modules, "datasets", loaded)
    ours, theirs, _, apart = sides(recipe("org/set", {"sequence_length": 8}))
    assert not ours & theirs
    assert apart.description.startswith("the held-out part of the data set org/set, ")
    assert len(seen) < 150


def test_parts():
    assert choose([], 0.25) == []
    assert choose([1], 0.25) == [False]
    assert choose([1, 1], 0.25) == [False, True]
    assert sum(choose([1] * 800, 1 / 8)) == 100
    assert sum(n for n, out in zip(range(100), choose(range(100), 1 / 8), strict=True) if out) == pytest.approx(
        619, abs=100
    )
    assert held_out([]) == []
    assert list(rest(["", " \n"])) == []
    text = "x" * 1000  # no place to cut at
    assert sorted([*held_out([text]), *rest([text, "", text[:3]])], key=len)[0] == "xxx"
    lines = "".join(f"line {n} of many\n" for n in range(900))
    parts = [*held_out([lines]), *rest([lines])]
    assert sum(map(len, parts)) == len(lines)
    assert all(part.endswith("\n") for part in parts)
