"""A stage `structure` before anything is computed: held against its model, and how much it will remove."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from compress.nearest import listing
from compress.pipeline.latency import Latency
from compress.pipeline.needs import Counted, Needs, Rows, Speed
from compress.pipeline.structure_needs import few_tokens, structure_needs
from compress.pipeline.vocabulary_job import kept_tokens
from compress.prune.structure import METHODS, StructureConfig, StructureMethod
from compress.prune.structure.config import FITTED, Remove
from compress.prune.structure.couplings import Channels, Slices, changed, changed_shapes, channels_of, shapes
from compress.prune.structure.experts import Experts, experts_of
from compress.prune.structure.sizes import (
    Size,
    active_experts,
    number_of_experts,
    resized,
    size_of,
    with_wider_heads,
    with_widths,
)
from compress.prune.vocabulary import Tokens
from compress.recipe import Recipe, Stage
from runtime.cache_directory import cache_directory
from runtime.errors import ArtifactError, RequestError
from runtime.skeleton import build_skeleton, find_stacks

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from compress.pipeline.session import Session
    from compress.pipeline.stream import StreamedModel


@dataclass(frozen=True)
class StructureJob:
    """What will be removed, as far as it is known without the weights.

    Attributes:
        stage: of the recipe.
        whole: the model, in numbers.
        size: what there is. kept: units that stay.
        config: of the smaller model.
        slices: what units have of which tensors; none where layers go.
        channels: of each block, by the layer that reads them; none but where channels or heads go.
        experts: of each block, None of those that have none; none at all where something else goes.
        measured: what was timed to find how many stay, JSON-able, see `compress.pipeline.latency`; empty without a budget of latency.
        tokens: that stay; None where something else goes.
        widths: channels of each layer that stay, where they differ; `kept` is the most of them then. Empty: `kept` in each, or, with
            `allocation: error`, that is found when the model is seen, and `kept` is their mean.
    """

    stage: Stage
    whole: Counted
    size: Size
    kept: int
    config: PretrainedConfig
    slices: tuple[Slices, ...]
    channels: tuple[tuple[Channels, ...], ...]
    experts: tuple[Experts | None, ...] = ()
    measured: dict[str, Any] = field(default_factory=dict)
    tokens: Tokens | None = None
    widths: tuple[int, ...] = ()

    def width(self, layer: int) -> int:
        """Units of a layer that stay."""
        return self.widths[layer] if self.widths else self.kept

    @property
    def mean_width(self) -> float:
        """Units of a layer that stay, in the mean; a whole number where it is one."""
        mean = sum(self.widths) / len(self.widths) if self.widths else self.kept
        return int(mean) if mean == int(mean) else round(mean, 1)

    def of_widths(self, widths: Sequence[int], config: PretrainedConfig) -> StructureJob:
        """The job with so many channels in each layer. `config`: of the whole model."""
        if len(set(widths)) == 1:
            return replace(self, kept=widths[0], config=resized(config, "ffn", widths[0]), widths=())
        return replace(self, kept=max(widths), config=with_widths(config, widths), widths=tuple(widths))

    def choices(self) -> range:
        """Channels that a layer may keep, where it is left to their errors: half as many as in all layers, to all but some."""
        least, most, multiple = _between(self.settings, self.size)
        start = max(least, -(-self.kept // (2 * multiple)) * multiple)
        return range(start, most + 1, multiple)

    @property
    def settings(self) -> StructureConfig:
        config: StructureConfig = self.stage.config
        return config

    @property
    def method(self) -> StructureMethod:
        return METHODS[self.stage.method]

    def smaller(self, config: PretrainedConfig) -> PretrainedConfig:
        """The config that the job makes of one."""
        resulting = (
            with_widths(config, self.widths) if self.widths else resized(config, self.settings.remove, self.kept)
        )
        return resulting if self.tokens is None else self.tokens.config(config, resulting)

    @property
    def needs(self) -> set[str]:
        """What must be collected; a refit needs second moments, norms over fewer dimensions what they divide by."""
        refit = (
            self.settings.reconstruct and self.settings.remove in ("ffn", "heads")
        ) or self.settings.allocation == "error"
        dimensions = self.settings.remove == "hidden"
        return {*self.method.needs, *(("hessian",) if refit else ()), *(("states",) if dimensions else ())}

    def warned(self, session: Session) -> tuple[str, ...]:
        """Sentences for the user."""
        text = few_tokens(self, session.calibration.tokens) if self.needs else ""
        return (session.recipe.calibration.at("samples", text),) if text else ()

    @property
    def stored(self) -> int:
        """Bytes of the whole model on the disk."""
        return self.whole.stored

    def takes(self, session: Session, rows: Rows, speed: Speed) -> Needs:
        """Memory, disk and time, given the shapes of batches of calibration text."""
        return structure_needs(self, rows, session.recipe.calibration.sequence_length, speed, session.streamed.device)

    def describe(self) -> str:
        """For people: "ffn 1024 -> 768 channels by obs, readers refitted"."""
        readers = {"ffn": ", readers refitted", "heads": ", readers refitted", "hidden": ", layers refitted"}
        fitted = readers.get(self.settings.remove, "") if self.settings.reconstruct else ""
        timed = ""
        if self.measured:
            before, after = (1e3 * self.measured[when] for when in ("before", "after"))
            timed = f" (latency measured: {self.measured['of']} {before:.3g} -> about {after:.3g} ms)"
        kept = f"{min(self.widths)} to {self.kept}" if self.widths else str(self.kept)
        if self.settings.allocation == "error":
            kept = f"a mean of {kept}" if not self.widths else f"{kept} by layer"
        return (
            f"{self.settings.remove} {self.size.count} -> {kept} {self.size.unit} by {self.stage.method}{fitted}{timed}"
        )


def prepare(recipe: Recipe, stage: Stage, streamed: StreamedModel) -> StructureJob:
    """The stage, checked.

    Raises:
        RequestError: with file and line, where it cannot be carried out.
    """
    config: StructureConfig = stage.config
    path = ("stages", stage.index, stage.kind)
    method = METHODS[stage.method]
    if config.remove not in method.removes:
        able = [name for name, other in METHODS.items() if config.remove in other.removes]
        text = (
            f"{method.name} ranks {listing(sorted(method.removes))}, not {config.remove}; that is for {listing(able)}"
        )
        raise RequestError(recipe.origin.at((*path, "remove"), text))
    with _at(recipe, (*path, "remove")):
        size = size_of(streamed.config, config.remove)
        whole = streamed.model
        if config.remove == "hidden":
            _check_width(streamed)
    if config.reconstruct and config.remove not in FITTED:
        text = f"with remove: {config.remove} there is nothing to fit; leave reconstruct out"
        raise RequestError(recipe.origin.at((*path, "reconstruct"), text))
    counted = Counted.of(streamed)
    kept, measured = _kept(recipe, stage, size, streamed)
    with _at(recipe, (*path, "remove")):
        smaller = resized(streamed.config, config.remove, kept)
        if config.remove == "layers":
            return StructureJob(stage, counted, size, kept, smaller, (), (), measured=measured)
        built = _built(smaller, streamed)
        slices = changed(whole, built, size.count, kept)
        if not slices:
            raise RequestError(f"the config of a {type(whole).__name__} cannot say that it has fewer {size.unit}")
    if config.remove in ("hidden", "vocabulary"):
        job = StructureJob(stage, counted, size, kept, smaller, tuple(slices), (), measured=measured)
        return job if config.remove == "hidden" else _vocabulary(job, recipe, streamed)
    with _at(recipe, (*path, "remove")):
        outside = [s.name for s in slices if not streamed.is_inside(s.name)]
        if outside:
            raise RequestError(
                f"{outside[0]} of a {type(whole).__name__} is in no layer and has parts of these {size.unit}"
            )
        if config.remove == "experts":
            experts = tuple(experts_of(whole, slices, streamed.block_prefix(i)) for i in range(len(streamed.blocks)))
            return StructureJob(stage, counted, size, kept, smaller, tuple(slices), (), experts, measured)
        channels = [
            tuple(channels_of(whole, slices, streamed.block_prefix(index), size.count))
            for index in range(len(streamed.blocks))
        ]
        if not any(channels):
            raise RequestError(f"no layer of a {type(whole).__name__} has such {size.unit}")
        job = StructureJob(stage, counted, size, kept, smaller, tuple(slices), tuple(channels), measured=measured)
    if config.allocation == "error":
        with _at(recipe, (*path, "allocation")):
            # What comes after must bear layers that differ, in steps of `multiple`.
            job = replace(job, config=with_widths(streamed.config, _uneven(job)))
            _built(job.config, streamed)
    if not isinstance(config.keep, list):
        return job
    with _at(recipe, (*path, "keep")):
        job = job.of_widths(config.keep, streamed.config)
        _built(job.config, streamed)
        return job


def _check_width(streamed: StreamedModel) -> None:
    """RequestError where heads get narrower when the hidden state does: matrices of the layers would change along both sides."""
    whole = streamed.model
    if changed_shapes(whole, _built(with_wider_heads(streamed.config), streamed)):
        return  # the config says how wide they are
    half = size_of(streamed.config, "hidden").count // 2
    try:
        slices = changed(whole, _built(resized(streamed.config, "hidden", half), streamed), 2 * half, half)
        inside = [s.name for s in slices if streamed.is_inside(s.name)]
    except RequestError:  # so few dimensions are no whole heads
        inside = [""] * 2
    if len(set(inside)) < len(inside):
        raise RequestError(
            f"the heads of a {type(whole).__name__} are as wide as their share of the hidden size is, and its config cannot say that "
            "they stay as they are: dimensions of the hidden state cannot be removed alone"
        )


def _vocabulary(job: StructureJob, recipe: Recipe, streamed: StreamedModel) -> StructureJob:
    """The job with its tokens; RequestError where they cannot be so few, or the tokenizer cannot be cut."""
    from compress.pipeline.session import Session

    tokenizer = Session(recipe, streamed.checkpoint, streamed, {}).tokenizer
    tokens = kept_tokens(recipe, job.stage, streamed, tokenizer, job.kept)
    return replace(job, tokens=tokens, config=tokens.config(streamed.config, job.config))


def parameters(config: PretrainedConfig, streamed: StreamedModel) -> int:
    """Of the model that a config describes; tied ones once."""
    return sum(p.numel() for p in _built(config, streamed).parameters())


def flops(config: PretrainedConfig, streamed: StreamedModel, context: int) -> float:
    """Multiplications and additions of one token that follows `context` others."""
    model = _built(config, streamed)
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


def _built(config: PretrainedConfig, streamed: StreamedModel) -> PreTrainedModel:
    try:
        type(config).from_dict(config.to_dict())  # what has been set is checked when it is read, which comes too late
        return build_skeleton(config, torch.float32, stored=streamed.checkpoint.names())
    except (ArtifactError, StrictDataclassError, ValueError) as error:
        cause = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
        raise RequestError(f"a {type(streamed.model).__name__} cannot be built so: {cause}") from None


# ---------------------------------------------------------------- how many are kept
def _kept(recipe: Recipe, stage: Stage, size: Size, streamed: StreamedModel) -> tuple[int, dict[str, Any]]:
    """How many stay, and what was measured to find it."""
    config: StructureConfig = stage.config
    path = ("stages", stage.index, stage.kind)
    least, most, multiple = _between(config, size)
    if isinstance(config.keep, list):
        return _least_of(config.keep, recipe, stage, size, streamed), {}
    if config.keep is not None:
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
            text = f"none of {size.count} {size.unit} can go: {size.least} are needed for a token, in multiples of {multiple}"
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
    with _at(recipe, (*path, "budget", name)):
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


def _between(config: StructureConfig, size: Size) -> tuple[int, int, int]:
    """The least and the most units that stay where no number is given, and of what they are multiples."""
    multiple = math.lcm(config.multiple_of, size.groups)
    least = -(-max(size.least, min(multiple, size.count)) // multiple) * multiple
    return least, (size.count - 1) // multiple * multiple, multiple


def _uneven(job: StructureJob) -> list[int]:
    """Widths such as may be found: one layer keeps all, the others about what is left, in uneven multiples."""
    choices, depth = job.choices(), len(job.channels)
    left = (job.kept * depth - job.size.count) // max(depth - 1, 1)
    near = [choice for choice in choices if choice <= max(left, choices[0])][-2:]
    return [job.size.count, *(near[layer % len(near)] for layer in range(depth - 1))]


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
def _at(recipe: Recipe, key: tuple[str | int, ...]) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise RequestError(recipe.origin.at(key, str(error))) from None
