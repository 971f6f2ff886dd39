"""Build bundle: the ONNX file in TensorRT's dialect and `build.json`, from which the target machine builds the engine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from export.folder import write_json
from export.target import Conversion
from export.tensorrt.model import DecoderModel
from export.tensorrt.options import FIXED_BY_BUNDLE, TensorrtOptions
from export.tensorrt.profiles import Limits, profiles
from runtime.checkpoint.artifact import sha256
from runtime.errors import ArtifactError, RequestError

BUILD = "build.json"
ONNX, DATA = "model.onnx", "model.onnx.data"
PROBE = "probe.safetensors"
SCHEMA_VERSION = 2
#: Versions that the builder was written against.
VERSIONS = {"onnx": ">=10.13", "api_checked": "11.4.0.106"}
#: Entries that the writer of the ONNX file fills in.
CONTENT = (
    "options", "dtype", "sparse", "artifact", "conversions", "losses", "changed", "rounds_inputs", "rules",
)  # fmt: skip


class FileEntry(BaseModel):
    """A file of the bundle."""

    bytes: NonNegativeInt
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class ConversionEntry(BaseModel):
    """See `export.target.Conversion`."""

    what: str
    modules: tuple[str, ...]
    exact: bool
    bytes: int | None = None


class BuildFile(BaseModel):
    """The entries of `build.json` that finishing a bundle reads; what people read (versions, profiles, rules) may say anything."""

    options: TensorrtOptions
    dtype: Literal["FLOAT", "HALF", "BF16"]
    sparse: list[str]
    artifact: dict[str, Any]
    conversions: list[ConversionEntry]
    losses: dict[str, float]
    changed: bool
    rounds_inputs: bool
    model: DecoderModel
    limits: Limits
    files: dict[str, FileEntry]


def read_entries(path: Path, text: str) -> BuildFile:
    """The entries of `build.json`.

    Raises:
        ArtifactError: one is missing or of the wrong type; the sentence names file and entry.
    """
    try:
        return BuildFile.model_validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        entry = ".".join(str(part) for part in first["loc"]) or "content"
        if first["type"] == "missing":
            raise ArtifactError(f"{path} has no entry {entry}, which an engine is built from") from error
        raise ArtifactError(f"{path}: entry {entry} is {first['input']!r:.60}: {first['msg']}") from error


def write_build(folder: Path, content: dict[str, Any], model: DecoderModel, size: Limits) -> None:
    """`build.json`, with the hashes of the files that are there now.

    Args:
        content: the entries `CONTENT`.
    """
    names = [name for name in (ONNX, DATA, PROBE) if (folder / name).is_file()]
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)} for name in names}
    value = {
        "schema_version": SCHEMA_VERSION,
        "kind": "tensorrt-bundle",
        "tensorrt": VERSIONS,
        **content,
        "model": asdict(model),
        "limits": asdict(size),
        "profiles": {"onnx": profiles(model, size)},
        "files": files,
    }
    write_json(folder / BUILD, value)


class Bundle:
    """A bundle as `export.run` reads it in the place of an artifact (`export.source.Source`).

    Attributes:
        path: the directory. build: `build.json`. entries: those that an engine is built from, checked. model: what is built.
        defaults: options that it was written with.

    Raises:
        ArtifactError: the directory is no bundle, or a newer one, or an entry is missing or of the wrong type.
    """

    trust_remote_code = False

    def __init__(self, path: Path) -> None:
        self.path = path
        file = path / BUILD
        try:
            text = file.read_text(encoding="utf-8")
            self.build: dict[str, Any] = json.loads(text)
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{file} cannot be read: {error}") from error
        if not isinstance(self.build, dict) or self.build.get("kind") != "tensorrt-bundle":
            raise ArtifactError(f"{file} is not the description of a TensorRT bundle")
        version = self.build.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ArtifactError(f"{file} has schema version {version!r}, this version reads {SCHEMA_VERSION}")
        self.entries = read_entries(file, text)
        if ONNX not in self.entries.files:
            raise ArtifactError(f"{file} has no entry files.{ONNX}, which an engine is built from")
        self.defaults: dict[str, Any] = {**self.build["options"], "bundle": False}
        self.model: DecoderModel = self.entries.model

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries.files.values())

    @property
    def conversions(self) -> list[Conversion]:
        """What was converted when the bundle was written."""
        return [Conversion(**dict(conversion)) for conversion in self.entries.conversions]

    def describe(self) -> dict[str, Any]:
        """The artifact that the bundle was made of."""
        return dict(self.build["artifact"])

    def verify(self) -> None:
        """Raise ArtifactError unless every file has the hash that `build.json` says."""
        for name, entry in self.entries.files.items():
            file = self.path / name
            if Path(name).name != name or not file.is_file():
                raise ArtifactError(f"{self.path} lacks {name}, which {BUILD} names")
            if sha256(file) != entry.sha256:
                raise ArtifactError(f"{file} is damaged: its SHA-256 is not the one in {BUILD}")

    def check_options(self, options: TensorrtOptions) -> None:
        """Raise RequestError where an option asks for another ONNX file than the one that is here, or for no engine."""
        if options.bundle:
            raise RequestError(f"{self.path} is a bundle already; leave out option bundle to finish it")
        written = self.entries.options
        for name in FIXED_BY_BUNDLE:
            asked, fixed = getattr(options, name), getattr(written, name)
            if asked != fixed:
                raise RequestError(
                    f"option {name} is {asked!r}, and the bundle {self.path} was written with {fixed!r}; write another bundle"
                )


def is_bundle(path: Path) -> bool:
    """Whether a directory is (meant to be) a bundle."""
    return (path / BUILD).is_file()
