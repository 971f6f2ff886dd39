"""The disk as it is at every moment of a run: what a kill -9 there would leave, without killing anything.

`Moments` copies a directory before every operation that changes the disk, and after every file that is written also with that file cut in
half. Each copy is what a process finds that goes on after a crash at that moment.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import safetensors.torch
from runs import TIMED

_CHANGES = ("replace", "rename", "unlink", "remove", "rmdir", "mkdir", "fsync")
_real_copytree = shutil.copytree


class Moments:
    """Watch a directory.

    Args:
        watched: may not be there yet.
        store: where the copies go. keep: one of so many is copied, drawn by `chooser`.

    Attributes:
        found: (what was about to be done, the copy), in order; moments at which the disk looked as at an earlier one are left out.
        operations: how many operations were seen.
    """

    def __init__(self, watched: Path, store: Path, keep: int = 1, chooser: random.Random | None = None) -> None:
        self.watched, self.store, self._keep, self._chooser = watched, store, keep, chooser or random.Random(0)
        self.found: list[tuple[str, Path]] = []
        self.operations = 0
        self._seen: set[str] = set()
        self._undo: list[Callable[[], None]] = []
        self._busy = False

    def __enter__(self) -> Moments:
        for name in _CHANGES:
            self._patch(os, name, self._before)
        self._patch(safetensors.torch, "serialize_file", self._after_file, position=1)
        self._patch(Path, "write_text", self._after_file)
        self._patch(shutil, "copyfile", self._after_file, position=1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for undo in reversed(self._undo):
            undo()

    def _patch(self, owner: Any, name: str, how: Callable[..., Any], position: int = 0) -> None:
        real = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            if self._busy:
                return real(*arguments, **options)
            return how(name, real, position, arguments, options)

        setattr(owner, name, watched)
        self._undo.append(lambda: setattr(owner, name, real))

    def _before(self, name: str, real: Callable[..., Any], position: int, arguments: Any, options: Any) -> Any:
        self._copy(f"before {name} {_shown(arguments[0])}")
        return real(*arguments, **options)

    def _after_file(self, name: str, real: Callable[..., Any], position: int, arguments: Any, options: Any) -> Any:
        result = real(*arguments, **options)
        file = Path(arguments[position])
        if self.watched in file.parents and file.stat().st_size > 1:
            self._copy(f"in the midst of {name} {file.name}", torn=file)
        return result

    def _copy(self, what: str, torn: Path | None = None) -> None:
        self.operations += 1
        if not self.watched.is_dir() or self._chooser.randrange(self._keep):
            return
        self._busy = True
        try:
            target = self.store / f"{len(self.found):05d}"
            _real_copytree(self.watched, target, symlinks=True)
            if torn is not None:
                half = target / torn.relative_to(self.watched)
                os.truncate(half, half.stat().st_size // 2)
            state = digest(target)
            if state in self._seen:
                shutil.rmtree(target)
            else:
                self._seen.add(state)
                self.found.append((what, target))
        finally:
            self._busy = False


def digest(directory: Path) -> str:
    """Of names and contents, but for what has times in it."""
    found = hashlib.sha256()
    for file in sorted(directory.rglob("*")):
        if file.name not in TIMED:
            found.update(f"{file.relative_to(directory)}\0{file.is_dir()}\0".encode())
            found.update(file.read_bytes() if file.is_file() else b"")
    return found.hexdigest()


def damage(directory: Path, chooser: random.Random) -> str:
    """Damage a file below a directory; how, for people. Files without a byte and logs are left alone."""
    files = [f for f in sorted(directory.rglob("*")) if f.is_file() and f.stat().st_size and f.suffix != ".log"]
    if not files:
        return "nothing"
    file = chooser.choice(files)
    content = bytearray(file.read_bytes())
    how = chooser.choice(("flip", "flip", "cut", "empty", "remove", "zeros"))
    if how == "flip":
        content[chooser.randrange(len(content))] ^= 1 << chooser.randrange(8)
    elif how == "cut":
        del content[chooser.randrange(len(content)) :]
    elif how == "empty":
        content.clear()
    elif how == "zeros":
        begin = chooser.randrange(len(content))
        content[begin : begin + 4096] = bytes(len(content[begin : begin + 4096]))
    if how == "remove":
        file.unlink()
    else:
        file.write_bytes(content)
    return f"{how} {file.relative_to(directory)}"


def _shown(argument: Any) -> str:
    return Path(os.fsdecode(argument)).name if isinstance(argument, str | bytes | os.PathLike) else str(argument)
