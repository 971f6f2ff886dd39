"""A cache of its own for a test, in which nothing is remembered, but whose compiled libraries are those of all tests."""

from __future__ import annotations

from pathlib import Path

from runtime.system.directories import cache_directory


def fresh_cache(folder: Path) -> Path:
    """What `COMPRESS_CACHE` may name: `folder`, made if it is not there. Compiling every library anew takes a minute."""
    folder.mkdir(exist_ok=True)
    (folder / "native").symlink_to(cache_directory("native"), target_is_directory=True)
    return folder
