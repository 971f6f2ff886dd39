"""Assignment of stages to modules: a recipe's stages laid over a model, later ones over earlier ones."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from compress.model.partial import PartialModel
from compress.quantize import METHODS, candidate_schemes, check_fits, resolve_scheme
from compress.recipe.models import Recipe
from compress.recipe.stages import Stage
from compress.recipe.targets import DEFAULT_IGNORE, ModuleInfo, matches, select, unmatched_message
from compress.weights.layer_task import LayerTask
from runtime import formats
from runtime.config.messages import listing
from runtime.errors import RequestError
from runtime.formats.grid import GridScheme
from runtime.modeling.experts import expert_of
from runtime.modeling.linear_modules import get_matrix, is_matrix
from runtime.system.sizes import size

#: Largest share of the targeted weights in layers narrower than a group, which then stay as they are; above it, the group size is refused.
MOST_NARROW = 0.1


@dataclass(frozen=True)
class Uncompressed:
    """A layer among the default targets that cannot be compressed; `why` follows its name in messages."""

    name: str
    why: str


def assign(recipe: Recipe, modules: Sequence[ModuleInfo]) -> tuple[dict[str, LayerTask], list[Uncompressed]]:
    """The tasks of the layers that stages target, and the layers that default targets mean and no stage can change: a few small ones whose
    rows are shorter than a group.

    Args:
        recipe: the validated recipe.
        modules: every module of the model that holds a weight matrix, in model order.

    Raises:
        RequestError: a target that matches nothing, pruning after quantization, or a grid or pattern that does not fit
            the shape of a module; the sentence names file, line, key and module.
    """
    chosen: dict[str, dict[str, Stage]] = {module.name: {} for module in modules}
    for stage in recipe.stages:
        if stage.phase != "layers":
            continue
        for module in _selected(recipe, stage, modules):
            stages = chosen[module.name]
            if stage.kind == "prune" and (earlier := stages.get("quantize")) is not None:
                # Pruning afterwards would change codes, and the quantizer could no longer compensate it.
                text = f"'{module.name}' is already quantized by stage {earlier.index}; put the prune stage before it"
                raise RequestError(_at(recipe, stage, (), text))
            stages[stage.kind] = stage
    left = _narrow(recipe, modules, chosen)
    for one in left:
        chosen[one.name] = {}
    return {m.name: _task(recipe, m, chosen[m.name]) for m in modules if chosen[m.name]}, left


def _narrow(recipe: Recipe, modules: Sequence[ModuleInfo], chosen: dict[str, dict[str, Stage]]) -> list[Uncompressed]:
    """Layers narrower than a group; none where they are more than `MOST_NARROW` of the weights."""
    left, weights = [], 0
    for module in modules:
        stages = chosen[module.name]
        quantize = stages.get("quantize")
        if quantize is None or not _by_default(stages):
            continue
        with recipe.origin.located((*quantize.path, "group_size")):
            form = resolve_scheme(quantize.config, None).weights
        group = None if form is None else form.group_size
        if group is not None and group > module.shape[1]:
            left.append(Uncompressed(module.name, f"rows of {module.shape[1]} weights, and groups of {group}"))
            weights += math.prod(module.shape)
    meant = sum(math.prod(module.shape) for module in modules if chosen[module.name])
    return left if weights <= MOST_NARROW * meant else []


def _by_default(stages: dict[str, Stage]) -> bool:
    return all("targets" not in stage.config.model_fields_set for stage in stages.values())


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
        where = ("targets",) if "targets" in given else ()
        raise RequestError(_at(recipe, stage, where, unmatched_message(targets, ignore, modules)))
    return found


def _task(recipe: Recipe, module: ModuleInfo, stages: dict[str, Stage]) -> LayerTask:
    prune, quantize = stages.get("prune"), stages.get("quantize")
    sparsity = None
    if prune is not None:
        with recipe.origin.located((*prune.path, "pattern")):
            prune.config.parsed.check(module.shape, module.name)
        sparsity = str(prune.config.parsed)
    last = quantize or prune
    assert last is not None
    key = "pattern" if quantize is None else "group_size"
    if {"scheme", "group_size"} & last.config.model_fields_set == {"scheme"}:
        key = "scheme"
    with recipe.origin.located((*last.path, key)):
        scheme = resolve_scheme(quantize.config if quantize else None, sparsity)
        candidates = candidate_schemes(quantize.config, sparsity) if quantize else ()
        for possible in candidates or (scheme,):
            try:
                check_fits(possible, module.shape, module.name)
            except RequestError as error:
                raise RequestError(f"{error}, or name it in ignore") from None
            formats.choose(possible, module.shape)
    scheme = next((one for one in candidates if one.grid is None), scheme)
    if scheme.transform is not None and quantize is not None and METHODS[quantize.config.method].scales is not None:
        text = f"method {quantize.config.method} scales inputs, and {scheme.transform.name} mixes or reorders them: give gptq or rtn"
        raise RequestError(_at(recipe, quantize, ("input_transform",) if quantize.config.input_transform else (), text))
    if scheme.weights is not None and quantize is not None and (scheme.grid is None or scheme.transform is not None):
        later = next((s for s in recipe.stages if s.kind == "recover" and s.index > quantize.index), None)
        if later is not None:
            basis = "" if scheme.transform is None else f", in the basis of input_transform {scheme.transform.name}"
            stored = f"{scheme.weights.describe()}{basis}"
            text = f"recovery trains weights on a grid, and stage {quantize.index} stores {module.name} as {stored}"
            raise RequestError(_at(recipe, later, (), f"{text}; put the recover stage before it"))
    if quantize is not None and quantize.config.objective == "output":
        forms = [one.weights for one in candidates or (scheme,) if one.weights is not None]
        form = next((form for form in forms if not form.rows_apart), None)
        if form is not None:
            kind = "one scale for all rows" if isinstance(form, GridScheme) else form.describe()
            name = "quality best (objective output)" if quantize.config.quality == "best" else "objective output"
            text = f"{name} solves row after row, and {module.name} has {kind}; give objective: propagated, or a scale for each row"
            raise RequestError(_at(recipe, quantize, ("objective",), text))
    return LayerTask(
        prune.config if prune else None, quantize.config if quantize else None, candidates[-1] if candidates else scheme,
        prune.index if prune else None, quantize.index if quantize else None, _by_default(stages), candidates=candidates,
    )  # fmt: skip


def _at(recipe: Recipe, stage: Stage, key: tuple[str | int, ...], text: str) -> str:
    return recipe.origin.at((*stage.path, *key), text)


#: Share of the checkpoint's bytes from which on a kind of tensor is reported.
WORTH = 0.01
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def unreached(model: PartialModel) -> list[str]:
    """A sentence for each kind of tensor in the blocks that has two or more dimensions and belongs to no linear layer."""
    checkpoint, extra = model.checkpoint, set(model.extra)
    found: dict[str, list[str]] = {}
    for index in range(len(model.blocks)):
        for name in model.block_names(index):
            home, _, leaf = name.rpartition(".")
            linear = leaf == "weight" and name not in extra and is_matrix(model.model.get_submodule(home))
            if len(checkpoint.shape(name)) >= 2 and name not in extra and not linear:
                found.setdefault(_NUMBER.sub("*", name), []).append(name)
    total = sum(checkpoint.nbytes(name) for name in checkpoint.names())
    sizes = {kind: sum(map(checkpoint.nbytes, names)) for kind, names in found.items()}
    sentences = []
    for kind in sorted(found, key=lambda kind: -sizes[kind]):
        if sizes[kind] < WORTH * total:
            continue
        first, shape = found[kind][0], list(checkpoint.shape(found[kind][0]))
        part = model.model.get_submodule(first.rpartition(".")[0])
        experts = len(shape) == 3 and not isinstance(part, nn.Conv1d)
        why = "holds experts in an unknown layout" if experts else "is no linear layer"
        why = f"its module {type(part).__name__} {why}" if model.runs else "by its name and shape it is no linear layer"
        sentences.append(
            f"{kind} {shape} stays as it is ({len(found[kind])} tensors, {size(sizes[kind])}, {sizes[kind] / total:.0%} of the "
            f"weights): {why}"
        )
    return sentences


def not_propagated(model: PartialModel, tasks: Mapping[str, LayerTask], tokens: int) -> list[str]:
    """Sentences about layers that are not fitted to what their objective, `propagated` or `output`, says."""
    names = [name for name, task in tasks.items() if task.propagated]
    objective = f"objective {', '.join(sorted({tasks[name].quantize.objective for name in names}))}"
    asked = {name: get_matrix(model.model.get_submodule(name)).shape[1] for name in names}
    routed = [name for name in asked if expert_of(model.model, name) is not None]
    widest = max((columns for name, columns in asked.items() if name not in routed), default=0)
    found = []
    if routed:
        found.append(
            f"{objective}: {len(routed)} layers of routed experts are fitted to their own outputs, since other tokens may be "
            "routed to them in the original model"
        )
    outside = [name for name in asked if tasks[name].output_aware and not model.is_inside(name)]
    if outside:
        found.append(
            f"objective output: {listing(outside)} is fitted to what it gives in the original model (propagated): no block holds it"
        )
    if tokens <= widest:
        found.append(
            f"{objective}: {tokens} tokens of calibration text tell nothing of layers with as many inputs ({widest} the widest), "
            "which are fitted to their own outputs; give more text (calibration.samples)"
        )
    return found


def left_alone(left: Sequence[Uncompressed]) -> list[str]:
    """A sentence that lists the layers left uncompressed and why; none without any."""
    alike = Counter((_NUMBER.sub("*", one.name), one.why) for one in left)
    if not alike:
        return []
    told = [f"{name} ({why}{f'; {count} layers' if count > 1 else ''})" for (name, why), count in alike.items()]
    return [f"left uncompressed: {listing(told)}"]
