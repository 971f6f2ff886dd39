"""How many units a stage `structure` keeps: as its recipe says, or the most that a budget of parameters, operations or time allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from compress.model.config_sizes import Size, active_experts, number_of_experts, resized, size_of
from compress.model.couplings import shapes
from compress.prune.structure import StructureConfig
from compress.prune.structure.config import Remove
from compress.prune.structure.latency import Latency
from compress.recipe import Recipe, Stage
from runtime.errors import ArtifactError, RequestError
from runtime.modeling.skeleton import build_skeleton, find_stacks
from runtime.system.directories import cache_directory

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from compress.model.streamed import StreamedModel


def units_kept(recipe: Recipe, stage: Stage, size: Size, streamed: StreamedModel) -> tuple[int, dict[str, Any]]:
    """How many stay, and what was measured to find it."""
    config: StructureConfig = stage.config
    path = ("stages", stage.index, stage.kind)
    least, most, multiple = between(config, size)
    if isinstance(config.keep, list):
        return _least_of(config.keep, recipe, stage, size, streamed), {}
    none = f"none of {size.count} {size.unit} can go: {size.least} are needed for a token, in multiples of"
    if config.keep is not None:
        if size.least > (size.count - 1) // size.groups * size.groups:
            raise RequestError(recipe.origin.at((*path, "keep"), f"{none} {size.groups}"))
        if not size.least <= config.keep < size.count:
            why = "" if size.least == 1 else f" (a token is sent to {active_experts(streamed.config)} of them)"
            text = f"the model has {size.count} {size.unit}: {size.least} to {size.count - 1} can be kept{why}, not {config.keep}"
            raise RequestError(recipe.origin.at((*path, "keep"), text))
        if config.multiple is not None and config.keep % config.multiple:
            text = f"{config.keep} is no multiple of {config.multiple}, which `multiple` asks for"
            raise RequestError(recipe.origin.at((*path, "keep"), text))
        if config.keep % size.groups:
            text = f"{config.keep} is no multiple of {size.groups}: the model routes in so many groups, and of each as many must stay"
            raise RequestError(recipe.origin.at((*path, "keep"), text))
        return config.keep, {}
    if most < least:
        text = f"of {size.count} {size.unit} fewer cannot be kept in multiples of {multiple}; set multiple"
        if size.least > 1:
            text = f"{none} {multiple}"
        raise RequestError(recipe.origin.at((*path, "multiple" if config.multiple else "remove"), text))
    if config.ratio is not None:
        wanted = (1 - config.ratio) * size.count
        kept = round(wanted / multiple) * multiple
        if not least <= kept <= most:
            amount = "all" if kept > most else "too few" if kept else "none"
            near = most if kept > most else least
            text = (
                f"{config.ratio:.1%} of {size.count} {size.unit} leaves {wanted:.1f}, which is {amount} in multiples of {multiple}; "
                f"the nearest that can be kept is {near} ({near / size.count:.1%})"
            )
            raise RequestError(recipe.origin.at((*path, "ratio"), text))
        return kept, {}
    assert config.budget is not None
    ((name, share),) = config.budget.given.items()
    with located(recipe, (*path, "budget", name)):
        costs = _costs(name, recipe, streamed, config.remove, range(least, size.count + 1, multiple))
        whole = costs(size.count)
    choices = range(least, most + 1, multiple)
    found = _largest(choices, lambda count: costs(count) <= share * whole)
    if found is None:
        text = (
            f"with {least} of {size.count} {size.unit} the model still takes {costs(least) / whole:.1%} of its {name}"
        )
        if isinstance(costs, Latency):
            times = f"{costs.of} takes {1e3 * costs(least):.3g} ms instead of {1e3 * whole:.3g} ms"
            text += f": {times}. What was measured is kept in {cache_directory('latency')}; delete that folder to measure again"
        raise RequestError(recipe.origin.at((*path, "budget", name), text))
    return found, costs.facts(found) if isinstance(costs, Latency) else {}


def between(config: StructureConfig, size: Size) -> tuple[int, int, int]:
    """The least and the most units that stay where no number is given, and of what they are multiples."""
    multiple = math.lcm(config.multiple_of, size.groups)
    least = -(-max(size.least, min(multiple, size.count)) // multiple) * multiple
    return least, (size.count - 1) // multiple * multiple, multiple


def _least_of(keep: list[int], recipe: Recipe, stage: Stage, size: Size, streamed: StreamedModel) -> int:
    """The least of the widths of layers; RequestError where they cannot be so."""
    config: StructureConfig = stage.config
    path, depth = ("stages", stage.index, stage.kind, "keep"), size_of(streamed.config, "layers").count
    if len(keep) != depth:
        raise RequestError(recipe.origin.at(path, f"the model has {depth} layers, and {len(keep)} numbers are given"))
    odd = next((width for width in keep if width > size.count), None)
    if odd is not None:
        raise RequestError(recipe.origin.at(path, f"a layer has {size.count} {size.unit}, and cannot keep {odd}"))
    if (
        config.multiple is not None
        and (odd := next((width for width in keep if width % config.multiple), None)) is not None
    ):
        text = f"{odd} is no multiple of {config.multiple}, which `multiple` asks for"
        raise RequestError(recipe.origin.at(path, text))
    if min(keep) == size.count:
        raise RequestError(recipe.origin.at(path, f"all {size.count} {size.unit} of every layer would be kept"))
    return min(keep)


def _costs(
    name: str, recipe: Recipe, streamed: StreamedModel, remove: Remove, choices: range
) -> Callable[[int], float]:
    """What a model with so many units takes; `choices` are those that are kept, maybe."""
    if name == "latency":
        return Latency(streamed, remove, choices)
    if name == "parameters":
        return lambda count: parameters(resized(streamed.config, remove, count), streamed)
    context = recipe.calibration.sequence_length
    return lambda count: flops(resized(streamed.config, remove, count), streamed, context)


def _largest(choices: range, fits: Callable[[int], bool]) -> int | None:
    """The largest that fits, where what is smaller than one that fits does too."""
    low, high = 0, len(choices)  # all before `low` fit, none from `high` on
    while low < high:
        middle = (low + high) // 2
        if fits(choices[middle]):
            low = middle + 1
        else:
            high = middle
    return choices[low - 1] if low else None


@contextmanager
def located(recipe: Recipe, key: tuple[str | int, ...]) -> Iterator[None]:
    """What is wrong with the request says where in the recipe."""
    try:
        yield
    except RequestError as error:
        raise RequestError(recipe.origin.at(key, str(error))) from None


# ---------------------------------------------------------------- what models take
def parameters(config: PretrainedConfig, streamed: StreamedModel) -> int:
    """Of the model that a config describes; tied ones once."""
    return sum(p.numel() for p in skeleton_of(config, streamed).parameters())


def flops(config: PretrainedConfig, streamed: StreamedModel, context: int) -> float:
    """Multiplications and additions of one token that follows `context` others."""
    model = skeleton_of(config, streamed)
    # Looked up, not multiplied with; a tied head is counted by its own name.
    tables = {
        f"{name}.weight" for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Embedding)
    }
    weights = 2.0 * sum(
        math.prod(shape)
        for name, shape in shapes(model).items()
        if name.endswith(".weight") and len(shape) == 2 and name not in tables
    )
    # Of fused experts `[experts, ...]` a token has those that it is sent to.
    active, experts = active_experts(config), number_of_experts(config)
    if active is not None and experts:
        held = sum(math.prod(shape) for shape in shapes(model).values() if len(shape) == 3 and shape[0] == experts)
        weights += 2.0 * held * active / experts
    text: Any = config.get_text_config(decoder=True)
    heads, hidden = int(text.num_attention_heads), int(text.hidden_size)
    width = getattr(text, "head_dim", None) or hidden // heads
    return weights + 4.0 * context * heads * width * sum(len(blocks) for _, blocks in find_stacks(model))


def skeleton_of(config: PretrainedConfig, streamed: StreamedModel) -> PreTrainedModel:
    """The model that a config describes, on meta; RequestError where there can be none."""
    try:
        type(config).from_dict(config.to_dict())  # what has been set is checked when it is read, which comes too late
        return build_skeleton(config, torch.float32, stored=streamed.checkpoint.names())
    except (ArtifactError, StrictDataclassError, ValueError) as error:
        cause = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
        raise RequestError(f"a {type(streamed.model).__name__} cannot be built so: {cause}") from None
