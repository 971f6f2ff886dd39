"""A stage `structure` before anything is computed: held against its model, and how much it will remove."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compress.nearest import listing
from compress.prune.structure import METHODS, StructureConfig, StructureMethod
from compress.prune.structure.couplings import Channels, Slices, changed, channels_of, shapes
from compress.prune.structure.sizes import Size, resized, size_of
from compress.recipe import Recipe, Stage
from runtime.errors import ArtifactError, RequestError
from runtime.skeleton import build_skeleton

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from compress.pipeline.stream import StreamedModel


@dataclass(frozen=True)
class StructureJob:
    """What will be removed, as far as it is known without the weights.

    Attributes:
        stage: of the recipe.
        size: what there is. kept: units that stay.
        config: of the smaller model.
        slices: what units have of which tensors; none where layers go.
        channels: of each block, by the layer that reads them; none where layers or dimensions of the hidden state go.
    """

    stage: Stage
    size: Size
    kept: int
    config: PretrainedConfig
    slices: tuple[Slices, ...]
    channels: tuple[tuple[Channels, ...], ...]

    @property
    def settings(self) -> StructureConfig:
        config: StructureConfig = self.stage.config
        return config

    @property
    def method(self) -> StructureMethod:
        return METHODS[self.stage.method]

    @property
    def needs(self) -> set[str]:
        """What must be collected; a refit needs second moments."""
        refit = self.settings.reconstruct and self.settings.remove in ("ffn", "heads")
        return {*self.method.needs, *(("hessian",) if refit else ())}

    def describe(self) -> str:
        """For people: "ffn 1024 -> 768 channels by obs, readers refitted"."""
        fitted = ", readers refitted" if self.settings.reconstruct and self.settings.remove in ("ffn", "heads") else ""
        return (
            f"{self.settings.remove} {self.size.count} -> {self.kept} {self.size.unit} by {self.stage.method}{fitted}"
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
        text = f"{method.name} ranks {listing(sorted(method.removes))}, not {config.remove}; {listing(able)} do"
        raise RequestError(recipe.origin.at((*path, "remove"), text))
    with _at(recipe, (*path, "remove")):
        size = size_of(streamed.config, config.remove)
        whole = streamed.model
    kept = _kept(recipe, stage, size, streamed)
    with _at(recipe, (*path, "remove")):
        smaller = resized(streamed.config, config.remove, kept)
        if config.remove == "layers":
            return StructureJob(stage, size, kept, smaller, (), ())
        built = _built(smaller, streamed)
        slices = changed(whole, built, size.count, kept)
        if not slices:
            raise RequestError(f"the config of a {type(whole).__name__} cannot say that it has fewer {size.unit}")
        if config.remove == "hidden":
            return StructureJob(stage, size, kept, smaller, tuple(slices), ())
        outside = [s.name for s in slices if not streamed.is_inside(s.name)]
        if outside:
            raise RequestError(
                f"{outside[0]} of a {type(whole).__name__} is in no layer and has parts of these {size.unit}"
            )
        channels = [
            tuple(channels_of(whole, slices, streamed.block_prefix(index), size.count))
            for index in range(len(streamed.blocks))
        ]
        if not any(channels):
            raise RequestError(f"no layer of a {type(whole).__name__} has such {size.unit}")
        return StructureJob(stage, size, kept, smaller, tuple(slices), tuple(channels))


def parameters(config: PretrainedConfig, streamed: StreamedModel) -> int:
    """Of the model that a config describes; tied ones once."""
    return sum(p.numel() for p in _built(config, streamed).parameters())


def flops(config: PretrainedConfig, streamed: StreamedModel, context: int) -> float:
    """Multiplications and additions of one token that follows `context` others."""
    model = _built(config, streamed)
    weights = 2.0 * sum(
        math.prod(shape) for name, shape in shapes(model).items() if name.endswith(".weight") and len(shape) == 2
    )
    embeddings: Any = model.get_input_embeddings()
    weights -= 2.0 * math.prod(
        embeddings.weight.shape
    )  # looked up, not multiplied with; a tied head is counted as its own
    text: Any = config.get_text_config(decoder=True)
    heads, hidden = int(text.num_attention_heads), int(text.hidden_size)
    width = getattr(text, "head_dim", None) or hidden // heads
    return weights + 4.0 * context * heads * width * len(streamed.blocks)


def _built(config: PretrainedConfig, streamed: StreamedModel) -> PreTrainedModel:
    try:
        return build_skeleton(config, torch.float32, stored=streamed.checkpoint.names())
    except ArtifactError as error:
        raise RequestError(f"a {type(streamed.model).__name__} cannot be built so: {error}") from None


# ---------------------------------------------------------------- how many are kept
def _kept(recipe: Recipe, stage: Stage, size: Size, streamed: StreamedModel) -> int:
    config: StructureConfig = stage.config
    path = ("stages", stage.index, stage.kind)
    multiple = config.multiple_of
    least, most = min(multiple, size.count), (size.count - 1) // multiple * multiple
    if config.keep is not None:
        if not 1 <= config.keep < size.count:
            text = f"the model has {size.count} {size.unit}: 1 to {size.count - 1} can be kept, not {config.keep}"
            raise RequestError(recipe.origin.at((*path, "keep"), text))
        if config.multiple is not None and config.keep % config.multiple:
            text = f"{config.keep} is no multiple of {config.multiple}, which `multiple` asks for"
            raise RequestError(recipe.origin.at((*path, "keep"), text))
        return config.keep
    if most < 1:
        text = f"of {size.count} {size.unit} fewer cannot be kept in multiples of {multiple}; set multiple"
        raise RequestError(recipe.origin.at((*path, "multiple" if config.multiple else "remove"), text))
    if config.ratio is not None:
        wanted = (1 - config.ratio) * size.count
        kept = round(wanted / multiple) * multiple
        if not least <= kept <= most:
            near = f"{most / size.count:.1%}" if kept > most else f"{least / size.count:.1%}"
            text = (
                f"{config.ratio:.1%} of {size.count} {size.unit} leaves {wanted:.1f}, in multiples of {multiple} "
                f"{'all' if kept > most else 'none'}; the nearest that can be kept is {most if kept > most else least} ({near})"
            )
            raise RequestError(recipe.origin.at((*path, "ratio"), text))
        return kept
    assert config.budget is not None
    ((name, share),) = config.budget.given.items()
    costs = _costs(name, recipe, streamed, config)
    whole = costs(size.count)
    choices = range(least, most + 1, multiple)
    found = _largest(choices, lambda count: costs(count) <= share * whole)
    if found is None:
        text = (
            f"with {least} of {size.count} {size.unit} the model still takes {costs(least) / whole:.1%} of its {name}"
        )
        raise RequestError(recipe.origin.at((*path, "budget", name), text))
    return found


def _costs(name: str, recipe: Recipe, streamed: StreamedModel, config: StructureConfig) -> Callable[[int], float]:
    """What a model with so many units takes."""
    if name == "latency":
        from compress.pipeline.latency import Latency

        return Latency(streamed, config.remove)
    if name == "parameters":
        return lambda count: parameters(resized(streamed.config, config.remove, count), streamed)
    context = recipe.calibration.sequence_length
    return lambda count: flops(resized(streamed.config, config.remove, count), streamed, context)


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
