"""A run that is cut off at any moment, with or without damage to what it left, goes on and ends with the same bytes.

A few moments of each kind of run, other ones each time (`FAULTS_SEED` repeats them); `benchmarks/faults.py` tries all of them.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from trials import Watched

TRIALS = {"compress": 6, "structure": 2, "recover": 2, "draft": 2}
MORE = int(os.environ.get("FAULTS_MORE") or 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRIALS)
def test_moments(kind: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("FAULTS_SEED") or time.time_ns())
    print(f"FAULTS_SEED={seed} repeats these moments")
    chooser = random.Random(seed)
    watched = Watched.of(kind, tmp_path, 8, chooser)
    assert watched.operations > 100
    wrong = []
    for trial in range(TRIALS[kind] * MORE):
        number = chooser.randrange(len(watched.found))
        what, problem = watched.resumed(number, tmp_path / "resumed", chooser if trial % 2 else None)
        if problem is not None:
            wrong.append((number, what, problem))
    assert not wrong


def test_a_moment_is_what_a_crash_there_leaves(tmp_path: Path) -> None:
    """The tool itself: half of a file that is being written, and nothing of what comes after."""
    from moments import Moments

    from compress.core.files import write_text

    place = tmp_path / "watched"
    place.mkdir()
    with Moments(place, tmp_path / "copies") as moments:
        write_text(place / "a", "x" * 10)
    states = [{file.name: len(file.read_bytes()) for file in copy.iterdir()} for _, copy in moments.found]
    assert states == [{".a.tmp": 5}, {".a.tmp": 10}, {"a": 10}]
