"""Points of a sweep that fit the model: checked against it before anything is run."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Container
from typing import Any

from rich.console import Console
from rich.progress import track

from compress.recipe import Recipe, locate_model
from compress.run.session import Session
from compress.sweeps.base import BaseRecipe
from compress.sweeps.models import Sweep
from compress.sweeps.search import Grid, Study
from compress.sweeps.space import Range, Values, text_of
from runtime.config.messages import listing
from runtime.errors import ArtifactError, CompressError, RequestError, ResourceError

_DRAWS = 200


def first_recipe(
    sweep: Sweep, base: BaseRecipe, search: Grid | Study, device: str, known: Container[str] = (), quiet: bool = False
) -> tuple[Recipe, dict[str, str]]:
    """The recipe of the first point that fits the model. All points of a grid are checked; of a search, draws until one fits.

    Args:
        known: keys (`Trial.key`) of points that were checked when the sweep was begun, and are not again.
        quiet: no progress bar.

    Returns:
        The recipe, and of a grid {key of a point that does not fit: the reason}.

    Raises:
        RequestError: no point fits; the checkpoint cannot be used, or there is none.
    """
    located: dict[str, str] = {}

    def check(values: dict[str, Any]) -> Recipe | RequestError:
        """The recipe of a point, or what is wrong with it."""
        recipe = None
        try:
            recipe = base.at(values)
            if not located:  # once: a hub is asked over the network
                located["model"] = str(locate_model(recipe))
            Session.open(recipe.model_copy(update=located), device)
        except RequestError as error:
            no_model = recipe is not None and not located
            if no_model or isinstance(error, (ResourceError, ArtifactError)):  # no values make up for it
                raise
            return error
        return recipe

    def refusal(error: RequestError, values: dict[str, Any], where: str) -> RequestError:
        written = listing(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items())
        return RequestError(f"{error} ({where} {written})")

    if isinstance(search, Grid):
        new = [search.points[0], *(values for values in search.points[1:] if text_of(values) not in known)]
        points = track(new, "checking combinations", console=Console(stderr=True), transient=True, disable=quiet)
        recipe: Recipe | None = None
        unfit: dict[str, str] = {}
        reasons: dict[str, RequestError] = {}
        for values in itertools.chain(points, (values for values in search.points if values not in new)):
            if recipe is not None and text_of(values) in known:
                continue
            found = check(values)
            if isinstance(found, Recipe):
                recipe = recipe or found
            else:
                unfit[text_of(values)] = str(found)
                reasons.setdefault(str(found), refusal(found, values, "in the trial with"))
        if recipe is None:
            raise RequestError("\n".join(map(str, reasons.values())))
        return recipe, unfit
    draw = random.Random(0)  # the same combinations every time
    refused: list[CompressError] = []
    while len(refused) < _DRAWS:
        values = {key: _draw(values, draw) for key, values in sweep.vary.items()}
        found = check(values)
        if isinstance(found, Recipe):
            return found, {}
        refused.append(refusal(found, values, f"as in all {_DRAWS} combinations drawn, here"))
    raise refused[0]


def _draw(values: Values, draw: random.Random) -> Any:
    if not isinstance(values, Range):
        return draw.choice(values.choices)
    count = values.count()
    return draw.uniform(values.low, values.high) if count is None else values.at(draw.randrange(count))
