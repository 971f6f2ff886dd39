"""How every kind of draft gets into its directory: all files and `draft.json`, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compress.core.files import directory_beside, disk_errors, sha256, write_json
from runtime.drafting.drafters.draft_model import DRAFT
from runtime.errors import RequestError
from runtime.system.directories import let_others_read


@contextmanager
def draft_directory(directory: Path, content: dict[str, Any]) -> Iterator[Path]:
    """Yield an empty directory for the files of a draft; when they are there it takes the place of `directory`.

    Args:
        directory: new, or an earlier draft's, which is replaced.
        content: of draft.json; the sizes and sums of the files are added to it.

    Raises:
        RequestError: the directory holds something else, or `content` has no target. CompressError: the disk is full.
    """
    if not content["target"]:
        raise RequestError("a draft needs its target's fingerprint: another model's would not be refused")
    if directory.exists() and not (directory / DRAFT).is_file() and (directory.is_file() or any(directory.iterdir())):
        raise RequestError(f"{directory} is not empty and holds no draft; choose another directory")
    with disk_errors(f"writing {directory}"), directory_beside(directory) as temporary:
        yield temporary
        for file in temporary.iterdir():
            let_others_read(file)
        write_json(temporary / DRAFT, {**content, "files": sums(temporary)})


def sums(directory: Path) -> dict[str, dict[str, Any]]:
    """{name: {"bytes", "sha256"}} of all files but draft.json."""
    files = sorted(file for file in directory.iterdir() if file.is_file() and file.name != DRAFT)
    return {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in files}
