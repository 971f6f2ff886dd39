"""Reader of sweeps: from a path, a bundled name or a dictionary, with error messages like those of recipes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from compress.core import resources
from compress.core.percent import fraction
from compress.recipe.models import BUNDLED, Recipe
from compress.recipe.origin import Origin
from compress.recipe.overrides import apply_overrides, assign
from compress.recipe.problems import problems_of, raise_all, show
from compress.recipe.reading import find_file, find_recipe, read_source, replace_keys
from compress.recipe.yaml_source import Path as KeyPath
from compress.sweeps.base import BaseRecipe
from compress.sweeps.metrics import METRICS
from compress.sweeps.models import Constraint, Sweep, SweepFile
from compress.sweeps.space import Values, read_values
from runtime.config.messages import did_you_mean, listing
from runtime.errors import RequestError
from runtime.system.sizes import byte_count

_FIXED = {
    "name": "a trial has the name of its recipe", "output": "a trial is written into the sweep's directory",
    "description": "it changes nothing", "sample": "it changes nothing", "model": "trials are compared with one model; sweep each apart",
    "evaluate": "trials that are measured on different text cannot be compared",
}  # fmt: skip
# Of `calibration`: what decides which rows are evaluated, where a part of the text is held out.
_SPLIT = ("text_column", "split", "subset", "packing", "sequence_length")


def load_sweep(
    source: str | Path | Mapping[str, Any],
    *,
    model: str | Path | None = None,
    output: str | Path | None = None,
    set: Iterable[str] = (),
    jobs: int | None = None,
) -> tuple[Sweep, BaseRecipe]:
    """Read and validate a sweep and the recipe that it varies.

    Args:
        source: a YAML file, the name of a bundled sweep, or a dictionary with its keys.
        model, output, jobs: in place of the file's.
        set: `KEY=VALUE` texts that change the recipe for all trials.

    Raises:
        RequestError: with one line a problem, each naming file, line, key, what was found and what is allowed.
    """
    data, origin = read_source(source, find_sweep, "sweep", SweepFile)
    replace_keys(data, origin, model=model, output=output, jobs=jobs)
    sweep = _build(data, origin)
    file = sweep.file
    recipe, places = read_source(_recipe_path(file.recipe, origin), find_recipe, "recipe", Recipe)
    if file.model is not None:
        recipe["model"], places.overrides["model",] = file.model, origin.place(("model",))
    for key, value in file.set.items():
        place = origin.place(("set", key))
        places.overrides[assign(recipe, key.split("."), value, place)] = place
    apply_overrides(recipe, set, places)
    base = BaseRecipe(recipe, places, {key: origin.place(("vary", key)) for key in sweep.vary})
    _check_evaluated(sweep, base, origin)
    return sweep, base


def find_sweep(source: str | Path) -> Path:
    """The file that `source` means: a path, or the bare name of a bundled sweep."""
    return find_file(Path(source), "sweep", resources.bundled_sweeps())


def _recipe_path(name: str, origin: Origin) -> str | Path:
    for directory in origin.search_directories(("recipe",)):
        if (directory / name).is_file():
            return directory / name
    bundled = resources.bundled_recipes()
    if name in bundled:
        return name
    hint = did_you_mean(name, bundled) or "."
    text = f"no recipe '{name}' beside the sweep, in the working directory or bundled{hint} Bundled recipes: {listing(bundled)}"
    raise RequestError(origin.at(("recipe",), text))


def _build(data: dict[str, Any], origin: Origin) -> Sweep:
    problems: list[str] = []
    try:
        file = SweepFile.model_validate(data)
    except ValidationError as error:
        raise_all(problems_of(error, SweepFile, (), origin, data))
        raise
    sweep = Sweep(file, _vary(file.vary, origin, problems), _constraints(file.constraints, origin, problems))
    if file.ray is not None and "jobs" in file.model_fields_set:
        problems.append(origin.at(("jobs",), "a sweep on Ray has no jobs; ray.at_once limits the trials at a time"))
    raise_all(problems)
    return sweep


def _vary(written: dict[str, Any], origin: Origin, problems: list[str]) -> dict[str, Values]:
    found: dict[str, Values] = {}
    for key, values in written.items():
        place = ("vary", key)
        parts = key.split(".")
        around = next((other for other in written if other != key and key.startswith(f"{other}.")), None)
        if not all(parts):
            problems.append(origin.at(place, "expected a dotted key of the recipe, such as stages.0.quantize.bits"))
        elif parts[0] in _FIXED:
            problems.append(origin.at(place, f"'{parts[0]}' cannot be varied: {_FIXED[parts[0]]}"))
        elif around is not None:
            problems.append(origin.at(place, f"it lies within '{around}', which is varied too; vary one of them"))
        else:
            try:
                found[key] = read_values(values, origin, place)
            except RequestError as error:
                problems.append(str(error))
    return found


def _constraints(written: dict[str, Any], origin: Origin, problems: list[str]) -> list[Constraint]:
    found = []
    for name, bounds in written.items():
        path = ("constraints", name)
        if name not in METRICS:
            text = f"unknown metric{did_you_mean(name, METRICS) or '.'} Allowed: {listing(METRICS)}"
            problems.append(origin.at(path, text))
        elif not isinstance(bounds, dict) or not bounds:
            problems.append(origin.at(path, f"expected {{max: ...}} or {{min: ...}}, got {show(bounds)}"))
        else:
            for bound, limit in bounds.items():
                if bound not in ("min", "max"):
                    text = f"unknown key{did_you_mean(bound, ('min', 'max')) or '.'} Allowed: min, max"
                    problems.append(origin.at((*path, bound), text))
                    continue
                try:
                    found.append(Constraint(name, bound, _limit(name, limit)))
                except ValueError as error:
                    problems.append(origin.at((*path, bound), str(error)))
    return found


def _limit(name: str, written: Any) -> float:
    unit = METRICS[name].unit
    if unit == "B":
        return byte_count("a bound of bytes", written)
    value = fraction(written) if unit == "%" else written
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"expected a number, got {show(written)}")
    return float(value)


def _check_evaluated(sweep: Sweep, base: BaseRecipe, origin: Origin) -> None:
    """Refuse metrics of the recipe's evaluation where the recipe has none, and values by which trials are evaluated on different text."""
    wanted: list[tuple[KeyPath, str]] = [(("objectives",), name) for name in sweep.file.objectives]
    wanted += [(("constraints", constraint.metric), constraint.metric) for constraint in sweep.constraints]
    for path, name in wanted:
        if METRICS[name].origin == "evaluation" and base.data.get("evaluate") is None:
            text = f"{name} is not measured, as the recipe {base.origin.file} has no section 'evaluate'"
            raise RequestError(origin.at(path, text))
    evaluate, calibration = base.data.get("evaluate"), base.data.get("calibration")
    if not isinstance(evaluate, dict) or evaluate.get("data") is not None:
        return
    text = calibration.get("data", BUNDLED) if isinstance(calibration, dict) else BUNDLED
    for key in sweep.vary:
        name = key.partition(".")[2].partition(".")[0]
        split = name in ("", "data") or (text != BUNDLED and name in _SPLIT)
        if key.partition(".")[0] == "calibration" and split:
            reason = f"{key} changes the held-out evaluation text, so points could not be compared; name a text in evaluate.data"
            raise RequestError(origin.at(("vary", key), reason))
