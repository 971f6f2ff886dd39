"""Directory of an export: written beside its place, then renamed, so that it is there whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from export.source import TOKENIZER_FILES
from runtime.checkpoint.artifact import sha256
from runtime.checkpoint.export_directory import MANIFEST, read_manifest
from runtime.errors import ArtifactError, CompressError, RequestError
from runtime.system import lock
from runtime.system.directories import let_others_read, replace_directory, sync

_FULL = (errno.ENOSPC, errno.EDQUOT)
_ONLY_WRITING = (errno.EFBIG, errno.EROFS)  # reading never fails so
_SHOWN = 200  # characters of a path that a sentence repeats


def check_output(output: Path, artifact: Path, overwrite: bool) -> None:
    """Raise RequestError unless `output` can be written: new, empty, or (with `overwrite`) an earlier export."""
    try:
        _check_output(output, artifact, overwrite)
    except OSError as error:  # names that are too long, directories that cannot be read
        raise RequestError(f"output {_short(output)} cannot be written: {error.strerror or error}") from error


def _check_output(output: Path, artifact: Path, overwrite: bool) -> None:
    place = _place(output)
    _check_names(place)
    home = artifact.resolve()
    for wrong, why in (
        (place.is_symlink(), "is a symbolic link that leads to itself; name another directory"),
        (place.exists() and not place.is_dir(), "is a file; name a directory that is new or empty"),
        (place == home, "is the artifact itself; name another directory"),
        (place.is_relative_to(home), "lies inside the artifact; name a directory outside it"),
        (home.is_relative_to(place), "holds the artifact itself; name another directory"),
        (
            os.path.ismount(place),
            "is where a disk is mounted, which no export can be renamed to; name a directory in it",
        ),
    ):
        if wrong:
            raise RequestError(f"output {output} {why}")
    if place.is_dir() and any(place.iterdir()):
        _check_earlier(output, place, overwrite)
    parent = _existing(place.parent)
    if not parent.is_dir():
        raise RequestError(f"output {output} cannot be written: {parent} is a file; name a directory elsewhere")
    if not os.access(parent, os.W_OK):
        raise RequestError(f"output {output} cannot be written: no permission in {parent}")


def _check_earlier(output: Path, place: Path, overwrite: bool) -> None:
    """Raise RequestError unless everything in `place` was written by an earlier export, and may be replaced."""
    try:
        manifest = read_manifest(place)
    except ArtifactError as error:
        raise RequestError(f"output {output} holds an export that cannot be replaced: {error}") from error
    if manifest is None:
        raise RequestError(f"output {output} holds no export of this tool; name a new or empty directory")
    if not overwrite:
        raise RequestError(f"output {output} already holds an export; name another directory, or add --overwrite")
    files = manifest.get("files")
    own = {*(files if isinstance(files, dict) else ()), MANIFEST, lock.LOCK}
    found = sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if not path.is_dir())
    foreign = next((name for name in found if name not in own), None)
    if foreign is not None:
        raise RequestError(f"output {output} holds {foreign}, which no export wrote; name another directory")


def _check_names(place: Path) -> None:
    """Raise OSError where a name is longer than the disk allows: one that is to be made, or that of the temporary directory."""
    there, temporary = _existing(place), _temporary(place)
    names = (temporary.name, *place.relative_to(there).parts)
    # each name there too: below a directory that is not there yet nothing would be noticed
    for path in (*(there / name for name in names), temporary):
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(path)


def check_space(output: Path, needed: int) -> None:
    """Raise CompressError when the disk cannot hold `needed` bytes."""
    free = shutil.disk_usage(_existing(_place(output).parent)).free
    if free < needed:
        raise CompressError(
            f"the disk of {output} has {free / 1e9:.2f} GB free and the export needs about {needed / 1e9:.2f} GB; "
            "free some space or name another --output"
        )


@contextmanager
def beside(output: Path) -> Iterator[Path]:
    """Yield an empty directory beside `output`; on success it takes the place of `output`.

    On failure it is removed, and so are the directories above it that were made for it. What exports to the same output left
    when they were killed is removed too.

    Raises:
        RequestError: another process writes there just now. CompressError: the output cannot be written. Errors about other files (of
            the artifact, say) pass as they are.
    """
    place = _place(output)
    temporary = _temporary(place)
    made = [folder for folder in place.parents if not folder.exists()]
    inside = True  # whether all that can fail is the output
    alone = ExitStack()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock.refuse_held(lock.inside(place), output)
        alone.enter_context(lock.locked(lock.beside(place), output))
        _clear_leftovers(place, r"tmp(\.\w+)?")
        temporary.mkdir()
        inside = False
        yield temporary
        inside = True
        for path in [*temporary.rglob("*"), temporary]:
            if path.is_file():
                let_others_read(path)
            sync(path)
        lock.refuse_held(lock.inside(place), output)
        replace_directory(temporary, place, place.with_name(f".{place.name}.{os.getpid()}.old"))
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        alone.close()
        for folder in made:
            with suppress(OSError):  # not there, or another has put something into it
                folder.rmdir()
        sentence = _sentence(error, output, temporary, inside)
        if sentence is not None:
            raise CompressError(sentence) from error
        raise
    alone.close()
    _clear_leftovers(place, "old")  # only now: until here it may have been the only whole export


def copy_files(source: Path, folder: Path, names: Iterable[str] = (*TOKENIZER_FILES, "generation_config.json")) -> None:
    """Copy those of the files that are there; by default what says how texts are read and written."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def listing(folder: Path) -> dict[str, dict[str, Any]]:
    """{file, relative: bytes and SHA-256} of everything below `folder`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in files}


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented UTF-8 JSON; what JSON does not know is written as `str`."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")


def _place(output: Path) -> Path:
    """Where the export really goes: a symbolic link stays, and what it leads to is replaced."""
    return Path(os.path.realpath(output))


def _temporary(place: Path) -> Path:
    return place.with_name(f".{place.name}.{os.getpid()}.tmp")


def _short(output: Path) -> str:
    text = str(output)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}...{text[-_SHOWN // 2 :]} ({len(text)} characters)"


def _clear_leftovers(place: Path, ending: str) -> None:
    """Remove `.NAME.PID.ending` beside `place` where the process is no more. Our own number means one that had it before us."""
    pattern = re.compile(rf"\.{re.escape(place.name)}\.([0-9]{{1,9}})\.{ending}")
    for path in list(place.parent.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is not None and (int(match[1]) == os.getpid() or not psutil.pid_exists(int(match[1]))):
            shutil.rmtree(path, ignore_errors=True)


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _sentence(error: BaseException, output: Path, temporary: Path, inside: bool) -> str | None:
    """What to say of an error that concerns the output; None of any other.

    Args:
        inside: whether every error is the output's; else the file that it names must lie in `temporary`, or beside it for it.
    """
    number = error.errno if isinstance(error, OSError) else None
    given = (error.filename, error.filename2) if isinstance(error, OSError) else ()
    names = [os.fsdecode(name) for name in given if isinstance(name, str | bytes | os.PathLike)]
    inside = inside or any(os.path.abspath(name).startswith(str(temporary)) for name in names)
    # Libraries wrap the number away and keep the text.
    full = number in _FULL or any(text in str(error) for text in ("No space left on device", "Disk quota exceeded"))
    if full:
        where = f" ({names[0]})" if names and not inside else ""
        return f"the disk is full{where} while {output} was written; nothing was left there"
    if isinstance(error, OSError) and (inside or (not names and number in _ONLY_WRITING)):
        file = f" ({Path(names[0]).name})" if names else ""
        return f"{output} cannot be written: {error.strerror or error}{file}"
    return None
