"""Amount of units that a stage `structure` keeps: as its recipe says, or the most that a budget (parameters, operations, time) allows."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from compress.core.files import write_json
from compress.core.version import VERSION
from compress.evaluate.speed import TEXT_TOKENS, token_time
from compress.model.checkpoint_writer import zeros
from compress.model.config_sizes import Size, What, active_experts, number_of_experts, resized, size_of, with_layers
from compress.model.couplings import shapes
from compress.prune.structure.config import Remove, StructureConfig
from compress.recipe import Recipe, Stage
from runtime.errors import ArtifactError, CompressError, RequestError
from runtime.modeling.skeleton import build_skeleton, find_stacks
from runtime.system.directories import cache_directory

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from compress.model.streamed import StreamedModel

WIDTHS = (0.75, 0.5, 0.25)
"""Shares of the units that are timed, beside all and the fewest."""
_log = logging.getLogger("compress")

# Machines have better and worse moments: everything is timed again in turn, but where that takes too long.
SWEEPS = 3
SECONDS = 20.0

Measure = Callable[[Sequence["PretrainedConfig"]], list[float]]


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


# Latency is estimated before pruning. It does not depend on the values of weights: checkpoints of zeros with few layers are written (sparse
# files), loaded as users would load them, and timed. The latency of a whole model is extrapolated from the time that each layer adds. Some
# widths are timed; those in between are interpolated linearly.


class Latency:
    """Seconds that one token takes of a model with a number of units: `latency(count)`, never falling with it.

    Args:
        streamed: the whole model.
        remove: what the units are.
        choices: numbers of units that may be asked for.
        measure: seconds of the models that configs describe; None: they are timed (`time_zeros`).

    Attributes:
        of: what takes the time: "a decoded token".
    """

    def __init__(self, streamed: StreamedModel, remove: What, choices: range, measure: Measure | None = None) -> None:
        self._config, self._remove = streamed.config, remove
        self._whole = size_of(streamed.config, remove).count
        self._depth = size_of(streamed.config, "layers").count
        self._depths = depths(streamed, self._depth)
        self._choices = choices
        self._measure = partial(time_zeros, streamed) if measure is None else measure
        self._device = streamed.device.type
        self.of = f"a text of {TEXT_TOKENS} tokens" if streamed.kind == "encoder" else "a decoded token"

    def __call__(self, count: int) -> float:
        return _between(self._points, count)

    def facts(self, kept: int) -> dict[str, Any]:
        """What was measured, JSON-able: "of" what, "device", "threads", "layers" of the models that were timed, "seconds" by number of
        units (of the whole model), "before" with all units and "after" with `kept`."""
        counts = [count for count, _ in self._points]
        layers, seconds = counts if self._remove == "layers" else list(self._depths), {str(n): self(n) for n in counts}
        return {
            "of": self.of, "device": self._device, "threads": torch.get_num_threads(), "layers": layers, "seconds": seconds,
            "before": self(self._whole), "after": self(kept),
        }  # fmt: skip

    @cached_property
    def _points(self) -> list[tuple[int, float]]:
        """Numbers of units and their times, ascending and never falling: noise is evened out."""
        narrow = [self._config]
        if self._remove != "layers":
            narrow = [resized(self._config, self._remove, count) for count in self._widths()]
        deep = len(self._depths)
        times = self._measure([with_layers(config, list(range(depth))) for config in narrow for depth in self._depths])
        found = [rising(times[start : start + deep]) for start in range(0, len(times), deep)]
        if self._remove == "layers":
            return list(zip(self._depths, found[0], strict=True))
        whole = [_between(list(zip(self._depths, own, strict=True)), self._depth) for own in found]
        return list(zip(self._widths(), rising(whole), strict=True))

    def _widths(self) -> list[int]:
        near = {min(self._choices, key=lambda choice: abs(choice - share * self._whole)) for share in WIDTHS}
        return sorted({*near, self._choices[0], self._whole})


def depths(streamed: StreamedModel, depth: int) -> tuple[int, ...]:
    """Two numbers of layers that tell what any number takes, ascending: 1 and 3 where all layers are built alike.

    Where the first are built otherwise (dense ones before those with experts), or several kinds take turns, what lies between the two is
    made as what follows. A model that is built without any such order is timed with half its layers and with all; one with a single
    layer gives one number.
    """
    kinds = [shapes(block) for block in streamed.stacks[-1].blocks]
    near, period = next(
        (near, period)
        for near in range(1, len(kinds) + 1)
        for period in range(1, near + 1)
        if all(kinds[i] == kinds[i + period] for i in range(near - period, len(kinds) - period))
    )
    if near >= depth:
        near, period = max(1, depth // 2), depth
    far = min(near + max(period, 2), depth)
    return (near, far) if near < far else (depth,)


def rising(times: Sequence[float]) -> list[float]:
    """The sequence that never falls and is nearest by squares: neighbours that fall become their mean (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for seconds in times:
        pools.append((seconds, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (late, more), (early, some) = pools.pop(), pools.pop()
            pools.append(((early * some + late * more) / (some + more), some + more))
    return [mean for mean, number in pools for _ in range(number)]


def _between(points: Sequence[tuple[int, float]], count: int) -> float:
    """On the line between two points; before the first and after the last the line goes on."""
    if len(points) == 1:
        return points[0][1]
    place = next((i for i in range(1, len(points) - 1) if count <= points[i][0]), len(points) - 1)
    (left, low), (right, high) = points[place - 1], points[place]
    return low + (high - low) / (right - left) * (count - left)


def time_zeros(streamed: StreamedModel, configs: Sequence[PretrainedConfig]) -> list[float]:
    """Seconds that models of zeros take. What was timed once on a machine is in the cache directory, so that `plan`, `apply` and `--resume`
    find the same.

    Args:
        streamed: a model that the configs are smaller ones of.
    """
    with tempfile.TemporaryDirectory(prefix="compress-latency-") as room:
        directories: dict[Path, Path] = {}
        records = []
        for number, config in enumerate(configs):
            directory = Path(room) / str(number)
            described, tensors = zeros(directory, streamed, config)
            records.append(cache_directory("latency") / f"{_key(described, tensors, streamed.device)}.json")
            directories[records[-1]] = directory
        known = {record: seconds for record in records if (seconds := _read(record)) is not None}
        found: dict[Path, float] = {}
        start, sweeps = time.perf_counter(), 0
        while sweeps < SWEEPS and (not sweeps or time.perf_counter() - start <= SECONDS):
            sweeps += 1
            for record in (record for record in directories if record not in known):
                try:
                    seconds = token_time(directories[record], streamed.device)
                except (CompressError, RuntimeError, ValueError) as error:
                    kind = type(streamed.model).__name__
                    raise RequestError(f"the time that a {kind} takes cannot be measured here: {error}") from error
                found[record] = min(seconds, found.get(record, seconds))
    for record, seconds in found.items():
        _write(record, seconds)
    return [(known | found)[record] for record in records]


def _key(config: dict[str, Any], tensors: dict[str, Any], device: torch.device) -> str:
    """What a time depends on: the model, and the machine."""
    import transformers

    on = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {torch.get_num_threads()}"
    machine = [platform.node(), platform.machine(), torch.backends.cpu.get_cpu_capability(), on]
    versions = [VERSION, torch.__version__, transformers.__version__]
    model = {name: [list(shape), str(dtype)] for name, (shape, dtype) in tensors.items()}
    return hashlib.sha256(json.dumps([machine, versions, config, model], sort_keys=True).encode()).hexdigest()


def _write(record: Path, seconds: float) -> None:
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        write_json(record, {"seconds": seconds})
    except OSError as error:
        _log.warning("%s cannot be written (%s): times will be measured again", record, error)


def _read(record: Path) -> float | None:
    try:
        return float(json.loads(record.read_text(encoding="utf-8"))["seconds"])
    except (OSError, ValueError, KeyError, TypeError):  # not there, or not whole
        return None
