"""Assignment of stages to modules: a recipe's stages laid over a model, later ones over earlier ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from compress.model.partial import PartialModel
from compress.prune import PruneConfig
from compress.quantize import QuantizeConfig, check_fits, resolve_scheme
from compress.recipe.models import Recipe
from compress.recipe.stages import Stage
from compress.recipe.targets import DEFAULT_IGNORE, ModuleInfo, matches, select, unmatched_message
from runtime import formats
from runtime.config.messages import listing
from runtime.errors import RequestError
from runtime.formats.scheme import Scheme
from runtime.modeling.linear_modules import is_matrix

__all__ = ["Assignment", "Left", "ModuleInfo", "assign", "lay_out"]

#: Of the weights that stages mean, the most that layers may hold that stay as they are for being narrower than a group; of more the group
#: size does not fit the model.
MOST_NARROW = 0.1


@dataclass
class Assignment:
    """The work on one module.

    Attributes:
        prune, quantize: config of the stage that prunes and of the one that quantizes it; None where no stage does.
        scheme: what its compressed weight will be.
        stages: indices of the stages that act on it, in recipe order.
        prune_stage, quantize_stage: index of the one that prunes it, and of the one that quantizes it.
        by_default: no stage names it; it is one of all linear layers.
    """

    prune: PruneConfig | None
    quantize: QuantizeConfig | None
    scheme: Scheme
    stages: list[int]
    prune_stage: int | None = None
    quantize_stage: int | None = None
    by_default: bool = False


@dataclass(frozen=True)
class Left:
    """A module that no stage names, and that stays as it is since it cannot be compressed as the others are. `why` goes behind its name."""

    name: str
    why: str


def assign(recipe: Recipe, modules: Sequence[ModuleInfo]) -> dict[str, Assignment]:
    """Find what each module gets; modules that no stage targets are absent.

    Args:
        recipe: the validated recipe.
        modules: every module of the model that holds a weight matrix, in model order.

    Raises:
        RequestError: a target that matches nothing, pruning after quantization, or a grid or pattern that does not fit
            the shape of a module; the sentence names file, line, key and module.
    """
    return lay_out(recipe, modules)[0]


def lay_out(recipe: Recipe, modules: Sequence[ModuleInfo]) -> tuple[dict[str, Assignment], list[Left]]:
    """As `assign`, with what default targets mean and no stage changes: few small layers whose rows are shorter than a group."""
    chosen: dict[str, dict[str, Stage]] = {module.name: {} for module in modules}
    for stage in recipe.stages:
        apply = _LAYERED.get(stage.kind)
        if apply is not None:
            for module in _selected(recipe, stage, modules):
                apply(recipe, stage, module, chosen[module.name])
    left = _narrow(recipe, modules, chosen)
    stay = {one.name for one in left}
    assignments = {}
    for module in modules:
        stages = chosen[module.name]
        if stages and module.name not in stay:
            assignments[module.name] = _assignment(recipe, module, stages)
    return assignments, left


def _narrow(recipe: Recipe, modules: Sequence[ModuleInfo], chosen: dict[str, dict[str, Stage]]) -> list[Left]:
    """What stays for being narrower than a group: nothing where that would be much."""
    left, weights = [], 0
    for module in modules:
        stages = chosen[module.name]
        quantize = stages.get("quantize")
        if quantize is None or not _by_default(stages):
            continue
        with _named(recipe, quantize, "group_size"):
            grid = resolve_scheme(quantize.config, None).grid
        if grid is not None and grid.strategy == "group" and (grid.group_size or 0) > module.shape[1]:
            left.append(Left(module.name, f"rows of {module.shape[1]} weights, and groups of {grid.group_size}"))
            weights += module.shape[0] * module.shape[1]
    meant = sum(module.shape[0] * module.shape[1] for module in modules if chosen[module.name])
    return left if weights <= MOST_NARROW * meant else []


def _by_default(stages: dict[str, Stage]) -> bool:
    return all("targets" not in stage.config.model_fields_set for stage in stages.values())


def _prune(recipe: Recipe, stage: Stage, module: ModuleInfo, stages: dict[str, Stage]) -> None:
    earlier = stages.get("quantize")
    if earlier is not None:
        # Pruning afterwards would work on codes, and the quantizer could no longer repair what it removes.
        text = f"'{module.name}' is already quantized by stage {earlier.index}; put the prune stage before it"
        raise RequestError(_at(recipe, stage, (), text))
    stages["prune"] = stage


def _quantize(recipe: Recipe, stage: Stage, module: ModuleInfo, stages: dict[str, Stage]) -> None:
    stages["quantize"] = stage


_LAYERED: dict[str, Callable[[Recipe, Stage, ModuleInfo, dict[str, Stage]], None]] = {
    "prune": _prune,
    "quantize": _quantize,
}
"""How a stage of a kind that works on single modules enters a module's stages; other kinds work on the whole model."""


def _selected(recipe: Recipe, stage: Stage, modules: Sequence[ModuleInfo]) -> list[ModuleInfo]:
    given = stage.config.model_fields_set
    targets, ignore = list(stage.config.targets), list(stage.config.ignore)
    for key, patterns in (("targets", targets), ("ignore", ignore)):
        if key not in given:
            continue
        for index, pattern in enumerate(patterns):
            # `ignore: [lm_head]` is right for models with tied embeddings too, where no such module is stored.
            if pattern not in DEFAULT_IGNORE and not any(matches(pattern, module) for module in modules):
                raise RequestError(_at(recipe, stage, (key, index), unmatched_message([pattern], [], modules)))
    found = select(modules, targets, ignore, ignore_is_default="ignore" not in given)
    if not found:
        raise RequestError(
            _at(recipe, stage, ("targets",) if "targets" in given else (), unmatched_message(targets, ignore, modules))
        )
    return found


def _assignment(recipe: Recipe, module: ModuleInfo, stages: dict[str, Stage]) -> Assignment:
    prune, quantize = stages.get("prune"), stages.get("quantize")
    sparsity = None
    if prune is not None:
        with _named(recipe, prune, "pattern"):
            prune.config.parsed.check(module.shape, module.name)
        sparsity = str(prune.config.parsed)
    last = quantize or prune
    assert last is not None
    with _named(recipe, last, "group_size" if quantize else "pattern"):
        scheme = resolve_scheme(quantize.config if quantize else None, sparsity)
        try:
            check_fits(scheme, module.shape, module.name)
        except RequestError as error:
            raise RequestError(f"{error}, or name it in ignore") from None
        formats.choose(scheme, module.shape)
    if scheme.weights is not None and quantize is not None and scheme.grid is None:
        later = next((s for s in recipe.stages if s.kind == "recover" and s.index > quantize.index), None)
        if later is not None:
            text = f"recovery trains weights on a grid, and stage {quantize.index} stores {module.name} as {scheme.weights.describe()}"
            raise RequestError(_at(recipe, later, (), f"{text}; put the recover stage before it"))
    return Assignment(
        prune=prune.config if prune else None,
        quantize=quantize.config if quantize else None,
        scheme=scheme,
        stages=sorted(stage.index for stage in stages.values()),
        prune_stage=prune.index if prune else None,
        quantize_stage=quantize.index if quantize else None,
        by_default=_by_default(stages),
    )


@contextmanager
def _named(recipe: Recipe, stage: Stage, key: str) -> Iterator[None]:
    """Put file, line and key before an error that only knows the module."""
    try:
        yield
    except RequestError as error:
        raise RequestError(_at(recipe, stage, (key,), str(error))) from None


def _at(recipe: Recipe, stage: Stage, key: tuple[str | int, ...], text: str) -> str:
    return recipe.origin.at((*stage.path, *key), text)


# What of a model's blocks no method can compress, since it is in no linear layer that is known as one.

#: Share of the checkpoint's bytes from which on it is worth a sentence.
WORTH = 0.01
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass
class _Like:
    """Tensors of one name but for their numbers."""

    shape: tuple[int, ...]
    count: int = 0
    bytes: int = 0


def unreached(model: PartialModel, size: Callable[[float], str]) -> list[str]:
    """A sentence for each kind of tensor in the blocks that has two or more dimensions and belongs to no linear layer.

    Args:
        size: bytes for people.
    """
    checkpoint, extra = model.checkpoint, set(model.extra)
    found: dict[str, _Like] = {}
    for index in range(len(model.blocks)):
        for name in model.block_names(index):
            shape = checkpoint.shape(name)
            home, _, leaf = name.rpartition(".")
            if len(shape) < 2 or name in extra or (leaf == "weight" and is_matrix(model.model.get_submodule(home))):
                continue
            like = found.setdefault(_NUMBER.sub("*", name), _Like(shape))
            like.count += 1
            like.bytes += checkpoint.nbytes(name)
    total = sum(checkpoint.nbytes(name) for name in checkpoint.names())
    sentences = []
    for name, like in sorted(found.items(), key=lambda item: -item[1].bytes):
        if like.bytes >= WORTH * total:
            part = model.model.get_submodule(_a_home(model, name))
            kind = type(part).__name__
            experts = len(like.shape) == 3 and not isinstance(part, nn.Conv1d)
            why = "holds experts in a way that it does not say" if experts else "is no linear layer"
            sentences.append(
                f"{name} {list(like.shape)} stays as it is ({like.count} tensors, {size(like.bytes)}, {like.bytes / total:.0%} of the "
                f"weights): its module {kind} {why}"
            )
    return sentences


def _a_home(model: PartialModel, name: str) -> str:
    """A module whose tensor goes by a name with stars."""
    pattern = re.compile(re.escape(name).replace(r"\*", r"\d+"))
    return next(own for own in model.checkpoint.names() if pattern.fullmatch(own)).rpartition(".")[0]


def left_alone(left: Sequence[Left]) -> list[str]:
    """The sentence for layers that default targets mean and that stay as they are; none without any."""
    alike = Counter((_NUMBER.sub("*", one.name), one.why) for one in left)
    if not alike:
        return []
    told = [f"{name} ({why}{f'; {count} layers' if count > 1 else ''})" for (name, why), count in alike.items()]
    return [f"what cannot be compressed as the other layers are stays as it is: {listing(told)}"]
