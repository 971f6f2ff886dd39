"""Values of a key: what is read, what a grid makes of it, and what extends what; and their names in tables."""

from __future__ import annotations

import math

import pytest

from compress.sweeps.labels import short_names, word
from compress.sweeps.space import Choices, Range, read_values
from runtime.errors import RequestError


@pytest.mark.parametrize(
    ("written", "grid"),
    [
        ([4, 3], [4, 3]),
        ({"choices": ["a", None, [1], {"b": 2}]}, ["a", None, [1], {"b": 2}]),
        ({"low": 2, "high": 4}, [2, 3, 4]),
        ({"low": 16, "high": 65, "step": 16}, [16, 32, 48, 64]),
        ({"low": 0.1, "high": 0.3, "step": 0.1}, [0.1, 0.2, 0.3]),
        ({"low": 1, "high": 2, "step": 0.5}, [1.0, 1.5, 2.0]),
        ({"low": 0.1, "high": 0.3}, None),
        ({"low": 5, "high": 5}, [5]),
    ],
)
def test_values_are_read(written, grid):
    values = read_values(written)
    assert values.grid() == grid
    assert values.count() == (None if grid is None else len(grid))
    if grid is not None:
        assert [type(value) for value in values.grid()] == [type(value) for value in grid]
    assert read_values(values.plain()) == values


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (4, "expected a list of values, {choices: [...]} or {low: ..., high: ...}, got 4"),
        ([], "the list is empty"),
        ([4, 4], "4 is given twice"),
        ({}, "an empty mapping"),
        ({"chioces": [1]}, "chioces: unknown key; did you mean 'choices'?"),
        ({"choices": [1], "low": 2}, "low: unknown key"),
        ({"lo": 1, "hgih": 2}, "Allowed: low, high, step, log"),
        ({"low": 1, "hgih": 2}, "hgih: unknown key; did you mean 'high'?"),
        ({"low": 1}, "high: this key is required"),
        ({"low": "a", "high": 2}, "low: expected a number, got 'a'"),
        ({"low": 1, "high": True}, "high: expected a number, got true"),
        ({"low": 3, "high": 2}, "low is 3 and high is 2"),
        ({"low": 1, "high": 2, "step": 0}, "step: expected a number above 0"),
        ({"low": 0, "high": 2, "log": True}, "starts above 0"),
        ({"low": 1, "high": 2, "log": "yes"}, "log: expected true or false"),
        ({"low": 0, "high": 1, "step": 1e-9}, "at most 10,000"),
        ({"low": 1, "high": 1e308, "step": 1e-300}, "more than 2^53 values; at most 10,000"),
        ({"low": 1, "high": 10**400}, "high: expected an integer"),
        ({"low": -1e308, "high": 1e308}, "narrower range"),
        ({"low": 1, "high": math.inf}, "high: expected a number"),
    ],
)
def test_wrong_values_are_told(written, said):
    with pytest.raises(RequestError) as raised:
        read_values(written)
    assert said in str(raised.value)


def test_equal_numbers_of_other_types_are_other_choices():
    assert read_values([1, 1.0, True, "1"]).count() == 4


@pytest.mark.parametrize(
    ("newer", "older", "covered"),
    [
        (Choices(choices=[1, 2, 3]), Choices(choices=[3, 1]), True),
        (Choices(choices=[1, 2]), Choices(choices=[1, 3]), False),
        (Choices(choices=[1]), Choices(choices=[True]), False),
        (Range(low=1, high=9), Range(low=2, high=8), True),
        (Range(low=3, high=9), Range(low=2, high=8), False),
        (Range(low=1.0, high=9.0, log=True), Range(low=1.0, high=9.0), False),
        (Range(low=0, high=64, step=16), Range(low=16, high=48, step=16), True),
        (Range(low=8, high=64, step=16), Range(low=16, high=48, step=16), False),
        (Range(low=1, high=9), Choices(choices=[1]), False),
    ],
)
def test_what_extends_what(newer, older, covered):
    assert newer.covers(older) is covered
    assert older.covers(older)


def test_names_are_as_short_as_they_can_be():
    keys = ["stages.0.quantize.bits", "stages.0.quantize.group_size", "calibration.samples"]
    assert list(short_names(keys).values()) == ["bits", "group_size", "samples"]
    twice = short_names(["stages.0.quantize.bits", "stages.1.quantize.bits", "stages.2.kv_cache.bits"])
    assert list(twice.values()) == ["stages.0.quantize.bits", "stages.1.quantize.bits", "kv_cache.bits"]
    assert short_names(["seed", "calibration.seed"]) == {"seed": "seed", "calibration.seed": "calibration.seed"}


def test_words_of_values():
    values = [4, 0.5, "2:4", None, True, ["lm_head"], {"method": "rtn", "bits": 4}]
    assert [word(value) for value in values] == ["4", "0.5", "2:4", "null", "true", "[lm_head]", "rtn, bits 4"]
