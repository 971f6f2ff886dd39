"""Fewer threads while other processes need the cores (`contention.h`), on a clock of the test's own (`contention.c`)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.kernels.cpu import library
from runtime.system import native

SOURCE = Path(__file__).with_name("contention.c")
COMPILER = native.find_compiler()


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[list[int]]]:
    """`threads("MILLISECONDS:LATE:PERCENT", ...)`: how many of 4 worked, a list for each."""
    if COMPILER is None:
        pytest.skip("needs a C compiler")
    program, folder = tmp_path_factory.mktemp("contention") / "program", library.SOURCE.parent
    headers = [f'-D{name.upper()}="{folder / name}.h"' for name in ("pool", "contention")]
    subprocess.run([*COMPILER.split(), "-std=c11", *headers, str(SOURCE), "-o", str(program)], check=True)

    def run(*phases: str) -> list[list[int]]:
        done = subprocess.run([program, *phases], stdout=subprocess.PIPE, text=True, check=True)
        return [[int(each) for each in line.split()] for line in done.stdout.splitlines()]

    return run


def test_all_work_on_an_idle_machine(threads: Callable[..., list[list[int]]]) -> None:
    assert threads("1000:0:0", "1000:4:20") == [[4] * 40] * 2  # a fifth of the time is no reason


def test_a_thread_that_shares_its_core_is_not_used(threads: Callable[..., list[list[int]]]) -> None:
    before, beside, after = threads("200:0:0", "4000:1:50", "2000:0:0")
    assert before == [4] * 8
    assert set(beside) == {3, 4}
    assert beside[1:5] == [3] * 4
    assert beside[80:].count(4) <= 8  # that all are tried again costs little
    assert after[-40:] == [4] * 40
    assert after.index(4) * 25 <= 825  # and helps soon


def test_one_always_works(threads: Callable[..., list[list[int]]]) -> None:
    (found,) = threads("4000:4:60")
    assert min(found) == 1
    assert found.count(1) > 120


def test_a_later_backoff_is_short_again(threads: Callable[..., list[list[int]]]) -> None:
    _, _, again = threads("4000:1:50", "4000:0:0", "1000:1:50")
    assert again.count(4) > 4


def test_nothing_is_concluded_where_the_system_does_not_say(threads: Callable[..., list[list[int]]]) -> None:
    assert threads("1000:2:-1") == [[4] * 40]
