"""What `build.json` must say: every entry that finishing a bundle reads, with its type."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from export.tensorrt.model import DecoderModel
from export.tensorrt.options import TensorrtOptions
from export.tensorrt.profiles import Limits
from runtime.errors import ArtifactError


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
    """The entries; what people read (versions, profiles, rules) may say anything."""

    options: TensorrtOptions
    dtype: Literal["FLOAT", "HALF", "BF16"]
    sparse: list[str]
    aliases: dict[str, str]
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
