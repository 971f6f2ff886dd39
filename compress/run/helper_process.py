"""Helper processes of a run: all but the main one where a launcher has started several.

They take part in passes over blocks and in training; everything else is the main process's alone. It sends them each task, and
tells them when there are no more, also where the run failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compress.core.processes import Team
from compress.model.context import choose_device
from compress.recipe import KINDS, Recipe
from compress.run.result import LimitError
from runtime.errors import CompressError


@contextmanager
def asking(team: Team, output: Path) -> Iterator[None]:
    """The main process: when this is left, all others are told that there is nothing more, and whether `output` is complete."""
    done: dict[str, Any] = {"complete": None}
    try:
        yield
        done["complete"] = str(output.absolute())
    except LimitError:
        done["complete"] = str(output.absolute())
        raise
    finally:
        team.broadcast(done)
        team.meet()  # a process that is gone before the others have heard it would abort them


def assist(recipe: Recipe, device: str, team: Team) -> Path:
    """Any other process: take part until the main one says that there is nothing more; the artifact.

    Raises:
        CompressError: the run failed.
    """
    where = str(team.device(choose_device(device)))
    nothing: dict[str, Any] = {}
    while "complete" not in (asked := team.broadcast(nothing)):
        KINDS[asked["kind"]].assist(recipe, asked["task"], where, team)
    team.meet()
    if asked["complete"] is None:
        raise CompressError("the run failed in the main process, which says why")
    return Path(asked["complete"])
