"""The recipe as pydantic models: exactly the keys of the YAML file, strict, with defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    model_validator,
)

from compress.core.percent import fraction
from compress.recipe.origin import Origin
from compress.recipe.stages import Stage
from compress.recipe.yaml_source import Path as KeyPath
from runtime.errors import RequestError

if TYPE_CHECKING:
    from typing_extensions import Self

AUTO: Literal["auto"] = "auto"
"""Limit that follows from how the layers are compressed."""
NONE: Literal["none"] = "none"
"""No limit, instead of the default one."""

T = TypeVar("T")
Limit = Annotated[T | Literal["auto", "none"], BeforeValidator(lambda value: NONE if value is None else value)]
BUNDLED = "bundled"
"""The word for the texts of this package."""

Fraction = Annotated[float, BeforeValidator(fraction), Field(ge=0)]


def _plain(name: str) -> str:
    if re.fullmatch(r"[\w.][\w. -]*", name) is None or not name.strip(". "):
        raise ValueError(f"expected letters, digits, '_', '-', '.', and not dots alone, got {name!r}")
    return name


#: A name that an output directory is called by.
Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_plain)]


class Located(BaseModel):
    """A part of a recipe that knows where it was written, so that later errors can name file and line."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    _origin: Origin = PrivateAttr(default_factory=Origin)
    _path: KeyPath = PrivateAttr(default=())

    def locate(self, origin: Origin, path: KeyPath) -> None:
        """Remember the place."""
        self._origin, self._path = origin, path

    def at(self, key: str, message: str) -> str:
        """The sentence `file:line: section.key: message`."""
        return self._origin.at((*self._path, key), message)

    def candidates(self, key: str, name: str) -> list[Path]:
        """The files or directories that a name written at `key` may mean, the likeliest first."""
        return self._origin.candidates((*self._path, key), name)


class DataEntry(BaseModel):
    """One of several texts that a section mixes.

    Attributes:
        data: as of the section, but one text only.
        weight: rows are taken in proportion to it.
        text_column, split, subset: override the section's.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    data: str = Field(min_length=1)
    weight: float = Field(default=1.0, gt=0)
    text_column: str | None = None
    split: str | None = None
    subset: str | None = None


Data = Annotated[
    Annotated[str, Field(min_length=1), Tag("text")]
    | Annotated[list[DataEntry], Field(min_length=1, max_length=64), Tag("list")],
    Discriminator(lambda value: "list" if isinstance(value, list) else "text"),
]
"""One text, or several."""


@dataclass(frozen=True)
class TextSet:
    """One text of a section.

    Attributes:
        path: of its keys in the recipe. share: fraction of the section's rows, in (0, 1].
        data, text_column, split, subset: as in `TextSource`, of this text.
    """

    origin: Origin
    path: KeyPath
    share: float
    data: str
    text_column: str
    split: str
    subset: str | None

    def at(self, key: str, message: str) -> str:
        """The sentence `file:line: section.key: message`."""
        return self.origin.at((*self.path, key), message)

    def candidates(self) -> list[Path]:
        """The files or directories that `data` may mean, in order of preference."""
        return self.origin.candidates((*self.path, "data"), self.data)

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for sets that are the same file or directory, or the same split of a data set."""
        file = next((path.resolve() for path in self.candidates() if path.exists()), None)
        return (self.data, self.split, self.subset) if file is None else (file,)


OPEN = ("sequence_length", "batch_size", "samples")
"""Keys that may be `auto`, which is their default."""


class TextSource(Located):
    """Where text comes from; shared by `calibration` and `evaluate`.

    Attributes:
        data: `bundled`, a .txt, .jsonl or .parquet file, or the id of a data set on the Hugging Face hub, whose rows may have images
            for vision-language models. A directory holds images, each with its text (cat.jpg, cat.txt), or, for speech models, .wav
            files, each with its transcript (talk.wav, talk.txt). A list of entries mixes several sets, each with a `weight`.
        text_column: column (Parquet, data sets) or key (JSONL) that holds the text, or the messages of a conversation.
        split, subset: part of the data set.
        sequence_length: tokens per row; an upper limit for transcripts and rows with images. `auto`: the model's context, at most
            4,096; 256 for small models.
        batch_size: rows per forward pass. `auto`: 8, fewer if rows are long.
        language: of the transcripts, such as `en`, for models of several languages; None: the checkpoint's.
    """

    data: Data | None = None
    text_column: str = "text"
    split: str = "train"
    subset: str | None = None
    sequence_length: int = Field(default=256, ge=2, le=1_048_576)
    batch_size: int = Field(default=8, ge=1, le=4096)
    language: str | None = Field(default=None, min_length=1)
    _auto: frozenset[str] | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _without_auto(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if not (key in OPEN and value == "auto")}

    def is_auto(self, name: str) -> bool:
        """Whether the value of a key is `auto`."""
        return name not in self.model_fields_set if self._auto is None else name in self._auto

    @property
    def is_settled(self) -> bool:
        """Whether `auto` has been resolved."""
        return self._auto is not None

    def settled(self, values: Mapping[str, Any]) -> Self:
        """A copy with `auto` resolved to `values`."""
        found = self.model_copy(update=dict(values))
        found._auto = frozenset(name for name in OPEN if self.is_auto(name))
        return found

    @property
    def texts(self) -> list[TextSet]:
        """The texts of the section; by default the bundled one."""
        if not isinstance(self.data, list):
            own = (self.data or BUNDLED, self.text_column, self.split, self.subset)
            return [TextSet(self._origin, self._path, 1.0, *own)]
        total = sum(entry.weight for entry in self.data)
        return [
            TextSet(
                self._origin, (*self._path, "data", number), entry.weight / total, entry.data,
                entry.text_column or self.text_column, entry.split or self.split, entry.subset or self.subset,
            )
            for number, entry in enumerate(self.data)
        ]  # fmt: skip

    @property
    def text(self) -> TextSet:
        """The only text of the section.

        Raises:
            RequestError: the section mixes several.
        """
        first, *more = self.texts
        if more:
            raise RequestError(
                self.at("data", f"{len(more) + 1} sets are mixed, but this kind of model takes only one")
            )
        return first

    @property
    def bundled(self) -> bool:
        """Whether all texts are the bundled one."""
        return all(text.data == BUNDLED for text in self.texts)


class ExpertsConfig(Located):
    """Which tokens the routed experts of a mixture-of-experts model are calibrated on.

    Attributes:
        tokens: `routed`, those that the router sends to the expert, or `all` tokens of its layer.
        at_least: an expert that gets fewer tokens is starved; 0: none is.
        starved: what happens to such an expert: `shared` calibrates it on all tokens of its layer, `nearest` rounds its weights to
            nearest (and prunes by magnitude), `fail` ends the run.
    """

    tokens: Literal["routed", "all"] = "routed"
    at_least: int = Field(default=32, ge=0, le=1_000_000)
    starved: Literal["shared", "nearest", "fail"] = "shared"


class CalibrationConfig(TextSource):
    """Text that the methods see while they compress.

    Attributes:
        samples: number of rows to draw. `auto`: 128; fewer if `sequence_length` is also `auto` and rows are long.
        seed: decides which rows are drawn.
        packing: true cuts documents laid end to end into full rows; false puts one document in a row, padded right.
        experts: see `ExpertsConfig`.
    """

    data: Data = BUNDLED
    samples: int = Field(default=128, ge=1, le=1_000_000)
    seed: int = Field(default=0, ge=0, lt=2**63)
    packing: bool = True
    experts: ExpertsConfig = Field(default_factory=ExpertsConfig)
    _shared: bool = PrivateAttr(default=False)

    @property
    def shared(self) -> bool:
        """Whether a part of the text is held out for evaluation."""
        return self._shared

    def share(self, evaluate: EvaluateConfig | None) -> None:
        """Hold out a part of the text if an `evaluate` section names none."""
        self._shared = evaluate is not None and evaluate.data is None and not self.bundled


class EvaluateConfig(TextSource):
    """Held-out text and the limits that fail a run when they are exceeded (None: not checked).

    Attributes:
        data: as of `calibration`. None: a part of the calibration text, held out of calibration and training; if that text is bundled, the
            bundled held-out text.
        samples: rows to score, from the start of the text; None: all.
        max_perplexity: largest perplexity of the artifact, of its weights and, with a kv_cache stage, of weights and cache together.
        max_perplexity_increase: largest relative increase over the source model (`10%` or 0.1), for both likewise.
        max_kl: largest mean KL divergence from the source model, in nats per token; `auto`: depends on the bits and zeros of the
            layers (`compress.evaluate.limits`); `none`: no limit.
        min_agreement: smallest fraction of positions with the same most likely token; `auto` and `none` likewise.
        min_cosine: encoders only, to which the limits above do not apply: smallest mean cosine similarity between the embeddings
            that both models give a text.
    """

    split: str = "test"
    samples: int | None = Field(default=None, ge=1)
    max_perplexity: float | None = Field(default=None, gt=0)
    max_perplexity_increase: Fraction | None = None
    max_kl: Limit[Annotated[float, Field(ge=0)]] = AUTO
    min_agreement: Limit[Annotated[Fraction, Field(le=1)]] = AUTO
    min_cosine: float | None = Field(default=None, ge=-1, le=1)

    def limits(self) -> dict[str, float]:
        """The limits that are set to a number."""
        names = ("max_perplexity", "max_perplexity_increase", "max_kl", "min_agreement", "min_cosine")
        return {name: value for name in names if isinstance(value := getattr(self, name), (int, float))}


class Recipe(Located):
    """One compression, from checkpoint to artifact.

    Attributes:
        name: name of the recipe; the default output is `out/NAME`, or `out/NAME-MODEL` for another model than the recipe's.
        description: one line for `compress recipes`.
        model: a checkpoint directory (relative to the recipe file, else to the working directory) or a hub id.
        calibration: see `CalibrationConfig`; `auto`: its defaults.
        stages: list of stages, in order.
        evaluate: see `EvaluateConfig`; None skips evaluation.
        output: directory of the artifact (relative to the working directory); `--model` appends the model's name.
        sample: a prompt that `compress apply` continues with the source and with the artifact; None: beginnings of evaluation text.
        seed: seeds everything random that is not the draw of calibration rows.
        on_nonfinite: `fail`, or `skip` layers whose weights or activations hold NaN or Inf (copied, and recorded).
        true_sequential: layers of a block are solved in the order they run, on outputs of the compressed ones before.
        model_free: the checkpoint, of whatever architecture, is compressed by its tensors alone: nothing runs the model, so only methods
            without calibration are allowed, and nothing is evaluated.
    """

    name: Name
    description: str = ""
    model: str = Field(min_length=1)
    calibration: Annotated[CalibrationConfig, BeforeValidator(lambda value: {} if value == "auto" else value)] = Field(
        default_factory=CalibrationConfig
    )
    stages: list[Stage] = Field(min_length=1)
    evaluate: EvaluateConfig | None = None
    output: str | None = None
    sample: str | None = None
    seed: int = Field(default=0, ge=0, lt=2**63)
    on_nonfinite: Literal["fail", "skip"] = "fail"
    true_sequential: bool = True
    model_free: bool = False

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)

    @property
    def origin(self) -> Origin:
        """Where the keys were written."""
        return self._origin

    @property
    def output_directory(self) -> Path:
        """The directory the artifact is written to."""
        return Path(self.output) if self.output else Path("out") / self.name

    def locate(self, origin: Origin, path: KeyPath = ()) -> None:
        """Remember the place, in the sections too."""
        super().locate(origin, path)
        self.calibration.locate(origin, ("calibration",))
        self.calibration.share(self.evaluate)
        if self.evaluate is not None:
            self.evaluate.locate(origin, ("evaluate",))

    def resolved(self) -> dict[str, Any]:
        """The recipe with every default filled in: plain data, always in the same order, readable as a recipe again.

        `output` is left out, so that the same recipe written to two places gives the same bytes.
        """
        data = self.model_dump(mode="json", exclude={"stages", "output"}, exclude_none=True)
        for section in ("calibration", "evaluate"):
            config = getattr(self, section)
            for name in () if config is None else OPEN:
                if config.is_auto(name) and not config.is_settled and name in data[section]:
                    data[section][name] = "auto"  # until the model is known
        data["stages"] = [stage.resolved() for stage in self.stages]
        order = [name for name in type(self).model_fields if name in data]
        return {name: data[name] for name in order}
