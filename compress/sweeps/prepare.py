"""Checks before the first trial: every point of a grid against the recipe and the model, and the owner of the directory."""

from __future__ import annotations

import json
import random
from collections.abc import Container, Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import track

from compress.recipe import Recipe, locate_model
from compress.sweeps.base import BaseRecipe
from compress.sweeps.models import Sweep
from compress.sweeps.search import Grid, Study
from compress.sweeps.space import Range, Values, text_of
from runtime.config.messages import listing
from runtime.errors import RequestError

_DRAWS = 200


def first_recipe(
    sweep: Sweep,
    base: BaseRecipe,
    search: Grid | Study,
    device: str,
    known: Container[str] = (),
    quiet: bool = False,
) -> Recipe:
    """The recipe of the first valid point. All points of a grid are checked; of a search, draws until one is valid.

    Args:
        known: keys (`Trial.key`) of points that were checked when the sweep was begun, and are not again.
        quiet: no progress bar.

    Raises:
        RequestError: an invalid point of a grid; a search without a valid draw; or no such model.
    """
    from compress.run.session import Session

    is_grid = isinstance(search, Grid)
    points: Iterable[dict[str, Any]] = _draws(sweep)
    if isinstance(search, Grid):
        unchecked = [search.points[0], *(values for values in search.points[1:] if text_of(values) not in known)]
        points = track(unchecked, "checking combinations", console=Console(stderr=True), transient=True, disable=quiet)
    model: str | None = None
    first: Recipe | None = None
    refused: RequestError | None = None
    for values in points:
        found: Recipe | None = None
        try:
            found = base.at(values)
            model = model or str(locate_model(found))  # once: a hub is asked over the network
            Session.open(found.model_copy(update={"model": model}), device)
            first = first or found
        except RequestError as error:
            if found is not None and model is None:  # no values make up for a model that is not there
                raise
            refused = refused or RequestError(f"{error} ({_where(search, values)})")
        if refused is not None if is_grid else first is not None:
            break
    if first is None or (refused is not None and is_grid):
        raise refused or RequestError("vary: there are no values")
    return first


def _where(search: Grid | Study, values: dict[str, Any]) -> str:
    if isinstance(search, Grid):
        return f"in the trial with {words(values)}"
    return f"as in all {_DRAWS} combinations drawn, here {words(values)}"


def identity(sweep: Sweep, base: BaseRecipe, recipe: Recipe, device: str) -> dict[str, Any]:
    """Data that must be equal for a resume, or may only grow (`compress.sweeps.directory.check_continues`).

    Args:
        recipe: of some point.
    """
    from compress.run.session import Session
    from compress.run.session import identity as identity_of_run

    session = Session.open(recipe, device)  # holds the checkpoints that its context reads
    found = identity_of_run(session.context)
    found["recipe"] = base.digest()
    if any(key.partition(".")[0] == "calibration" for key in sweep.vary):
        found.pop("calibration_text", None)
    return {
        "sweep": sweep.settled(),
        "vary": {key: values.plain() for key, values in sweep.vary.items()},
        "trials": None if sweep.file.search is None else sweep.file.search.trials,
        "base": found,
    }


def words(values: dict[str, Any]) -> str:
    """Values as a sentence has them."""
    return listing(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items())


def _draws(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Some combinations of the values, the same every time."""
    draw = random.Random(0)
    for _ in range(_DRAWS):
        yield {key: _draw(values, draw) for key, values in sweep.vary.items()}


def _draw(values: Values, draw: random.Random) -> Any:
    if not isinstance(values, Range):
        return draw.choice(values.values)
    count = values.count()
    return draw.uniform(values.low, values.high) if count is None else values.at(draw.randrange(count))
