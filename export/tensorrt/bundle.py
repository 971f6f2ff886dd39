"""Build bundle: the ONNX file in TensorRT's dialect and `build.json`, from which the target machine builds the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field, NonNegativeInt, ValidationError, field_serializer

from export.folder import listing, write_json
from export.onnx_graph.change import Expected
from export.target import Conversion
from export.tensorrt.options import FIXED_BY_BUNDLE, TensorrtOptions
from export.tensorrt.profiles import DecoderModel, Limits, profiles
from export.verify import Probe
from runtime.checkpoint.artifact import sha256
from runtime.errors import ArtifactError, RequestError

BEST = 256  # logits of a position


@dataclass(frozen=True)
class BestProbe(Probe):
    """A probe with the best logits only; the others are minus infinity in `logits`.

    Attributes:
        ids: int64 `[prompts, seq, best]`, the tokens whose logits are in the file.
        rest: float32 `[prompts, seq]`, log of the summed exponentials of the others; minus infinity where there are none.
    """

    ids: torch.Tensor
    rest: torch.Tensor

    def outcomes(self, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ours, theirs = self.logits.gather(-1, self.ids), other.gather(-1, self.ids)
        if bool(self.rest.isinf().all()):
            return ours, theirs
        return torch.cat([ours, self.rest.unsqueeze(-1)], -1), torch.cat(
            [theirs, _rest(other, self.ids).unsqueeze(-1)], -1
        )


def save_expected(expected: Expected, folder: Path) -> None:
    """Write `probe.safetensors`."""
    from safetensors.torch import save_file

    probe = expected.probe
    best = probe.logits.topk(min(BEST, probe.logits.shape[-1]), dim=-1)
    tensors = {
        "rows": probe.rows.contiguous(),
        "logits": best.values.contiguous(),
        "ids": best.indices.to(torch.int32).contiguous(),
        "rest": _rest(probe.logits, best.indices).contiguous(),
        "prompt_lengths": torch.tensor([len(p) for p in probe.prompts]),
    }
    facts = {
        "vocabulary": str(probe.logits.shape[-1]),
        "new_tokens": str(len(probe.continuations[0])),
        "change": json.dumps(expected.change),
    }
    save_file(tensors, folder / PROBE, metadata=facts)


def load_expected(folder: Path) -> Expected | None:
    """What `save_expected` wrote; None where the bundle has none.

    Raises:
        ArtifactError: the file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    if not (folder / PROBE).is_file():
        return None
    try:
        with safe_open(folder / PROBE, "pt") as file:
            facts, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        rows, lengths, count = tensors["rows"], tensors["prompt_lengths"].tolist(), int(facts["new_tokens"])
        ids, rest = tensors["ids"].long(), tensors["rest"]
        logits = torch.full((*rows.shape, int(facts["vocabulary"])), float("-inf"))
        logits.scatter_(-1, ids, tensors["logits"])
        change = {str(name): float(value) for name, value in json.loads(facts["change"]).items()}
    except (SafetensorError, AttributeError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise ArtifactError(f"{folder / PROBE} is damaged: {error}") from error
    prompts = [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
    continuations = [row[length : length + count].tolist() for row, length in zip(rows, lengths, strict=True)]
    return Expected(BestProbe(prompts, rows, logits, continuations, ids, rest), change)


def _rest(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log of the summed exponentials of all logits but those of `ids`, `[prompts, seq]`."""
    return logits.float().scatter(-1, ids, float("-inf")).logsumexp(-1)


BUILD = "build.json"
ONNX, DATA = "model.onnx", "model.onnx.data"
PROBE = "probe.safetensors"

#: Versions that the builder was written against.
VERSIONS = {"onnx": ">=10.13", "api_checked": "11.4.0.106"}


class FileEntry(BaseModel):
    """A file of the bundle."""

    bytes: NonNegativeInt
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Build(BaseModel):
    """`build.json`. Of what only people read (versions, rules, profiles) anything is accepted.

    Attributes:
        options: those given. dtype: `DataType` member of floats. sparse: modules with 2:4 weights.
        artifact, conversions, losses: as in `export.json`.
        changed: layers do not compute what they do in the artifact. rounds_inputs: inputs of layers are rounded to a grid.
        rules: how many of TensorRT's rules held.
    """

    schema_version: Literal[2]
    kind: Literal["tensorrt-bundle"] = "tensorrt-bundle"
    tensorrt: Any = VERSIONS
    options: TensorrtOptions
    dtype: Literal["FLOAT", "HALF", "BF16"]
    sparse: list[str]
    artifact: dict[str, Any]
    conversions: list[Conversion]
    losses: dict[str, float]
    changed: bool
    rounds_inputs: bool
    rules: Any = None
    model: DecoderModel
    limits: Limits
    profiles: Any = None
    files: dict[str, FileEntry] = {}

    @field_serializer("options")
    def _given(self, options: TensorrtOptions) -> dict[str, Any]:
        return options.model_dump(mode="json", exclude_unset=True)


def write_build(folder: Path, build: Build) -> None:
    """`build.json`, with the hashes of the files that are there now."""
    found = listing(folder)
    shapes = {"onnx": profiles(build.model, build.limits)}
    files = {name: found[name] for name in (ONNX, DATA, PROBE) if name in found}
    write_json(folder / BUILD, build.model_dump(mode="json") | {"profiles": shapes, "files": files})


def read_build(folder: Path) -> Build:
    """`build.json`, checked.

    Raises:
        ArtifactError: it cannot be read, is of another version, or an entry is missing or of the wrong type; the sentence names it.
    """
    file = folder / BUILD
    try:
        build = Build.model_validate_json(file.read_bytes(), strict=True)
    except OSError as error:
        raise ArtifactError(f"{file} cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        entry = ".".join(map(str, first["loc"])) or "content"
        wrong = "is missing" if first["type"] == "missing" else f"is {first['input']!r:.60}: {first['msg']}"
        raise ArtifactError(f"{file}: entry {entry} {wrong}") from error
    if ONNX not in build.files:
        raise ArtifactError(f"{file}: entry files.{ONNX} is missing")
    return build


class Bundle:
    """A bundle as `export.run` reads it in the place of an artifact (`export.source.Source`).

    Attributes:
        path: the directory. build: its `build.json`.
        defaults: options that it was written with.

    Raises:
        ArtifactError: the directory is no bundle, or its `build.json` is wrong.
    """

    trust_remote_code = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.build = read_build(path)
        self.defaults: Mapping[str, Any] = self.build.options.model_dump(exclude_unset=True) | {"bundle": False}

    @property
    def bytes(self) -> int:
        """Size of all files of the build, bytes."""
        return sum(entry.bytes for entry in self.build.files.values())

    def describe(self) -> dict[str, Any]:
        """The artifact that the bundle was made of."""
        return self.build.artifact

    def verify(self) -> None:
        """Raise ArtifactError unless every file has the hash that `build.json` says."""
        for name, entry in self.build.files.items():
            file = self.path / name
            if Path(name).name != name or not file.is_file():
                raise ArtifactError(f"{self.path} lacks {name}, which {BUILD} names")
            if sha256(file) != entry.sha256:
                raise ArtifactError(f"{file} is damaged: its SHA-256 is not the one in {BUILD}")

    def check_options(self, options: TensorrtOptions) -> None:
        """Raise RequestError where an option asks for another ONNX file than the one that is here, or for no engine."""
        if options.bundle:
            raise RequestError(f"{self.path} is a bundle already; leave out option bundle to finish it")
        for name in FIXED_BY_BUNDLE:
            asked, fixed = getattr(options, name), getattr(self.build.options, name)
            if asked != fixed:
                raise RequestError(f"option {name} is {asked!r}, and the bundle {self.path} was written with {fixed!r}")
