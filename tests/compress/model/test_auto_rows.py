"""Rows whose length and number a recipe leaves open: as long as the model reads, 4,096 tokens at most, as far as there is text."""

from __future__ import annotations

import pytest

from compress.model import auto_rows
from compress.recipe import load
from compress.run.session import Session
from runtime.errors import RequestError

RTN = [{"quantize": {"method": "rtn", "bits": 4, "group_size": 16}}]


@pytest.fixture
def settled(make_checkpoint, tmp_path, monkeypatch):
    """The sections of a recipe as a model with so many positions finds them: (length, rows, batch) of both."""
    (tmp_path / "large.txt").write_text("a line of text\n" * 100_000)
    (tmp_path / "short.txt").write_text("a line of text\n" * 5_000)
    monkeypatch.chdir(tmp_path)

    def settle(positions, small=False, evaluate=None, **calibration):
        monkeypatch.setattr(auto_rows, "SMALL", 2**30 if small else 0)
        model = make_checkpoint(name=f"model-{positions}", max_position_embeddings=positions)
        sections = {"calibration": calibration or "auto", "evaluate": {} if evaluate is None else evaluate}
        recipe = load({"name": "t", "model": str(model), "stages": RTN, **sections})
        found = Session.open(recipe, "cpu").context.recipe
        again = load(found.resolved())
        assert again.resolved() == found.resolved(), "the artifact's recipe has the numbers"
        sections = [found.calibration, found.evaluate]
        return [(one.sequence_length, one.samples, one.batch_size) for one in sections]

    return settle


def test_small_models_as_ever(settled):
    assert settled(8192, small=True) == [(256, 128, 8), (256, None, 8)]
    assert settled(128, small=True) == [(128, 128, 8), (128, None, 8)], "no longer than the model reads"


def test_others_as_long_as_they_read(settled):
    assert settled(131072) == [(4096, 16, 1), (4096, None, 1)]
    assert settled(8192) == [(4096, 16, 1), (4096, None, 1)]
    assert settled(3000) == [(3000, 16, 1), (3000, None, 1)]
    assert settled(1024) == [(1024, 32, 2), (1024, None, 2)]
    assert settled(200) == [(200, 128, 8), (200, None, 8)]


def test_more_rows_where_layers_are_wide(settled, monkeypatch):
    monkeypatch.setattr(auto_rows, "_widest", lambda _: 14336)
    assert settled(8192)[0] == (4096, 28, 1), "eight tokens for each of 14,336 inputs"


def test_what_is_given_stays(settled):
    assert settled(8192, sequence_length=512) == [(512, 128, 8), (4096, None, 1)]
    assert settled(8192, samples=5, batch_size=3) == [(4096, 5, 3), (4096, None, 1)]
    assert settled(8192, samples="auto", sequence_length="auto", batch_size="auto")[0] == (4096, 16, 1)
    assert settled(8192, evaluate={"sequence_length": 64, "samples": 3})[1] == (64, 3, 8)


def test_shorter_rows_of_less_text(settled):
    assert settled(8192, data="large.txt") == [(4096, 16, 1), (4096, None, 1)]
    assert settled(8192, data="short.txt") == [(512, 64, 4), (512, None, 4)], "a part of it is held out, too"
    assert settled(8192, data="short.txt", evaluate={"data": "bundled"}) == [(1024, 32, 2), (1024, None, 2)]
    assert settled(8192, data="large.txt", evaluate={"data": "short.txt"}) == [(4096, 16, 1), (2048, None, 1)]
    mixed = [{"data": "large.txt"}, {"data": "short.txt"}]
    assert settled(8192, data=mixed)[0] == (1024, 32, 2)
    assert settled(8192, data="short.txt", sequence_length=40) == [(40, 128, 8), (40, None, 8)]
    assert settled(8192, data="org/set")[0] == (4096, 16, 1), "of a data set nothing is known before"


def test_words(settled):
    base = {"name": "t", "model": "m", "stages": RTN}
    assert load({**base, "calibration": "auto"}, set=["calibration.samples=3"]).calibration.samples == 3
    assert load(base, set=["calibration=auto"]).resolved()["calibration"]["sequence_length"] == "auto"
    for wrong in ({"calibration": "automatic"}, {"calibration": {"samples": "all"}}, {"calibration": {"seed": "auto"}}):
        with pytest.raises(RequestError, match="expected"):
            load({**base, **wrong})
