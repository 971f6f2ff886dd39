"""Resolution of what a user typed (a directory or a hub id) to a directory on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.config.messages import nearest
from runtime.errors import ArtifactError, first_line

# Weights, configs, tokenizers: everything a checkpoint needs, no pickles and no code unless it is asked for.
HUB_PATTERNS = [
    "*.safetensors", "*.json", "*.model", "*.spm", "*.txt", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*", "recipe.yaml", "report.html",
]  # fmt: skip
# What a checkpoint is read from, by the end of its name; and how the hub's cache calls the directories that its blobs are in.
_OWN = (".safetensors", ".json", ".model", ".spm", ".txt", ".jinja", ".tiktoken", ".yaml", ".py", ".bin", ".pt")
# Manifests of artifacts and exports, which have the hash of every file.
_HASHED = ("compress.json", "export.json")
_REPOSITORIES = ("models--", "datasets--", "spaces--")
_SHOWN = 200  # characters of a path that a sentence repeats
_LONGEST_NAME = 255  # bytes
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve(source: str | Path, trust_remote_code: bool = False) -> Path:
    """The directory of a checkpoint or artifact; a hub id ("org/name") is downloaded into the Hugging Face cache.

    Raises:
        ArtifactError: nothing is there, and the message names the nearest directory; or no path can be so.
    """
    if not isinstance(source, (str, os.PathLike)) or not str(source):
        raise ArtifactError(f"{source!r} is no path; give the directory of a checkpoint or artifact, or a hub id")
    text = os.fspath(source)
    path = Path(text).expanduser()
    try:
        if path.is_dir():
            if any((path / name).exists() for name in _HASHED):
                _refuse_links_out(path)
            return path
        there = path.exists()
    except OSError as error:  # a name that is too long, a directory that may not be entered
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
        raise ArtifactError(f"{shown} cannot be read: {error.strerror or error}") from error
    if there:
        raise ArtifactError(f"{text} is a file; give the directory of the checkpoint (the one with config.json)")
    # "models/llama" is a local path when ./models exists, whatever else it may look like.
    if isinstance(source, str) and _HUB_ID.fullmatch(text) and not path.parent.is_dir():
        return _download(text, trust_remote_code)
    raise ArtifactError(f"{text} does not exist{_suggestion(path)}")


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Around whatever opens `file` and reads it.

    Raises:
        ArtifactError: it cannot be read, or is no regular file (a pipe would be waited for).
    """
    try:
        if file.exists() and not file.is_file():
            raise ArtifactError(f"{file} is no regular file")
        yield
    except OSError as error:
        raise ArtifactError(f"{file} cannot be read: {error.strerror or error}") from error


def check_inside(name: str, where: str) -> None:
    """ArtifactError where `name`, which `where` says of a file, leads out of the directory or cannot be one."""
    parts = re.split(r"[/\\]", name)
    if not parts[0] or ".." in parts or ":" in name or "\0" in name:
        raise ArtifactError(f"{where} names file {name!r}: files must lie inside the directory")
    if any(len(part.encode(errors="replace")) > _LONGEST_NAME for part in parts):
        raise ArtifactError(f"{where} names a file that is longer than names can be")


def _refuse_links_out(directory: Path) -> None:
    """ArtifactError where something in an artifact or export is a link to somewhere else, which its hashes would not bind.

    Plain checkpoints are put together of links on clusters and in caches, and theirs are followed. Links of the hub's cache lead to its
    blobs, and may everywhere.
    """
    for file in directory.rglob("*"):
        if (is_checkpoint_file(file) or file.is_dir()) and leads_out(file, directory):
            raise ArtifactError(
                f"{file} is a link that leads out of the directory, to {file.resolve()}; what has a manifest must hold its files "
                "itself: put the file itself there"
            )


def is_checkpoint_file(file: Path) -> bool:
    """Whether a checkpoint could be read from a file, by its name."""
    return file.name.endswith(_OWN)


def leads_out(file: Path, directory: Path) -> bool:
    """Whether a file of a checkpoint is a link to something that is neither in its directory nor a blob of the hub's cache."""
    try:
        leads = file.resolve()
    except (OSError, RuntimeError):  # to itself
        return False
    blob = leads.parent.name == "blobs" and leads.parent.parent.name.startswith(_REPOSITORIES)
    return leads.exists() and not leads.is_relative_to(directory.resolve()) and not blob


def _suggestion(path: Path) -> str:
    """Name the nearest existing directory beside the missing one; where even the parent is missing, say so."""
    parent = path.parent
    if not parent.is_dir():
        while not parent.is_dir() and parent != parent.parent:
            missing, parent = parent, parent.parent
        near = _nearest(missing.name, parent)
        return f": there is no directory {missing}" + (f" (nearest: {near})" if near else "")
    near = _nearest(path.name, parent)
    return f"; the nearest directory is {near}" if near else ""


def _nearest(name: str, parent: Path) -> Path | None:
    try:
        found = nearest(name, [child.name for child in parent.iterdir() if child.is_dir()])
    except OSError:
        return None
    return None if found is None else parent / found


def _download(repository: str, trust_remote_code: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [*HUB_PATTERNS, "*.py"] if trust_remote_code else HUB_PATTERNS
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns))
    except Exception as error:  # the hub client raises its own, requests', httpx' and OS errors
        reason = first_line(error).rstrip(". ")
        raise ArtifactError(
            f"{repository} is no directory here, and the Hugging Face hub did not give it "
            f"({type(error).__name__}: {reason})"
        ) from error
