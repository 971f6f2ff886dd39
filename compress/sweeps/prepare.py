"""What is checked before the first trial: every point of a grid against the recipe and the model, and whose sweep this is."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from compress.nearest import listing
from compress.recipe.models import Recipe
from compress.sweeps.base import BaseRecipe
from compress.sweeps.grid import Grid
from compress.sweeps.models import Sweep
from compress.sweeps.space import Range, Values
from compress.sweeps.study import Study
from runtime.errors import RequestError

_DRAWS = 200


def open_search(sweep: Sweep) -> Grid | Study:
    """What proposes trials."""
    return Grid(sweep) if sweep.search is None else Study(sweep)


def first_recipe(sweep: Sweep, base: BaseRecipe, search: Grid | Study, device: str) -> Recipe:
    """The recipe of some point that can be carried out, as far as that is known before; of a grid, all points are checked.

    Raises:
        RequestError: a point of a grid that cannot be; of a search, none that can.
    """
    from compress.pipeline.passes import Passes

    if isinstance(search, Grid):
        recipes = []
        for values in search.points:
            try:
                recipe = base.at(values)
                Passes.open(recipe, device)
            except RequestError as error:
                raise RequestError(f"{error} (in the trial with {words(values)})") from error
            recipes.append(recipe)
        return recipes[0]
    first: RequestError | None = None
    for values in _draws(sweep):
        try:
            recipe = base.at(values)
            Passes.open(recipe, device)
        except RequestError as error:
            first = first or RequestError(
                f"{error} (as in all of {_DRAWS} combinations that were drawn, here {words(values)})"
            )
            continue
        return recipe
    raise first or RequestError("vary: there are no values")


def identity(sweep: Sweep, base: BaseRecipe, recipe: Recipe, device: str) -> dict[str, Any]:
    """What must be equal for a resume, or may only grow (`compress.sweeps.directory.check_continues`).

    Args:
        recipe: of some point.
    """
    from compress.pipeline.finish import evaluation_windows
    from compress.pipeline.passes import Passes

    session = Passes.open(recipe, device).session
    found = session.identity(evaluation_windows(session))
    found["recipe"] = base.digest()
    if any(key.partition(".")[0] == "calibration" for key in sweep.vary):
        found.pop("calibration_text", None)
    return {
        "sweep": sweep.settled(),
        "vary": {key: values.plain() for key, values in sweep.vary.items()},
        "trials": None if sweep.search is None else sweep.search.trials,
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
    listed = values.grid()
    if listed is not None:
        return draw.choice(listed)
    assert isinstance(values, Range)
    return draw.uniform(values.low, values.high)
