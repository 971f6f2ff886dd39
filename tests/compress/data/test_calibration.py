# ruff: noqa: E501 (a case and its sentence stand in one line)
"""Calibration and evaluation text: the rows that are drawn, and the sentence for each kind of bad text."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from compress import data as calibration
from compress.recipe import load
from runtime.errors import RequestError

EOS, BOS, PAD, WORDS = 0, 1, 2, 3


def make_tokenizer(bos=False):
    """`w0 w1 ...` are the ids 3, 4, ...; optionally a BOS is put first, as Llama's tokenizer does."""
    words = {"<|endoftext|>": EOS, "<s>": BOS, "<pad>": PAD} | {f"w{n}": WORDS + n for n in range(500)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|endoftext|>", bos_token="<s>", pad_token="<pad>"
    )


TOKENIZER = make_tokenizer()


def words(start, count):
    return " ".join(f"w{n}" for n in range(start, start + count))


def recipe(data, evaluate=None, **keys):
    keys = {"samples": 4, "sequence_length": 8, "batch_size": 2} | keys
    sections = {"calibration": {"data": str(data), **keys}} | ({"evaluate": evaluate} if evaluate else {})
    return load({"name": "t", "model": "m", "stages": [{"quantize": {"method": "rtn"}}], **sections})


def rows_of(data, tokenizer=TOKENIZER, vocabulary=503, **keys):
    found = calibration.load(recipe(data, **keys).calibration, tokenizer, vocabulary)
    return torch.cat([ids for ids, _ in found.batches]), torch.cat([mask for _, mask in found.batches]), found


def refused(data, tokenizer=TOKENIZER, vocabulary=503, **keys):
    with pytest.raises(RequestError) as caught:
        calibration.load(recipe(data, **keys).calibration, tokenizer, vocabulary)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(words(0, 400))
    return path


def test_packed_rows_are_windows_of_the_text_without_overlap(text):
    rows, mask, found = rows_of(text)
    assert rows.shape == (4, 8)
    assert rows.dtype == torch.int64
    assert mask.dtype == torch.bool
    assert bool(mask.all())
    starts = rows[:, 0] - WORDS
    assert (starts % 8 == 0).all()
    assert len(set(starts.tolist())) == 4
    assert torch.equal(rows, rows[:, :1] + torch.arange(8))
    assert [tuple(ids.shape) for ids, _ in found.batches] == [(2, 8), (2, 8)]
    assert (found.tokens, found.rows, found.warning) == (32, 4, "")
    assert found.description == "4 packed rows of 8 tokens from the file text.txt, seed 0 (32 tokens)"


def test_the_seed_decides_the_draw_and_nothing_else_does(text):
    first, again, other = rows_of(text), rows_of(text), rows_of(text, seed=1)
    assert torch.equal(first[0], again[0])
    assert first[2].sha256 == again[2].sha256
    assert not torch.equal(first[0], other[0])
    assert first[2].sha256 != other[2].sha256
    # The batch size changes how rows are grouped, not which rows they are.
    assert rows_of(text, batch_size=3)[2].sha256 == first[2].sha256


def test_fewer_rows_than_samples_are_all_used_in_order_and_said(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text(words(0, 20))
    rows, _, found = rows_of(path)
    assert rows[:, 0].tolist() == [WORDS, WORDS + 8]
    assert found.warning.endswith(
        "calibration.samples: the file short.txt has only 2 rows of 8 tokens; 4 were asked for"
    )


def test_documents_are_kept_apart_by_the_end_of_text_token(tmp_path):
    path = tmp_path / "two.txt"
    path.write_text("w0 w1\n<|endoftext|>\nw2 w3 w4\n<|endoftext|>\n")
    rows, _, _ = rows_of(path, sequence_length=7)
    assert rows.tolist() == [[3, 4, EOS, 5, 6, 7, EOS]]


def test_a_tokenizer_that_marks_the_start_by_itself_is_left_to_it(tmp_path):
    path = tmp_path / "two.txt"
    path.write_text("w0 w1\n<|endoftext|>\nw2 w3 w4\n<|endoftext|>\n")
    rows, _, _ = rows_of(path, make_tokenizer(bos=True), sequence_length=7)
    assert rows.tolist() == [[BOS, 3, 4, BOS, 5, 6, 7]]


def test_padding_puts_one_document_in_a_row(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_text("\n".join(json.dumps({"text": words(10 * n, n + 1)}) for n in range(4)) + "\n\n")
    rows, mask, found = rows_of(path, packing=False, sequence_length=3)
    assert rows.tolist() == [[3, PAD, PAD], [13, 14, PAD], [23, 24, 25], [33, 34, 35]]
    assert mask.sum(1).tolist() == [1, 2, 3, 3]
    assert (found.tokens, found.warning) == (9, "")
    assert "4 padded rows of 3 tokens" in found.description


def test_padding_takes_the_paragraphs_of_a_plain_text(tmp_path):
    path = tmp_path / "plain.txt"
    path.write_text("w0 w1\n\nw2\n \nw3 w4 w5\n")
    rows, mask, found = rows_of(path, packing=False)
    assert rows.tolist() == [[3, 4, PAD], [5, PAD, PAD], [6, 7, 8]]
    assert mask.sum() == 6
    assert "has only 3 documents; 4 were asked for" in found.warning


def test_padding_draws_by_seed(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_text("\n".join(json.dumps(words(n, 2)) for n in range(50)))
    first, second = rows_of(path, packing=False)[0], rows_of(path, packing=False, seed=5)[0]
    assert first.shape == second.shape == (4, 2)
    assert not torch.equal(first, second)


def test_jsonl_and_parquet_say_the_same(tmp_path):
    import pyarrow
    import pyarrow.parquet

    texts = [words(20 * n, 20) for n in range(10)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in texts))
    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(10)), "body": texts}), tmp_path / "a.parquet")
    rows = [rows_of(tmp_path / f"a.{kind}", text_column="body")[0] for kind in ("jsonl", "parquet")]
    assert torch.equal(rows[0], rows[1])
    assert "has no column 'bodi'; did you mean 'body'? Columns: id, body" in refused(
        tmp_path / "a.parquet", text_column="bodi"
    )


def test_bundled_text_and_held_out_text_differ():
    from compress.core.resources import bundled_text

    calibration_text, held_out = bundled_text("calibration").read_text(), bundled_text("heldout").read_text()
    lines = {line for line in held_out.splitlines() if len(line) > 60}
    shared = lines & set(calibration_text.splitlines())
    assert len(shared) < 0.01 * len(lines)
    rows, _, found = rows_of("bundled")
    assert rows.shape == (4, 8)
    assert "the bundled calibration text" in found.description


# ------------------------------------------------------------------ bad text

BAD_FILES = {
    "empty": ("a.txt", b"", "calibration.data: the file a.txt"),
    "blank": ("a.txt", b"\n  \n\n", "calibration.data: the file a.txt"),
    "empty jsonl": ("a.jsonl", b"\n", "calibration.data: the file a.jsonl"),
    "short": ("a.txt", b"w1 w2 w3", "calibration.data: the file a.txt has 4 tokens"),
    "not utf-8": ("a.txt", b"w1 \xff\xfe", "a.txt' is not UTF-8 text (byte 3)"),
    "jsonl not utf-8": ("a.jsonl", b'{"text": "w1"}\n\xff\xff\n', "a.jsonl' is not UTF-8 text"),
    "broken jsonl": ("a.jsonl", b'{"text": "w1"}\n{"text": \n', "a.jsonl' line 2 is not JSON"),
    "deep jsonl": ("a.jsonl", b"[" * 200_000, "a.jsonl' line 1 is not JSON"),
    "jsonl numbers": ("a.jsonl", b"3\n", "a.jsonl' line 1 "),
    "jsonl no column": ("a.jsonl", b'{"txt": "w1", "id": 3}\n', "calibration.text_column: '{path}' line 1 has no column 'text'; did you mean 'txt'? Columns: txt, id"),
    "jsonl wrong type": ("a.jsonl", b'{"text": 3}\n', "line 1 has int under 'text'"),
    "parquet garbage": ("a.parquet", b"PAR1 no", "a.parquet'"),
    "other kind": ("a.csv", b"x", "allowed: .txt, .jsonl, .parquet"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_answer_in_one_sentence(tmp_path, case):
    name, content, words_ = BAD_FILES[case]
    path = tmp_path / name
    path.write_bytes(content)
    assert words_.replace("{path}", str(path)) in refused(path)


def test_missing_files_name_the_nearest(text):
    assert f"calibration.data: no file '{text.parent / 'texd.txt'}'; did you mean '{text}'?" in refused(
        text.parent / "texd.txt"
    )
    assert "calibration.data: no file 'nowhere/at/all.txt'" in refused("nowhere/at/all.txt")
    assert f"calibration.data: '{text.parent}' is a directory" in refused(text.parent)


def test_ids_outside_the_vocabulary(text):
    answer = refused(text, vocabulary=50)
    assert "calibration.data: " in answer
    assert "50 entries" in answer


def test_files_beside_the_recipe_are_found(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.txt").write_text(words(0, 100))
    (tmp_path / "mine.txt").write_text(words(200, 100))
    path = tmp_path / "recipes" / "r.yaml"
    path.write_text(
        "name: t\nmodel: m\nstages:\n  - quantize: {method: rtn}\ncalibration:\n  data: mine.txt\n  sequence_length: 8\n  samples: 1\n"
    )
    monkeypatch.chdir(tmp_path)
    beside = calibration.load(load(path).calibration, TOKENIZER, 503)
    typed = calibration.load(load(path, set=["calibration.data=mine.txt"]).calibration, TOKENIZER, 503)
    assert beside.batches[0][0].max() < WORDS + 100, "a name in the file is looked up beside the file"
    assert typed.batches[0][0].min() >= WORDS + 200, "a name on the command line is looked up where the command runs"
    path.write_text(path.read_text().replace("mine.txt", "main.txt"))
    with pytest.raises(RequestError) as caught:
        calibration.load(load(path).calibration, TOKENIZER, 503)
    assert str(caught.value).startswith(f"{path}:6: calibration.data: no file 'main.txt'; did you mean")


# ------------------------------------------------------------------ data sets of the hub


def fake_datasets(monkeypatch, rows=None, error=None, names=("text",)):
    class Rows(list):
        column_names = list(names) if names else None

    def load_dataset(name, subset, split, streaming):
        assert (name, subset, split, streaming) == ("org/set", "en", "validation", True)
        if error is not None:
            raise error
        return Rows(rows)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))


def test_data_sets_are_streamed(monkeypatch):
    fake_datasets(monkeypatch, [{"text": words(10 * n, 10)} for n in range(20)])
    rows, _, found = rows_of("org/set", subset="en", split="validation")
    assert rows.shape == (4, 8)
    assert "the data set org/set" in found.description


def test_data_sets_that_cannot_be_reached(monkeypatch):
    fake_datasets(monkeypatch, error=ConnectionError("Couldn't reach 'org/set' on the Hub\nmore"))
    answer = refused("org/set", subset="en", split="validation")
    assert answer.endswith(
        "'org/set' is neither a file here nor a data set that can be read: Couldn't reach 'org/set' on the Hub"
    )


@pytest.mark.parametrize("names", [("content", "id"), None])
def test_data_sets_without_the_column(monkeypatch, names):
    fake_datasets(monkeypatch, [{"content": "w1", "id": 1}], names=names)
    answer = refused("org/set", subset="en", split="validation")
    assert "the data set 'org/set' has no column 'text'" in answer
    assert "Columns: content, id" in answer


def test_a_stream_is_read_no_further_than_needed(monkeypatch):
    monkeypatch.setattr("compress.data.rows.ENOUGH_TOKENS", 100)
    seen = []

    class Endless:
        column_names = ("text",)

        def __iter__(self):
            while True:
                seen.append(1)
                yield {"text": words(0, 50)}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda *a, **k: Endless()))
    rows_of("org/set")
    assert len(seen) < 20


# ------------------------------------------------------------------ evaluation


def test_evaluation_rows_come_in_order_from_the_start(text):
    section = {"data": str(text), "sequence_length": 16}
    windows = calibration.load_evaluation(recipe("bundled", section).evaluate, TOKENIZER, 503).ids
    assert windows.shape == (25, 16)
    assert torch.equal(windows.flatten(), torch.arange(400) + WORDS)
    few = calibration.load_evaluation(recipe("bundled", section | {"samples": 3}).evaluate, TOKENIZER).ids
    assert torch.equal(few, windows[:3])


def test_evaluation_refuses_the_same_bad_texts(tmp_path):
    path = tmp_path / "a.txt"
    for content, words_ in (
        ("", "evaluate.data: the file a.txt has 0 tokens"),
        ("w1 w2", "evaluate.data: the file a.txt has 3 tokens"),
    ):
        path.write_text(content)
        with pytest.raises(RequestError) as caught:
            calibration.load_evaluation(
                recipe("bundled", {"data": str(path), "sequence_length": 16}).evaluate, TOKENIZER
            )
        assert words_ in str(caught.value)
    path.write_text(words(0, 100))
    with pytest.raises(RequestError, match="50 entries"):
        calibration.load_evaluation(
            recipe("bundled", {"data": str(path), "sequence_length": 16}).evaluate, TOKENIZER, 50
        )
