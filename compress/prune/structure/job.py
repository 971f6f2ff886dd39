"""A stage `structure` before anything is computed: held against its model, and how much it will remove."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress import data as calibration
from compress.core.files import write_json
from compress.core.suggest import listing
from compress.data.documents import documents
from compress.data.tokens import end_of_text
from compress.model.checkpoint_writer import copy_companions, zeros
from compress.model.config_sizes import Size, resized, size_of, with_wider_heads, with_widths
from compress.model.couplings import Channels, Slices, changed, changed_shapes, channels_of
from compress.model.footprint import Counted, Needs, Rows, Speed
from compress.model.hybrid_layers import check_attending
from compress.model.streamed import StreamedModel
from compress.model.supported import check_streams
from compress.prune.structure import METHODS, StructureConfig, StructureMethod
from compress.prune.structure.amount import between, located, skeleton_of, units_kept
from compress.prune.structure.config import FITTED
from compress.prune.structure.expert_layout import Experts, experts_of
from compress.prune.structure.job_footprint import few_tokens, structure_needs
from compress.prune.structure.view import View
from compress.prune.structure.vocabulary import Tokens, Vocabulary, choose, closed, read_vocabulary
from compress.recipe import Recipe, Stage
from runtime.checkpoint.checkpoint import Checkpoint, read_json
from runtime.errors import RequestError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from compress.model.streamed import StreamedModel
    from compress.run.session import Session


# Which tokens a stage `structure` keeps, found from the tokenizer and the calibration text before anything is computed.

_TEXTS, _CHARACTERS = 64, 4096
"""How much text the new tokenizer is tried on."""


def kept_tokens(recipe: Recipe, stage: Stage, streamed: StreamedModel, tokenizer: Any, keep: int) -> Tokens:
    """The vocabulary with `keep` tokens.

    Args:
        tokenizer: the model's, as transformers loads it.

    Raises:
        RequestError: with file and line: a tokenizer that cannot be cut, or tokens that must stay and are too many.
    """
    size = int(streamed.model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    config: StructureConfig = stage.config
    amount = next(name for name in ("keep", "ratio", "budget") if getattr(config, name) is not None)

    def refused(key: str, text: str) -> RequestError:
        return RequestError(recipe.origin.at(("stages", stage.index, stage.kind, key), text))

    try:
        vocabulary = read_vocabulary(streamed.checkpoint.path, streamed.config, size)
    except RequestError as error:
        raise refused("remove", str(error)) from None
    counts = _occurrences(recipe, tokenizer, size)
    required, problem = _required(vocabulary, counts, keep)
    if problem:
        raise refused(amount, problem)
    view = View(size, keep, torch.Generator().manual_seed(config.seed), occurrences=counts)
    order = METHODS[stage.method].rank(view, config).argsort(descending=True, stable=True).tolist()
    ids = vocabulary.ids
    ranked = [token for token in order if token in ids]
    padding = [token for token in order if token not in ids]
    kept = choose(ranked, min(keep, len({*ids, *required})), required, vocabulary.parts)
    more = (row for row in padding if row not in kept)
    tokens = Tokens(vocabulary, vocabulary.new_ids(kept | set(islice(more, keep - len(kept)))))
    problem = _tried(recipe, streamed.checkpoint.path, tokenizer, tokens)
    if problem:
        raise refused("remove", problem)
    return tokens


def _occurrences(recipe: Recipe, tokenizer: Any, size: int) -> torch.Tensor:
    """How often each token is in the rows of the calibration text: int64 `[size]`."""
    data = calibration.load(recipe.calibration, tokenizer, size)
    seen = torch.cat([ids[mask] for ids, mask in data.batches])
    return torch.bincount(seen, minlength=size)


def _required(vocabulary: Vocabulary, counts: torch.Tensor, keep: int) -> tuple[set[int], str]:
    """Tokens that stay whatever their rank, with all that they are made of; and why so few cannot be kept, or nothing."""
    occurring = set(counts.nonzero().flatten().tolist())
    required = closed(vocabulary.required | occurring, vocabulary.parts)
    special, least = len(vocabulary.special), len(required)
    if least <= keep:
        return required, ""
    if keep < special:
        return required, (
            f"{keep:,} tokens cannot hold the {special:,} special ones, which always stay; the fewest that can be kept are {least:,}"
        )
    return required, (
        f"{keep:,} tokens are too few: {len(occurring):,} different ones occur in the calibration text, and with the {special:,} special "
        f"ones, those that any text can be written with, and what they are merged of, {least:,} must stay; keep {least} or more"
    )


def _tried(recipe: Recipe, path: Path, tokenizer: Any, tokens: Tokens) -> str:
    """Load the new tokenizer as users will, and hold it against the old one on calibration text: why it is wrong, or nothing."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="compress-tokenizer-") as room:
        directory = Path(room)
        copy_companions(path, directory)
        write_json(directory / "config.json", read_json(path / "config.json"))
        tokens.write(directory)
        try:
            smaller: Any = AutoTokenizer.from_pretrained(room)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"the tokenizer of {path} ({type(tokenizer).__name__}) cannot be loaded with fewer tokens: {error}"
    for text in _texts(recipe, tokenizer):
        if not _reads_alike(text, tokenizer, smaller, tokens):
            return (
                f"the tokenizer of {path} ({type(tokenizer).__name__}) reads texts otherwise when tokens are taken out of its "
                f"tokenizer.json, so its vocabulary cannot be cut; a text begins {text[:40]!r}"
            )
    return ""


def _reads_alike(text: str, tokenizer: Any, smaller: Any, tokens: Tokens) -> bool:
    """The same tokens where all of them stay, else the same text."""
    before, after = (one(text, verbose=False)["input_ids"] for one in (tokenizer, smaller))
    if all(number in tokens.new for number in before):
        return [tokens.new[number] for number in before] == after
    return bool(smaller.decode(after) == tokenizer.decode(before))


def _texts(recipe: Recipe, tokenizer: Any) -> Iterator[str]:
    found, _ = documents(recipe.calibration, "calibration", end_of_text(tokenizer), not recipe.calibration.packing)
    return (text[:_CHARACTERS] for text in islice((text for text in found if text.strip()), _TEXTS))


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
        measured: what was timed to find how many stay, JSON-able, see `compress.prune.structure.latency`; empty
        without a budget of latency.
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
    from compress.run.session import Session

    tokenizer = Session(recipe, streamed.checkpoint, streamed, {}).tokenizer
    tokens = kept_tokens(recipe, job.stage, streamed, tokenizer, job.kept)
    return replace(job, tokens=tokens, config=tokens.config(streamed.config, job.config))


def _uneven(job: StructureJob) -> list[int]:
    """Widths such as may be found: one layer keeps all, the others about what is left, in uneven multiples."""
    choices, depth = job.choices(), len(job.channels)
    left = (job.kept * depth - job.size.count) // max(depth - 1, 1)
    near = [choice for choice in choices if choice <= max(left, choices[0])][-2:]
    return [job.size.count, *(near[layer % len(near)] for layer in range(depth - 1))]


# A checkpoint of zeros that looks as a stage's result will: what comes next is checked against it, and a model is built from it before its
# tensors are written.


def outline(directory: Path, streamed: StreamedModel, job: StructureJob) -> Checkpoint:
    """What a job will make of the whole model, with a tokenizer that goes with it."""
    zeros(directory, streamed, job.config)
    if job.tokens is not None:
        job.tokens.write(directory)
    return Checkpoint(directory)
