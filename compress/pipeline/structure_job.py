"""A stage `structure` before anything is computed: held against its model, and how much it will remove."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from compress.nearest import listing
from compress.pipeline.kinds import check_streams
from compress.pipeline.needs import Counted, Needs, Rows, Speed
from compress.pipeline.structure_amount import between, located, skeleton_of, units_kept
from compress.pipeline.structure_needs import few_tokens, structure_needs
from compress.pipeline.vocabulary_job import kept_tokens
from compress.prune.structure import METHODS, StructureConfig, StructureMethod
from compress.prune.structure.config import FITTED
from compress.prune.structure.couplings import Channels, Slices, changed, changed_shapes, channels_of
from compress.prune.structure.experts import Experts, experts_of
from compress.prune.structure.hybrids import check_attending
from compress.prune.structure.sizes import (
    Size,
    resized,
    size_of,
    with_wider_heads,
    with_widths,
)
from compress.prune.vocabulary import Tokens
from compress.recipe import Recipe, Stage
from runtime.errors import RequestError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
        least, most, multiple = between(self.settings, self.size)
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
    with located(recipe, (*path, "remove")):
        check_streams(streamed)
        size = size_of(streamed.config, config.remove)
        whole = streamed.model
        if config.remove == "hidden":
            _check_width(streamed)
    if config.reconstruct and config.remove not in FITTED:
        text = f"with remove: {config.remove} there is nothing to fit; leave reconstruct out"
        raise RequestError(recipe.origin.at((*path, "reconstruct"), text))
    counted = Counted.of(streamed)
    kept, measured = units_kept(recipe, stage, size, streamed)
    with located(recipe, (*path, "remove")):
        smaller = resized(streamed.config, config.remove, kept)
        if config.remove == "layers":
            if streamed.kind == "decoder":
                check_attending(streamed.config, kept)
            return StructureJob(stage, counted, size, kept, smaller, (), (), measured=measured)
        built = skeleton_of(smaller, streamed)
        slices = changed(whole, built, size.count, kept)
        if not slices:
            raise RequestError(f"the config of a {type(whole).__name__} cannot say that it has fewer {size.unit}")
        if config.remove == "hidden":
            _check_multiples(streamed, slices)
    if config.remove in ("hidden", "vocabulary"):
        job = StructureJob(stage, counted, size, kept, smaller, tuple(slices), (), measured=measured)
        return job if config.remove == "hidden" else _vocabulary(job, recipe, streamed)
    with located(recipe, (*path, "remove")):
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
        with located(recipe, (*path, "allocation")):
            # What comes after must bear layers that differ, in steps of `multiple`.
            job = replace(job, config=with_widths(streamed.config, _uneven(job)))
            skeleton_of(job.config, streamed)
    if not isinstance(config.keep, list):
        return job
    with located(recipe, (*path, "keep")):
        job = job.of_widths(config.keep, streamed.config)
        skeleton_of(job.config, streamed)
        return job


def _check_width(streamed: StreamedModel) -> None:
    """RequestError where heads get narrower when the hidden state does: matrices of the layers would change along both sides."""
    whole = streamed.model
    if changed_shapes(whole, skeleton_of(with_wider_heads(streamed.config), streamed)):
        return  # the config says how wide they are
    half = size_of(streamed.config, "hidden").count // 2
    try:
        slices = changed(whole, skeleton_of(resized(streamed.config, "hidden", half), streamed), 2 * half, half)
        inside = [s.name for s in slices if streamed.is_inside(s.name)]
    except RequestError:  # so few dimensions are no whole heads
        inside = [""] * 2
    if len(set(inside)) < len(inside):
        raise RequestError(
            f"the heads of a {type(whole).__name__} are as wide as their share of the hidden size is, and its config cannot say that "
            "they stay as they are: dimensions of the hidden state cannot be removed alone"
        )


def _check_multiples(streamed: StreamedModel, slices: Sequence[Slices]) -> None:
    """RequestError where something inside of a layer is a multiple as wide as the hidden state (Mamba's inner channels): it would be cut
    as if it were the hidden state."""
    wide = next((s for s in slices if s.each > 1 and streamed.is_inside(s.name)), None)
    if wide is not None:
        raise RequestError(
            f"{wide.name} of a {type(streamed.model).__name__} has {wide.each} values for each dimension of the hidden state, and its "
            "config cannot say that they stay: dimensions of the hidden state cannot be removed alone"
        )


def _vocabulary(job: StructureJob, recipe: Recipe, streamed: StreamedModel) -> StructureJob:
    """The job with its tokens; RequestError where they cannot be so few, or the tokenizer cannot be cut."""
    from compress.pipeline.session import Session

    tokenizer = Session(recipe, streamed.checkpoint, streamed, {}).tokenizer
    tokens = kept_tokens(recipe, job.stage, streamed, tokenizer, job.kept)
    return replace(job, tokens=tokens, config=tokens.config(streamed.config, job.config))


def _uneven(job: StructureJob) -> list[int]:
    """Widths such as may be found: one layer keeps all, the others about what is left, in uneven multiples."""
    choices, depth = job.choices(), len(job.channels)
    left = (job.kept * depth - job.size.count) // max(depth - 1, 1)
    near = [choice for choice in choices if choice <= max(left, choices[0])][-2:]
    return [job.size.count, *(near[layer % len(near)] for layer in range(depth - 1))]
