"""Several sets in one section: rows in proportion to their weights, each set with a held-out part of its own."""

from __future__ import annotations

import pytest
import torch
from test_calibration import PAD, TOKENIZER, WORDS, make_tokenizer, words

from compress import data
from compress.data.held_out import apportion
from compress.recipe import load
from runtime.errors import RequestError


@pytest.fixture
def sets(tmp_path):
    """Files with words of their own: 0 to 199, 200 to 399."""
    files = {}
    for number, name in enumerate("ab"):
        files[name] = tmp_path / f"{name}.txt"
        files[name].write_text("<|endoftext|>".join(words(200 * number + 10 * n, 10) for n in range(20)))
    return files


def recipe(entries, evaluate=None, origin=None, **keys):
    sections = {"calibration": {"data": entries, "samples": 8, "sequence_length": 8, **keys}}
    if evaluate is not None:
        sections["evaluate"] = {"sequence_length": 8, **evaluate}
    return load({"name": "t", "model": "m", "stages": [{"quantize": {"method": "rtn"}}], **sections})


def sources(rows):
    """Rows by the set they are of."""
    firsts = [int(row[row >= WORDS][0]) - WORDS for row in rows]
    return sum(first < 200 for first in firsts), sum(first >= 200 for first in firsts)


@pytest.mark.parametrize("packing", [True, False])
def test_rows_are_in_proportion_and_shuffled(sets, packing):
    entries = [{"data": str(sets["a"]), "weight": 3}, {"data": str(sets["b"])}]
    found = data.load(recipe(entries, packing=packing).calibration, TOKENIZER, 503)
    rows = torch.cat([ids for ids, _ in found.batches])
    assert sources(rows) == (6, 2)
    assert "8 p" in found.description
    assert "from the file a.txt (75%) + the file b.txt (25%), seed 0" in found.description
    assert (found.kind, found.warning) == ("named", "")
    again = data.load(recipe(entries, packing=packing).calibration, TOKENIZER, 503)
    other = data.load(recipe(entries, packing=packing, seed=1).calibration, TOKENIZER, 503)
    assert again.sha256 == found.sha256 != other.sha256
    assert sources(torch.cat([ids for ids, _ in other.batches])) == (6, 2)
    if packing:
        one = data.load(recipe([entries[0]], samples=6).calibration, TOKENIZER, 503)
        alone = {*map(tuple, torch.cat([ids for ids, _ in one.batches]).tolist())}
        assert alone < {*map(tuple, rows.tolist())}, "each set is drawn from as if it were alone"
    else:
        assert not (rows == PAD).all(1).any()


def test_each_set_has_a_held_out_part(sets):
    found = recipe(
        [{"data": str(sets["a"]), "weight": 1}, {"data": str(sets["b"]), "weight": 1}], {"samples": 6}, samples=100
    )
    text = data.load(found.calibration, TOKENIZER, 503)
    apart = data.load_evaluation(found.evaluate, TOKENIZER, 503, found.calibration)
    assert sources(apart.ids) == (3, 3)
    ours = {int(i) for ids, _ in text.batches for i in ids.flatten() if i >= WORDS}
    assert not ours & {int(i) for i in apart.ids.flatten() if i >= WORDS}
    assert apart.kind == "held out"
    assert (
        apart.description
        == "the held-out part of the file a.txt (50%) + the held-out part of the file b.txt (50%), 6 rows of 8 tokens"
    )
    assert "the file a.txt without its held-out part has only" in text.warning


def test_a_small_set_keeps_its_proportion(sets):
    sets["b"].write_text(words(200, 24))
    found = data.load(
        recipe([{"data": str(sets["a"])}, {"data": str(sets["b"])}], samples=20).calibration, TOKENIZER, 503
    )
    assert sources(torch.cat([ids for ids, _ in found.batches])) == (3, 3)
    assert found.warning.endswith("calibration.samples: the file b.txt has only 3 rows of 8 tokens; 10 were asked for")


def test_bundled_text_in_a_mix_is_evaluated_on_its_own_held_out_text(sets):
    found = recipe([{"data": str(sets["a"])}, {"data": "bundled"}], {"samples": 4})
    apart = data.load_evaluation(found.evaluate, TOKENIZER, 503, found.calibration)
    assert (apart.kind, apart.rows) == ("held out", 4)
    assert "the bundled held-out text (50%)" in apart.description
    only = recipe([{"data": "bundled"}], {"samples": 4})
    apart = data.load_evaluation(only.evaluate, TOKENIZER, 503, only.calibration)
    plain = recipe("bundled", {"samples": 4})
    assert apart.sha256 == data.load_evaluation(plain.evaluate, TOKENIZER, 503, plain.calibration).sha256
    assert apart.kind == "bundled"


def test_several_sets_to_evaluate_on(sets):
    found = recipe(
        "bundled", {"data": [{"data": str(sets["a"]), "weight": 0.9}, {"data": str(sets["b"]), "weight": 0.1}]}
    )
    apart = data.load_evaluation(found.evaluate, TOKENIZER, 503, found.calibration)
    ours, theirs = sources(apart.ids)
    assert ours == 27, "all that is there of the set with the most weight"
    assert theirs == 3
    assert apart.kind == "named"
    spans = data.evaluation_spans(found.evaluate, TOKENIZER, 503, found.calibration)
    assert torch.equal(spans.ids, apart.ids)
    like = data.evaluation_spans(found.evaluate, make_tokenizer(bos=True), 503, found.calibration, spans)
    assert sources(like.ids)[1] in (2, 3), "as much of each text"


def test_columns_splits_and_command_line(tmp_path, sets):
    (tmp_path / "c.jsonl").write_text('{"body": "w7 w8"}\n' * 8)
    text = f"calibration.data=[{{data: {sets['a']}, weight: 1.5}}, {{data: {tmp_path / 'c.jsonl'}, text_column: body, weight: 0.5}}]"
    base = {
        "name": "t",
        "model": "m",
        "stages": [{"quantize": {"method": "rtn"}}],
        "calibration": {"samples": 4, "sequence_length": 8},
    }
    found = load(base, set=[text])
    assert "(75%) + the file c.jsonl (25%)" in data.load(found.calibration, TOKENIZER, 503).description
    again = load(found.resolved())
    assert again.resolved() == found.resolved()
    assert again.calibration.texts[1].text_column == "body"
    assert load(base, set=[f"calibration.data={sets['a']}"]).calibration.text.data == str(sets["a"])


BAD = {
    "unknown key": ([{"data": "a.txt", "wieght": 3}], "calibration.data.0.wieght: unknown key; did you mean 'weight'?"),
    "no weight": ([{"data": "a.txt", "weight": 0}], "calibration.data.0.weight: expected a number above 0, got 0"),
    "no data": ([{"weight": 1}], "calibration.data.0.data: this key is required"),
    "nested": ([{"data": [{"data": "a.txt"}]}], "calibration.data.0.data: expected a text, got a list of 1"),
    "number": ([3], "calibration.data.0: expected a mapping of keys"),
    "empty": ([], "calibration.data: expected a text or a list of 1 to 64 values, got a list of 0"),
    "null": (None, "calibration.data: expected a text or a list"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_lists(case):
    entries, reason = BAD[case]
    with pytest.raises(RequestError) as caught:
        recipe(entries)
    assert reason in str(caught.value)


def test_a_set_that_is_not_there_is_named_by_its_line(tmp_path, sets):
    path = tmp_path / "r.yaml"
    path.write_text(
        "name: t\nmodel: m\nstages:\n  - quantize: {method: rtn}\ncalibration:\n  samples: 4\n  sequence_length: 8\n  data:\n"
        f"    - data: {sets['a']}\n    - data: c.txt\n      weight: 2\n"
    )
    with pytest.raises(RequestError) as caught:
        data.load(load(path).calibration, TOKENIZER, 503)
    assert str(caught.value).startswith(f"{path}:10: calibration.data.1.data: no file 'c.txt'; did you mean")


def test_a_share_of_no_row(sets):
    found = recipe([{"data": str(sets["a"]), "weight": 1000}, {"data": str(sets["b"])}])
    with pytest.raises(RequestError, match=r"calibration\.data\.1\.weight: a share of 0\.1% gives none of 8 rows"):
        data.load(found.calibration, TOKENIZER, 503)


def test_apportion():
    assert apportion(10, [0.25, 0.25, 0.5]) == [3, 2, 5]
    assert apportion(7, [1 / 3] * 3) == [3, 2, 2]
    assert apportion(0, [0.5, 0.5]) == [0, 0]
    assert sum(apportion(12345, [0.1] * 10)) == 12345
