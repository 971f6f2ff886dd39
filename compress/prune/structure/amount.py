"""Amount of units that a stage `structure` keeps: as its recipe says, or the most that a budget (parameters, operations, time) allows."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from compress.model.config_sizes import Size, active_experts, number_of_experts, resized, size_of
from compress.model.couplings import shapes
from compress.prune.structure.config import Remove, StructureConfig
from compress.prune.structure.latency import Latency
from compress.recipe import Recipe, Stage
from runtime.errors import ArtifactError, RequestError
from runtime.modeling.skeleton import build_skeleton, find_stacks
from runtime.system.directories import cache_directory

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from compress.model.streamed import StreamedModel


def units_kept(recipe: Recipe, stage: Stage, size: Size, streamed: StreamedModel) -> tuple[int, dict[str, Any]]:
    """How many units stay (of a list the smallest number), and the measurements that decided it.

    Raises:
        RequestError: with file and line, where it cannot be so few, or so many.
    """
    config: StructureConfig = stage.config
    least, most, multiple = between(config, size)

    def refused(text: str, *key: str) -> RequestError:
        return RequestError(recipe.origin.at((*stage.path, *key), text))

    if config.keep is not None:
        reason = _reason_against(config.keep, config, size, streamed)
        if reason:
            raise refused(reason, "keep")
        return min(config.keep) if isinstance(config.keep, list) else config.keep, {}
    if most < least:
        text = f"of {size.count} {size.unit} fewer cannot be kept in multiples of {multiple}; set multiple"
        raise refused(
            _none_can_go(size, multiple) if size.least > 1 else text, "multiple" if config.multiple else "remove"
        )
    if config.ratio is not None:
        wanted = (1 - config.ratio) * size.count
        kept = round(wanted / multiple) * multiple
        if least <= kept <= most:
            return kept, {}
        amount, near = ("all", most) if kept > most else ("too few" if kept else "none", least)
        raise refused(
            f"{config.ratio:.1%} of {size.count} {size.unit} leaves {wanted:.1f}, which is {amount} in multiples of {multiple}; "
            f"the nearest that can be kept is {near} ({near / size.count:.1%})", "ratio",
        )  # fmt: skip
    assert config.budget is not None
    ((name, share),) = config.budget.given.items()
    with recipe.origin.located((*stage.path, "budget", name)):
        costs = _costs(name, recipe, streamed, config.remove, range(least, size.count + 1, multiple))
        whole = costs(size.count)
    # Costs rise with the number of units.
    choices = range(least, most + 1, multiple)
    fitting = bisect_left(choices, True, key=lambda count: costs(count) > share * whole)
    if fitting == 0:
        text = (
            f"with {least} of {size.count} {size.unit} the model still takes {costs(least) / whole:.1%} of its {name}"
        )
        if isinstance(costs, Latency):
            times = f"{costs.of} takes {1e3 * costs(least):.3g} ms instead of {1e3 * whole:.3g} ms"
            text += f": {times}. What was measured is kept in {cache_directory('latency')}; delete that folder to measure again"
        raise refused(text, "budget", name)
    found = choices[fitting - 1]
    return found, costs.facts(found) if isinstance(costs, Latency) else {}


def between(config: StructureConfig, size: Size) -> tuple[int, int, int]:
    """The least and the most units that may stay where no number is given, and the step between."""
    multiple = math.lcm(config.multiple_of, size.groups)
    least = -(-max(size.least, min(multiple, size.count)) // multiple) * multiple
    return least, (size.count - 1) // multiple * multiple, multiple


def _reason_against(keep: int | list[int], config: StructureConfig, size: Size, streamed: StreamedModel) -> str | None:
    """Why these numbers of units cannot be kept; None: they can."""
    by_layer = isinstance(keep, list)
    asked = keep if isinstance(keep, list) else [keep]
    depth = size_of(streamed.config, "layers").count if by_layer else 0
    if by_layer and len(asked) != depth:
        return f"the model has {depth} layers, and {len(asked)} numbers are given"
    if by_layer and max(asked) > size.count:
        wide = next(width for width in asked if width > size.count)
        return f"a layer has {size.count} {size.unit}, and cannot keep {wide}"
    if not by_layer and size.least > (size.count - 1) // size.groups * size.groups:
        return _none_can_go(size, size.groups)
    if not by_layer and not size.least <= asked[0] < size.count:
        why = "" if size.least == 1 else f" (a token is sent to {active_experts(streamed.config)} of them)"
        return f"the model has {size.count} {size.unit}: {size.least} to {size.count - 1} can be kept{why}, not {keep}"
    odd = next((number for number in asked if number % (config.multiple or 1)), None)
    if odd is not None:
        return f"{odd} is no multiple of {config.multiple}, which `multiple` asks for"
    if asked[0] % size.groups:
        return f"{keep} is no multiple of {size.groups}: the model routes in groups, and each must keep as many"
    if min(asked) == size.count:
        return f"all {size.count} {size.unit} of every layer would be kept"
    return None


def _none_can_go(size: Size, multiple: int) -> str:
    return f"none of {size.count} {size.unit} can go: {size.least} are needed for a token, in multiples of {multiple}"


def _costs(
    name: str, recipe: Recipe, streamed: StreamedModel, remove: Remove, choices: range
) -> Callable[[int], float]:
    """The cost of a model by its number of units; `choices`: numbers that may be asked for."""
    if name == "latency":
        return Latency(streamed, remove, choices)
    if name == "parameters":
        return lambda count: parameters(resized(streamed.config, remove, count), streamed)
    context = recipe.calibration.sequence_length
    return lambda count: flops(resized(streamed.config, remove, count), streamed, context)


# ---------------------------------------------------------------- costs of models
def parameters(config: PretrainedConfig, streamed: StreamedModel) -> int:
    """Parameters of the model that a config describes; tied ones once."""
    return sum(p.numel() for p in skeleton_of(config, streamed).parameters())


def flops(config: PretrainedConfig, streamed: StreamedModel, context: int) -> float:
    """Multiplications and additions of one token that follows `context` others."""
    model = skeleton_of(config, streamed)
    # Tables are looked up, not multiplied; a tied head counts under its own name.
    tables = {
        f"{name}.weight" for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Embedding)
    }
    weights = 2.0 * sum(
        math.prod(shape)
        for name, shape in shapes(model).items()
        if name.endswith(".weight") and len(shape) == 2 and name not in tables
    )
    # A token reads only the experts that it is sent to, of fused tensors `[experts, ...]`.
    active, experts = active_experts(config), number_of_experts(config)
    if active is not None and experts:
        fused = sum(math.prod(shape) for shape in shapes(model).values() if len(shape) == 3 and shape[0] == experts)
        weights += 2.0 * fused * active / experts
    text: Any = config.get_text_config(decoder=True)
    heads, hidden = int(text.num_attention_heads), int(text.hidden_size)
    width = getattr(text, "head_dim", None) or hidden // heads
    return weights + 4.0 * context * heads * width * sum(len(blocks) for _, blocks in find_stacks(model))


def skeleton_of(config: PretrainedConfig, streamed: StreamedModel) -> PreTrainedModel:
    """The model that a config describes, on meta; RequestError where there can be none."""
    try:
        type(config).from_dict(config.to_dict())  # checks the values, which `PretrainedConfig` does on reading alone
        return build_skeleton(config, torch.float32, stored=streamed.checkpoint.names())
    except (ArtifactError, StrictDataclassError, ValueError) as error:
        cause = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
        raise RequestError(f"a {type(streamed.model).__name__} cannot be built so: {cause}") from None
