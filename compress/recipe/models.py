"""The recipe as pydantic models: exactly the keys of the YAML file, strict, with defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from compress.core.percent import fraction
from compress.recipe.origin import Origin
from compress.recipe.stages import Stage
from compress.recipe.yaml_source import Path as KeyPath

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


class TextSource(Located):
    """Where text comes from; shared by `calibration` and `evaluate`.

    Attributes:
        data: `bundled`, a .txt, .jsonl or .parquet file, or the id of a data set on the Hugging Face hub; for speech models a
            directory of .wav files, each with its transcript beside it (talk.wav, talk.txt).
        text_column: column (Parquet, data sets) or key (JSONL) that holds the text.
        split, subset: part of the data set.
        sequence_length: tokens per row; for transcripts the most.
        batch_size: rows per forward pass.
        language: of the transcripts, such as `en`, for models of several languages; None: the checkpoint's.
    """

    data: str = Field(default="bundled", min_length=1)
    text_column: str = "text"
    split: str = "train"
    subset: str | None = None
    sequence_length: int = Field(default=256, ge=2, le=1_048_576)
    batch_size: int = Field(default=8, ge=1, le=4096)
    language: str | None = Field(default=None, min_length=1)


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
        samples: number of rows to draw.
        seed: decides which rows are drawn.
        packing: true cuts documents laid end to end into full rows; false puts one document in a row, padded right.
        experts: see `ExpertsConfig`.
    """

    samples: int = Field(default=128, ge=1, le=1_000_000)
    seed: int = Field(default=0, ge=0, lt=2**63)
    packing: bool = True
    experts: ExpertsConfig = Field(default_factory=ExpertsConfig)


class EvaluateConfig(TextSource):
    """Held-out text and the limits that fail a run when they are exceeded (None: not checked).

    Attributes:
        samples: rows to score, from the start of the text; None: all.
        max_perplexity: largest perplexity of the artifact, of its weights and, with a kv_cache stage, of weights and cache together.
        max_perplexity_increase: largest relative increase over the source model (`10%` or 0.1), for both likewise.
        max_kl: largest mean KL divergence from the source model, in nats per token.
        min_top1_agreement: smallest fraction of positions with the same most likely token.
        min_cosine: encoders only, to which the limits above do not apply: smallest mean cosine similarity between the embeddings
            that both models give a text.
    """

    split: str = "test"
    samples: int | None = Field(default=None, ge=1)
    max_perplexity: float | None = Field(default=None, gt=0)
    max_perplexity_increase: Fraction | None = None
    max_kl: float | None = Field(default=None, ge=0)
    min_top1_agreement: Annotated[Fraction, Field(le=1)] | None = None
    min_cosine: float | None = Field(default=None, ge=-1, le=1)

    def limits(self) -> dict[str, float]:
        """The limits that are set."""
        names = ("max_perplexity", "max_perplexity_increase", "max_kl", "min_top1_agreement", "min_cosine")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Recipe(Located):
    """One compression, from checkpoint to artifact.

    Attributes:
        name: name of the recipe; the default output is `out/NAME`, and for another model than the recipe's `out/NAME-MODEL`.
        description: one line for `compress recipes`.
        model: a checkpoint directory (relative to the recipe file, else to the working directory) or a hub id.
        calibration: see `CalibrationConfig`.
        stages: list of stages, in order.
        evaluate: see `EvaluateConfig`; None skips evaluation.
        output: directory of the artifact (relative to the working directory); for another model (`--model`) its name follows.
        sample: a prompt that `compress apply` continues with the finished artifact.
        seed: seeds everything random that is not the draw of calibration rows.
        on_nonfinite: `fail`, or `skip` layers whose weights or activations hold NaN or Inf (copied, and recorded).
        true_sequential: layers of a block are solved in the order they run, on outputs of the compressed ones before.
    """

    name: Name
    description: str = ""
    model: str = Field(min_length=1)
    calibration: CalibrationConfig = Field(default_factory=CalibrationConfig)
    stages: list[Stage] = Field(min_length=1)
    evaluate: EvaluateConfig | None = None
    output: str | None = None
    sample: str | None = None
    seed: int = Field(default=0, ge=0, lt=2**63)
    on_nonfinite: Literal["fail", "skip"] = "fail"
    true_sequential: bool = True

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
        if self.evaluate is not None:
            self.evaluate.locate(origin, ("evaluate",))

    def resolved(self) -> dict[str, Any]:
        """The recipe with every default filled in: plain data, always in the same order, readable as a recipe again.

        `output` is left out, so that the same recipe written to two places gives the same bytes.
        """
        data = self.model_dump(mode="json", exclude={"stages", "output"}, exclude_none=True)
        data["stages"] = [stage.resolved() for stage in self.stages]
        order = [name for name in type(self).model_fields if name in data]
        return {name: data[name] for name in order}
