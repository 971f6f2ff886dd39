"""An export as `runtime.load` sees it: a directory with `export.json` that another engine runs. One engine a target."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from runtime.artifact import sha256
from runtime.checkpoint import read_json
from runtime.errors import ArtifactError, RequestError

MANIFEST = "export.json"
SCHEMA_VERSION = 1
# Targets that this runtime runs itself: `load(export, device, options)` gives the engine.
_ENGINES = {
    "onnx": "runtime.engines.onnx:load_onnx",
    "tensorrt": "runtime.engines.tensorrt:load_tensorrt",
}
# Targets whose directories are checkpoints or artifacts, loaded as such.
_CHECKPOINTS = ("huggingface", "triton")


class Export:
    """The directory of an export.

    Attributes:
        path: the directory.
        manifest: export.json.
        target: what it was exported to.
        config: config.json, empty where there is none.

    Raises:
        ArtifactError: export.json is damaged or was written by a newer version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_json(path / MANIFEST)
        version = self.manifest.get("schema_version")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise ArtifactError(f"{path / MANIFEST}: schema_version must be an integer >= 1, not {version!r}")
        if version > SCHEMA_VERSION:
            raise ArtifactError(
                f"{path / MANIFEST} has schema version {version}, this runtime reads up to {SCHEMA_VERSION}: "
                "install a newer version of compress"
            )
        self.target = self.manifest.get("target")
        files = self.manifest.get("files")
        if not isinstance(self.target, str) or not isinstance(files, dict):
            raise ArtifactError(f"{path / MANIFEST} has no target and files")
        for name, entry in files.items():
            sizes = isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)
            if not sizes:
                raise ArtifactError(f"{path / MANIFEST}: file {name} needs its size in bytes and its SHA-256")
        self.config: dict[str, Any] = read_json(path / "config.json") if (path / "config.json").is_file() else {}

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

    def verify(self) -> int:
        """Compare every file with the manifest; returns how many there are. ArtifactError names those that differ."""
        listed: dict[str, dict[str, Any]] = self.manifest["files"]
        for name in listed:
            if name.startswith("/") or ".." in Path(name).parts or "\\" in name or ":" in name:
                raise ArtifactError(f"{self.path / MANIFEST} lists {name!r}: files must lie inside the directory")
        wrong = [name for name, entry in sorted(listed.items()) if not _is(self.path / name, entry)]
        if wrong:
            raise ArtifactError(f"{self.path} is corrupt: missing or different: {', '.join(wrong)}")
        return len(listed)


def find_export(path: str | Path) -> Export | None:
    """The export in a directory, None where it holds a checkpoint or an artifact (or nothing, or is a hub id)."""
    directory = Path(path).expanduser()
    if not (directory / MANIFEST).is_file():
        return None
    export = Export(directory)
    return None if export.target in _CHECKPOINTS else export


def load_export(export: Export, device: torch.device, options: dict[str, Any]) -> Any:
    """The engine that runs an export.

    Args:
        options: `runtime.load`'s remaining keywords: kernels, threads, dtype, max_memory.

    Raises:
        RequestError: this runtime does not run the target; the message says what does.
    """
    if export.target not in _ENGINES:
        raise RequestError(
            f"{export.path} is an export to {export.target}, which its own engine runs (its README.md shows how); "
            f"this runtime loads artifacts and exports to {', '.join(_ENGINES)}"
        )
    module, _, name = _ENGINES[export.target].partition(":")
    load: Callable[..., Any] = getattr(import_module(module), name)
    try:
        return load(export, device, options)
    except (KeyError, TypeError) as error:
        # Engines read their facts as they need them; what is missing there is the manifest's fault.
        if isinstance(error, KeyError) or "facts" in str(error):
            raise ArtifactError(f"{export.path / MANIFEST} does not say {error}, which its engine needs") from error
        raise


def _is(file: Path, expected: dict[str, Any]) -> bool:
    return file.is_file() and file.stat().st_size == expected["bytes"] and sha256(file) == expected["sha256"]
