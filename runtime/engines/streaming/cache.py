"""Cache of prepared weights: one directory a key under `$COMPRESS_CACHE` (or `~/.cache/compress`), bounded, least recently used out first.

The key is a digest of everything that the file's content depends on, so a file is never out of date: it is only unused, and goes when
room is needed. Nothing here is needed twice: deleting the directory costs one repack.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import shutil
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from runtime.checkpoint.artifact import MANIFEST, Artifact, sha256
from runtime.system import processes
from runtime.system.directories import cache_directory

NAME = "weights.safetensors"
SMALLEST = 32 << 20  # bytes of tensors; smaller artifacts are repacked in a moment
MOST_BYTES = 32 * 10**9
MOST_SHARE = 0.1  # of the disk
HASHED = 64 << 20  # bytes of a file without a checksum; larger ones are told apart by samples
_ABANDONED = 24 * 3600.0  # seconds after which an unfinished file belongs to nobody
log = logging.getLogger("compress.cache")


class NoCacheError(Exception):
    """Prepared weights cannot be stored here; the message says why."""


@dataclass(frozen=True)
class Entry:
    """One prepared file: the artifact it was made from, its size, and when it was last used (seconds since the epoch)."""

    path: Path
    source: str
    bytes: int
    used: float


def directory() -> Path:
    """Where the files are."""
    return cache_directory("prepared")


def contents() -> list[Entry]:
    """All prepared files, last used first."""
    found = []
    for file in _files():
        try:
            status = file.stat()
        except OSError:  # gone meanwhile
            continue
        found.append(Entry(file, _source(file), status.st_size, status.st_mtime))
    return sorted(found, key=lambda entry: -entry.used)


def clear() -> int:
    """Delete all prepared files; returns the bytes freed. Models that are loaded from them go on undisturbed."""
    freed = 0
    for entry in contents():
        freed += entry.bytes
        shutil.rmtree(entry.path.parent, ignore_errors=True)
    return freed


def key(artifact: Artifact, parts: dict[str, object]) -> str:
    """Digest of the artifact as it lies there, of `parts` (dtype, layouts, ...), and of this library, torch and the CPU.

    Files that the manifest lists are known by its checksums. Of others sizes and times say too little (copying tools set them to what
    they like), so where a file is and what it holds are in the key too.
    """
    checkpoint = artifact.checkpoint
    listed = (artifact.manifest or {}).get("files", {})
    digest = hashlib.sha256()
    if not checkpoint.headers.keys() <= listed.keys():
        _feed(digest, checkpoint.fingerprint().encode())
    # As it is read, which may be in a scheme that the file does not name (`runtime.layers.rounding`).
    _feed(digest, json.dumps(artifact.config, sort_keys=True).encode())
    manifest = artifact.path / MANIFEST
    _feed(digest, manifest.read_bytes() if manifest.is_file() else b"")
    for name, header in checkpoint.headers.items():
        status = header.file.stat()
        _feed(digest, f"{name} {status.st_size} {status.st_mtime_ns}".encode())
        _feed(digest, header.raw)
        if name not in listed:
            _feed(digest, identity(header.file, status))
    _feed(digest, json.dumps({**parts, **library_facts(parts.get("device") == "cpu")}, sort_keys=True).encode())
    return digest.hexdigest()[:32]


def path_of(name: str) -> Path:
    """Where the file of a key is, or would be."""
    return directory() / name / NAME


def touch(file: Path) -> None:
    """Remember that the file was used."""
    with contextlib.suppress(OSError):  # a cache that others fill
        os.utime(file)


def allowed(home: Path) -> int:
    """Bytes that all files together may take."""
    existing = next(p for p in (home, *home.parents) if p.exists())
    return min(MOST_BYTES, int(MOST_SHARE * shutil.disk_usage(existing).total))


def make_room(path: Path, needed: int, beyond: bool = False) -> None:
    """Delete what was unused longest until the file at `path` may have `needed` bytes, and what interrupted writers left.

    Raises:
        NoCacheError: it is larger than all files together may be, and may not go `beyond`.
    """
    home = path.parents[1]
    bound = allowed(home)
    if needed > bound and not beyond:
        raise NoCacheError(f"they take {needed / 1e9:.3g} GB, and {home} may hold {bound / 1e9:.3g} GB")
    total = needed
    for entry in contents():
        if entry.path == path:  # it is going to be replaced
            continue
        total += entry.bytes
        if total > bound:
            log.info("making room in the cache: %s goes", entry.path.parent)
            shutil.rmtree(entry.path.parent, ignore_errors=True)
    for left in home.glob("*/*.tmp"):
        try:
            if time.time() - left.stat().st_mtime > _ABANDONED:
                left.unlink()
        except OSError:  # another process was faster
            continue


def _files() -> list[Path]:
    return sorted(directory().glob(f"*/{NAME}"))


def _source(file: Path) -> str:
    try:
        return (file.parent / "source.txt").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError):
        return ""


@cache
def library_facts(on_cpu: bool) -> dict[str, str]:
    """What decides how a weight is laid out besides the weight: the sources of this library, torch, and the CPU."""
    skipped = ("triton", "cuda") if on_cpu else ()
    digest = sources(("kernels", "formats", "layers", "modeling", "engines/streaming"), ("*.py",), skipped)
    # torch chooses the layout of its own int4 kernel by the CPU, or by what ATEN_CPU_CAPABILITY says of it.
    machine = " ".join([platform.machine(), torch.backends.cpu.get_cpu_capability(), *sorted(processes.flags())])
    return {"sources": digest, "torch": torch.__version__, "machine": machine}


def sources(folders: tuple[str, ...], patterns: tuple[str, ...], skipped: tuple[str, ...] = ()) -> str:
    """Digest of the sources in some folders of this package; `skipped`: names of folders within these that do not count."""
    digest = hashlib.sha256()
    for folder in folders:
        for pattern in patterns:
            for file in sorted((Path(__file__).parents[2] / folder).rglob(pattern)):
                if file.parent.name not in skipped:
                    _feed(digest, file.read_bytes())
    return digest.hexdigest()


def identity(file: Path, status: os.stat_result) -> bytes:
    """Which file it is, and for one that is read in a moment what it holds. The time of change is one that nobody can set."""
    content = sha256(file) if status.st_size <= HASHED else ""
    return f"{file.resolve()} {status.st_ino} {status.st_ctime_ns} {content}".encode()


def _feed(digest: hashlib._Hash, content: bytes) -> None:
    digest.update(len(content).to_bytes(8, "little"))
    digest.update(content)
