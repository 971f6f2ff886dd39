"""Recipe from a file, a bundled name or a dictionary."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from compress.core import resources
from compress.recipe.models import Recipe
from compress.recipe.origin import Origin
from compress.recipe.overrides import apply_overrides
from compress.recipe.problems import problems_of, raise_all, show
from compress.recipe.stages import KINDS, Stage, StageError, parse_stage
from compress.recipe.yaml_source import MAX_BYTES, MAX_STAGES, parse
from runtime.config.messages import did_you_mean, listing
from runtime.errors import RequestError


def load(
    source: str | Path | Mapping[str, Any] | Recipe,
    *,
    model: str | Path | None = None,
    output: str | Path | None = None,
    set: Iterable[str] | Mapping[str, Any] = (),
) -> Recipe:
    """Read and validate a recipe.

    Args:
        source: a YAML file, the name of a bundled recipe, a dictionary with a recipe's keys, or a `Recipe` (copied).
        model: replaces the recipe's `model`; without an output of its own, the output directory is then named after it too.
        output: replaces the recipe's `output`.
        set: `KEY=VALUE` texts, or values by dotted key, applied before validation.

    Raises:
        RequestError: with one line a problem, each naming file, line, key, what was found and what is allowed.
    """
    if isinstance(source, Recipe):
        data, origin = source.resolved() | {"output": source.output}, copy.deepcopy(source.origin)
    else:
        data, origin = read_source(source, find_recipe, "recipe", Recipe)
    own = data.get("model")
    replace_keys(data, origin, model=model, output=output)
    apply_overrides(data, set, origin)
    given, base = data.get("model"), data.get("output") or f"out/{data.get('name')}"
    chosen = output is not None or ("output",) in origin.overrides
    if not chosen and given != own and isinstance(given, str) and isinstance(base, str):
        data["output"] = f"{base}-{_directory_name(given)}"
    return build(data, origin)


def _directory_name(model: str) -> str:
    """The last part of a path or of a hub id, in characters that every file system takes."""
    name = Path(model).expanduser().name
    if not name.strip("."):  # `.` and `..` are called by what they are
        name = Path(model).resolve().name
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model"


def read_source(
    source: str | Path | Mapping[str, Any], find: Callable[[str | Path], Path], what: str, model: type[BaseModel]
) -> tuple[dict[str, Any], Origin]:
    """The data of a recipe or sweep, not validated yet, and where its keys are written.

    Args:
        source: its keys, or what `find` gives the file of.
        what: `recipe` or `sweep`, and the `model` that will validate it.
    """
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source)), Origin()
    path = find(source)
    data, lines = parse(_read_text(path), str(path))
    origin = Origin(path, lines)
    if not isinstance(data, dict):
        text = f"a {what} is a mapping of keys ({listing(model.model_fields)}), got {show(data)}"
        raise RequestError(origin.at((), text))
    return data, origin


def replace_keys(data: dict[str, Any], origin: Origin, **options: Any) -> None:
    """Put options of the command line, where they are given, in place of the keys of the same names."""
    for key, option in options.items():
        if option is not None:
            data[key] = option if isinstance(option, int) else str(option)
            origin.overrides[key,] = f"--{key} {option}"


def build(data: dict[str, Any], origin: Origin) -> Recipe:
    """Validate recipe data; all problems are reported at once."""
    problems: list[str] = []
    stages: list[Stage] = []
    entries = data.get("stages")
    if isinstance(entries, list) and entries:
        if len(entries) > MAX_STAGES:
            raise RequestError(origin.at(("stages",), f"{len(entries)} stages; at most {MAX_STAGES} are allowed"))
        for index, entry in enumerate(entries):
            try:
                stages.append(parse_stage(entry, index, origin))
            except StageError as error:
                problems += error.problems
        for kind in {stage.kind: KINDS[stage.kind] for stage in stages}.values():
            first, *more = [stage for stage in stages if stage.kind == kind.name]
            for second in more if kind.once else ():
                problems.append(origin.at(second.path, kind.once.format(first=first.index)))
    elif "stages" in data:
        text = f"expected one stage or more ({listing(f'{kind}: ...' for kind in KINDS)}), got {show(entries)}"
        problems.append(origin.at(("stages",), text))
    # A stand-in keeps the check of the other keys independent of stages that are already known to be wrong.
    stand_in = stages or [Stage("prune", "", None, 0)]
    fields: dict[str, Any] = {**data, "stages": stand_in} if "stages" in data else data
    try:
        recipe = Recipe.model_validate(fields)
    except ValidationError as error:
        raise_all(problems_of(error, Recipe, (), origin, fields) + problems)
        raise
    raise_all(problems)
    recipe.locate(origin)
    _check_model_free(recipe)
    return recipe


def _check_model_free(recipe: Recipe) -> None:
    """RequestError where a recipe that is `model_free` asks for something that runs the model."""
    if not recipe.model_free:
        return
    running = [(stage.path, stage.kind) for stage in recipe.stages if stage.phase != "layers"]
    running += [((key,), key) for key in ("evaluate", "sample") if getattr(recipe, key) is not None]
    if running:
        path, what = running[0]
        text = f"{what} runs the model, and the recipe is model_free, which runs none: leave one of the two out"
        raise RequestError(recipe.origin.at(path, text))


def find_recipe(source: str | Path) -> Path:
    """The file that `source` means: a path, or the bare name of a bundled recipe."""
    path = Path(source)
    if path.stem in resources.bundled_sweeps() and not path.exists():
        raise RequestError(f"{path}: this is a bundled sweep, not a recipe; run it with `compress sweep {path.stem}`")
    return find_file(path, "recipe", resources.bundled_recipes())


def find_file(path: Path, what: str, bundled: Mapping[str, Path]) -> Path:
    """The file at `path`, or the bundled recipe or sweep (`what`) of that name."""
    if path.is_file():
        return path
    if str(path) in bundled:
        return bundled[str(path)]
    if path.is_dir():
        raise RequestError(f"{path}: a {what} is a YAML file, but this is a directory")
    beside = sorted(str(other) for other in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
    hint = did_you_mean(str(path), [*beside, *bundled])
    if not hint and path.stem in bundled:
        hint = f"; did you mean the bundled {what} '{path.stem}'?"
    raise RequestError(f"{path}: no such {what} file{hint or '.'} Bundled {what}s: {listing(bundled)}")


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RequestError(f"{path}: {path.stat().st_size:,} bytes; at most {MAX_BYTES:,} are allowed")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: not a YAML text file (byte {error.start} is not UTF-8)") from None
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from None
