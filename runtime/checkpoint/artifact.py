"""Artifact: a checkpoint directory with a manifest (`compress.json`) of what was done and what every file must be."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.checkpoint.checkpoint import Checkpoint, read_json
from runtime.checkpoint.locate import check_inside, reading, resolve
from runtime.config.messages import did_you_mean
from runtime.errors import ArtifactError, CompressError
from runtime.system.self_hash import json_is_whole, page_is_whole

MANIFEST = "compress.json"
REPORT = "report.html"
SCHEMA_VERSION = 2
SEALED = 2  # the first version whose manifest and report hold digests of themselves
_SHOWN = 200  # characters of a message of Python's


class Artifact:
    """A compressed artifact, or a plain checkpoint (then `manifest` is None).

    Attributes:
        checkpoint: tensors, headers and config.
        manifest: the content of compress.json, or None.

    Raises:
        ArtifactError: see `Checkpoint`; also a manifest that is damaged or was written by a newer version.
    """

    def __init__(self, path: str | Path, trust_remote_code: bool = False) -> None:
        directory = resolve(path, trust_remote_code)
        # The manifest first: an artifact of a newer version may have weights in a way this version cannot judge.
        self.manifest = _read_manifest(directory)
        self.checkpoint = Checkpoint(directory, trust_remote_code)

    @property
    def path(self) -> Path:
        """Directory of the artifact."""
        return self.checkpoint.path

    @property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return self.checkpoint.config

    def verify(self) -> int:
        """Compare every file with the manifest; returns how many files were checked.

        Raises:
            ArtifactError: no manifest, or files that are missing, differ, or (safetensors only) are not listed.
        """
        if self.manifest is None:
            raise ArtifactError(
                f"{self.path} cannot be verified: it has no {MANIFEST} (only compressed artifacts have one)"
            )
        sealed = {} if self.manifest["schema_version"] < SEALED else {MANIFEST: json_is_whole, REPORT: page_is_whole}
        return compare_files(self.path, self.manifest["files"], sealed, "the manifest", self.checkpoint.headers)

    def summary(self) -> dict[str, Any]:
        """Facts for `compress inspect`: JSON-ready, from headers and manifest only (no tensor is read)."""
        checkpoint = self.checkpoint
        dtypes: Counter[str] = Counter()
        for name in checkpoint.names():
            dtypes[str(checkpoint.dtype(name)).removeprefix("torch.")] += checkpoint.nbytes(name)
        quantization = self.config.get("quantization_config")
        result: dict[str, Any] = {
            "path": str(self.path),
            "architecture": next(iter(self.config.get("architectures") or []), self.config.get("model_type")),
            "compressed": quantization is not None,
            "files": len(checkpoint.headers),
            "tensors": len(checkpoint.names()),
            "tensor_bytes": checkpoint.total_bytes,
            "bytes_by_dtype": dict(dtypes.most_common()),
        }
        if isinstance(quantization, dict):
            result["quant_method"] = quantization.get("quant_method")
            result["format"] = quantization.get("format")
        if self.manifest is not None:
            actions = Counter(account["action"] for account in self.manifest["tensors"].values())
            result |= {
                "schema_version": self.manifest["schema_version"],
                "compress_version": self.manifest.get("compress_version"),
                "source": self.manifest.get("source"),
                "tensor_actions": dict(actions),
                "bytes": self.manifest.get("bytes"),
                "metrics": self.manifest.get("metrics", {}),
            }
            for key in ("passes", "calibration", "evaluation", "warnings", "kv_cache", "kv_cache_bytes"):
                if key in self.manifest:
                    result[key] = self.manifest[key]
        return result


@contextmanager
def shown(path: Path) -> Iterator[None]:
    """Around whatever shows the content of a manifest, which others may have changed.

    Raises:
        ArtifactError: in the place of Python's errors for data of another structure than was written.
    """
    try:
        yield
    except CompressError:
        raise
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        AssertionError,
        RecursionError,
    ) as error:
        said = (str(error).splitlines() or [""])[0][:_SHOWN]
        raise ArtifactError(
            f"{path / MANIFEST} says something that no version of this tool writes ({type(error).__name__}: {said})"
        ) from error


def compare_files(
    directory: Path,
    listed: Mapping[str, dict[str, Any]],
    sealed: Mapping[str, Callable[[bytes], bool]],
    manifest: str,
    used: Iterable[str],
    skip: Collection[str] = (),
) -> int:
    """Compare the files of a directory with its manifest; returns how many were compared.

    Args:
        listed: {name: its size in bytes and its SHA-256}.
        sealed: {name: whether its bytes are as they were written} of files that no list can hold the SHA-256 of, since they are
            written after it; one that is not there is passed over.
        manifest: what messages call it.
        used: files that loading reads, each of which must be listed.
        skip: files that need not be compared.

    Raises:
        ArtifactError: files that are missing, differ, or are used and not listed, all of which are named; or one cannot be read.
    """
    names = sorted(set(listed).difference(skip))

    def is_as_listed(name: str) -> bool:
        file, expected = directory / name, listed[name]
        return file.stat().st_size == expected["bytes"] and sha256(file) == expected["sha256"]

    there = [name for name in names if (directory / name).is_file()]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # hashing lets go of the interpreter's lock
        same = dict(zip(there, pool.map(is_as_listed, there), strict=True))
    different = [name for name, right in same.items() if not right]
    for name, is_whole in sealed.items():
        with reading(directory / name):
            if (directory / name).is_file() and not is_whole((directory / name).read_bytes()):
                different.append(name)
    problems = {
        "missing": [name for name in names if name not in same],
        "content differs from its SHA-256": different,
        f"not in {manifest}": [name for name in used if name not in listed],
    }
    said = "; ".join(f"{what}: {', '.join(found)}" for what, found in problems.items() if found)
    if said:
        raise ArtifactError(f"{directory} is corrupt: {said}")
    return len(names)


def sha256(file: Path) -> str:
    """SHA-256 (hex) of a file; ArtifactError where it cannot be read."""
    with reading(file), file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_manifest(directory: Path) -> dict[str, Any] | None:
    file = directory / MANIFEST
    if not file.exists():
        return None
    manifest = read_json(file)
    check_manifest(file, manifest, SCHEMA_VERSION)
    if not isinstance(manifest.get("tensors"), dict):
        raise ArtifactError(f"{file} has no object 'tensors'{did_you_mean('tensors', manifest)}")
    for name, account in manifest["tensors"].items():
        if not isinstance(account, dict) or account.get("action") not in ("compressed", "copied", "dropped"):
            raise ArtifactError(f"{file}: tensor {name} needs an action: compressed, copied or dropped")
    return manifest


def check_manifest(file: Path, manifest: Mapping[str, Any], newest: int) -> None:
    """Check the version of a manifest and the files that it lists.

    Raises:
        ArtifactError: it is of a newer version; or it lists a file without size and SHA-256, or outside of the directory.
    """
    version = manifest.get("schema_version")
    if type(version) is not int or version < 1:
        raise ArtifactError(f"{file}: schema_version must be an integer >= 1, not {version!r}")
    if version > newest:
        writer = manifest.get("compress_version", "a newer version")
        raise ArtifactError(
            f"{file} has schema version {version} (written by compress {writer}), this runtime reads up to {newest}: "
            "install a newer version of compress"
        )
    if not isinstance(manifest.get("files"), dict):
        raise ArtifactError(f"{file} has no object 'files'{did_you_mean('files', manifest)}")
    for name, entry in manifest["files"].items():
        check_inside(name, str(file))
        if not isinstance(entry, dict) or type(entry.get("bytes")) is not int:
            raise ArtifactError(f"{file}: file {name} needs its size in bytes")
        if not isinstance(entry.get("sha256"), str) or len(entry["sha256"]) != 64:
            raise ArtifactError(f"{file}: file {name} needs a SHA-256 of 64 hexadecimal digits")
