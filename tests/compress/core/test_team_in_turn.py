"""An error in one of several processes ends all of them, soon and with a word of why."""

from __future__ import annotations

from pathlib import Path

import pytest
from warm_python import torchrun

from compress.core.processes import _chain

# Every process writes down how it ended and then exits as if nothing had happened, so that no launcher ends the others.
PROGRAM = """
import os, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from compress.core.processes import Team
from runtime.errors import CompressError

where, what = Path(sys.argv[1]), sys.argv[2]
rank = int(os.environ["RANK"])

def told(text):
    (where / f"{rank}.txt").write_text(text)

def work(team):
    with team.in_turn():
        if (what, rank) in (("main", 0), ("other", 1)):
            raise CompressError("there is no room for it")
        if team.is_main:
            (where / "left.txt").write_text("for the others")
        assert (where / "left.txt").is_file()
    if (what, rank) in (("main later", 0), ("other later", 1)):
        raise ValueError("something odd")
    return team.broadcast(rank)

def main():
    with Team.join("cpu") as team:
        if not team.is_main:
            found = work(team)
            team.broadcast(None)
            team.meet()
            return found
        try:
            with team.working():
                return work(team)
        finally:
            team.broadcast("nothing more")
            team.meet()

try:
    told(f"done {main()}")
except BaseException as error:
    told(f"{type(error).__name__}: {error}")
os._exit(0)
"""

LOST = (
    "CompressError: another of the 2 processes has ended, which says why; where it says nothing, it was killed, most likely for memory. "
    "What was finished stays"
)
ROOM = "CompressError: there is no room for it"


def both(tmp_path: Path, what: str) -> tuple[str, str]:
    """How the main process and the other one ended; they have a minute."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = torchrun(2, program, tmp_path, what, timeout=90)
    assert done.returncode == 0, done.stderr[-3000:]
    main, other = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    return main, other


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "main", "other"),
    [
        ("main", ROOM, "CompressError: the run failed in the main process: there is no room for it"),
        ("other", LOST, ROOM),
        ("main later", "ValueError: something odd", LOST),
        ("other later", LOST, "ValueError: something odd"),
    ],
)
def test_an_error_in_one_process_ends_the_other(tmp_path: Path, what: str, main: str, other: str) -> None:
    assert both(tmp_path, what) == (main, other)


def test_a_chain_of_errors_may_have_a_circle() -> None:
    first, second, third = ValueError(1), ValueError(2), ValueError(3)
    first.__cause__, first.__context__, second.__cause__ = second, third, first
    assert {id(each) for each in _chain(first)} == {id(first), id(second), id(third)}
    assert _chain(None) == []


@pytest.mark.slow
def test_the_main_process_goes_first_and_its_value_counts(tmp_path: Path) -> None:
    assert both(tmp_path, "nothing") == ("done 0", "done 0")
