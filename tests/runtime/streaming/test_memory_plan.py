"""Bounds: what is understood, what stays in memory, what is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

import runtime
from runtime.errors import RequestError
from runtime.streaming.plan import RESERVE, parse_memory, plan, text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        ("7", 7),
        ("2GB", 2 * 10**9),
        ("1.5 GiB", 3 << 29),
        ("800mb", 8 * 10**8),
        (" 64 kib ", 65536),
        ("1TB", 10**12),
    ],
)
def test_sizes(value: int | str, expected: int) -> None:
    assert parse_memory(value) == expected


@pytest.mark.parametrize("value", [0, -1, "0GB", True, 1.5, "2 GX", "GB", "", "1e3", "-2GB", "nan", ["2GB"], "9" * 500])
def test_what_is_no_size(value: object) -> None:
    with pytest.raises(RequestError, match="max_memory"):
        parse_memory(value)


def test_blocks_that_fit_stay_and_the_others_are_spread() -> None:
    for total in (3, 4, 7, 22):
        for slots in range(2, total):
            made = plan(1000 + 50 + 100 * slots, 50, [100] * total, reserve=1000)
            assert made.buffers == min(3, slots)
            assert len(made.streamed) == total - (slots - made.buffers)
            assert list(made.streamed) == sorted(set(made.streamed))
            assert made.bytes <= 50 + 100 * slots
        assert plan(1050 + 100 * total, 50, [100] * total, reserve=1000).streamed == ()
    streamed = plan(53, 0, [1] * 100, reserve=0).streamed
    assert {after - before for before, after in pairwise(streamed)} == {2}


def test_blocks_of_different_sizes() -> None:
    made = plan(350, 50, [100, 10, 10, 100, 100, 10], reserve=0)
    assert made.bytes <= 350


def test_too_little_says_what_is_needed() -> None:
    for blocks, least in (([100_000_000] * 5, 201_000_000), ([], 1_000_000)):
        with pytest.raises(RequestError, match="needs at least") as raised:
            plan(1000, 1_000_000, blocks, reserve=0)
        asked = str(raised.value).partition("at least ")[2].partition(",")[0]
        assert parse_memory(asked) >= least
        plan(parse_memory(asked), 1_000_000, blocks, reserve=0)
    assert text(1_000_001, up=True) == "1.01 MB"


def test_load_says_it_before_it_writes(artifacts: dict[str, Path], home: Path) -> None:
    with pytest.raises(RequestError, match=r"max_memory 1000 bytes is too little: this model needs at least \d+"):
        runtime.load(artifacts["llama"], max_memory=1000)
    assert not home.exists()
    with pytest.raises(RequestError, match="is no size"):
        runtime.load(artifacts["llama"], max_memory="plenty")
    assert parse_memory("1GB") > RESERVE
