"""Export directory: `export.json` of ours beside what a target wrote, verified by its hashes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from runtime.checkpoint.artifact import Artifact, check_manifest, compare_files
from runtime.checkpoint.checkpoint import read_json
from runtime.errors import ArtifactError
from runtime.system.self_hash import json_is_whole

MANIFEST = "export.json"
README = "README.md"
FORMAT = "compress-export"  # what `format` in the manifest says; others call files export.json too
SCHEMA_VERSION = 2
SEALED = 2  # the first version whose manifest holds a digest of itself
# What manifests were known by before they had a `format`.
_KEYS = {"schema_version", "target", "artifact", "tools", "conversions"}
_BEGINNING = 4096  # bytes of a damaged manifest in which its `format`, the first key, is looked for
# Targets whose directories are checkpoints or artifacts, loaded as such.
_CHECKPOINTS = ("huggingface", "triton")


class Export:
    """The directory of an export.

    Attributes:
        path: the directory.
        manifest: export.json, see `read_manifest`.
        target: what it was exported to.
        config: config.json, empty where there is none.

    Raises:
        ArtifactError: export.json is damaged or was written by a newer version.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        check_manifest(path / MANIFEST, manifest, SCHEMA_VERSION)
        self.target = self.manifest.get("target")
        if not isinstance(self.target, str):
            raise ArtifactError(f"{path / MANIFEST} has no target")
        self.config: dict[str, Any] = read_json(path / "config.json") if (path / "config.json").is_file() else {}

    @property
    def is_checkpoint(self) -> bool:
        """Whether it is loaded as a checkpoint or an artifact is."""
        return self.target in _CHECKPOINTS

    @property
    def facts(self) -> dict[str, Any]:
        """What the target wrote down for its engine; ArtifactError when it is missing."""
        facts = self.manifest.get(str(self.target))
        if not isinstance(facts, dict):
            raise ArtifactError(f"{self.path / MANIFEST} has no object {self.target!r}")
        return facts

    @property
    def total_bytes(self) -> int:
        """Bytes of all files listed."""
        return sum(int(entry["bytes"]) for entry in self.manifest["files"].values())

    def verify(self, readme: bool = True, skip: Collection[str] = (), used: Iterable[str] = ()) -> int:
        """Compare files with the manifest; returns how many were compared.

        Args:
            readme: README.md and export.json too, which people edit; nothing reads the former, and loading checks the latter by itself.
            skip: files that need not be compared, since something else has their hashes.
            used: files that loading reads, each of which must be listed.

        Raises:
            ArtifactError: files that are missing, differ, or are used and not listed; all are named.
        """
        sealed = {MANIFEST: json_is_whole} if readme and self.manifest["schema_version"] >= SEALED else {}
        passed = skip if readme else [*skip, README]
        try:
            return compare_files(self.path, self.manifest["files"], sealed, MANIFEST, used, passed)
        except ArtifactError as error:
            raise ArtifactError(f"{error}; verify=False loads it as it is") from error


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """export.json of a directory; None where there is none of ours: an unrelated file of that name says nothing.

    Raises:
        ArtifactError: it is ours (its `format` can be read, or there are no weights that could be loaded without it) and damaged.
    """
    file = directory / MANIFEST
    try:
        if not file.is_file():
            return None
    except OSError:  # no path can be so, which is said where the directory is looked for
        return None
    try:
        manifest = read_json(file)
    except ArtifactError:
        if _begins_as_ours(file) or not any(directory.glob("*.safetensors")):
            raise
        return None
    return manifest if manifest.get("format") == FORMAT or manifest.keys() >= _KEYS else None


def find_export(path: str | Path) -> Export | None:
    """The export in a directory, None where it holds something else (or nothing, or is a hub id).

    Raises:
        ArtifactError: its export.json is ours and damaged, or of a newer version.
    """
    directory = Path(path).expanduser()
    manifest = read_manifest(directory)
    return None if manifest is None else Export(directory, manifest)


def verify_files(artifact: Artifact, export: Export | None, readme: bool = True) -> int:
    """Compare the files of a checkpoint with whatever has their hashes: compress.json, export.json or both; returns how many.

    Raises:
        ArtifactError: files that are missing or differ; or nothing has their hashes.
    """
    if export is None:
        return artifact.verify()
    hashed = {} if artifact.manifest is None else artifact.manifest["files"]
    count = artifact.verify() if hashed else 0
    return count + export.verify(readme, skip=hashed, used=artifact.checkpoint.headers)


def _begins_as_ours(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return f'"format": "{FORMAT}"'.encode() in stream.read(_BEGINNING)
    except OSError:
        return False
