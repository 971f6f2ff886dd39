"""The directory of an export: written beside, then renamed, so that it is there whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from export.source import TOKENIZER_FILES
from runtime.artifact import sha256
from runtime.errors import CompressError, RequestError

MANIFEST = "export.json"
README = "README.md"
SCHEMA_VERSION = 1


def check_output(output: Path, artifact: Path, overwrite: bool) -> None:
    """Raise RequestError unless `output` is new, empty, or (with `overwrite`) an earlier export."""
    if output.exists() and not output.is_dir():
        raise RequestError(f"output {output} is a file; name a directory that is new or empty")
    if output.resolve() == artifact.resolve():
        raise RequestError(f"output {output} is the artifact itself; name another directory")
    if artifact.resolve().is_relative_to(output.resolve()):
        raise RequestError(f"output {output} holds the artifact itself; name another directory")
    if output.is_dir() and any(output.iterdir()):
        ours = (output / MANIFEST).is_file()
        if not ours:
            raise RequestError(
                f"output {output} is not empty and holds no export of this tool; name a new or empty directory"
            )
        if not overwrite:
            raise RequestError(
                f"output {output} already holds an export; name another directory with --output, or add --overwrite"
            )
        foreign = _foreign(output)
        if foreign is not None:
            raise RequestError(f"output {output} holds {foreign}, which no export wrote; name another directory")
    parent = _existing(output.absolute().parent)
    if not os.access(parent, os.W_OK):
        raise RequestError(f"output {output} cannot be written: no permission in {parent}")


def check_space(output: Path, needed: int) -> None:
    """Raise CompressError when the disk cannot hold `needed` bytes."""
    free = shutil.disk_usage(_existing(output.absolute().parent)).free
    if free < needed:
        raise CompressError(
            f"the disk of {output} has {free / 1e9:.2f} GB free and the export needs about {needed / 1e9:.2f} GB; "
            "free some space or name another --output"
        )


@contextmanager
def beside(output: Path) -> Iterator[Path]:
    """Yield an empty directory beside `output`; on success it takes the place of `output`, on failure it is removed."""
    output.absolute().parent.mkdir(parents=True, exist_ok=True)
    temporary = output.absolute().with_name(f".{output.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        _sync(temporary)
        _replace(temporary, output.absolute())
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _disk_error(error, output) from error
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if "No space left on device" in str(error) or "Disk quota exceeded" in str(
            error
        ):  # libraries wrap the number away
            raise CompressError(f"the disk is full while {output} was written; nothing was left there") from error
        raise


def copy_tokenizer(source: Path, folder: Path) -> list[str]:
    """Copy the tokenizer's files and generation_config.json; returns the names copied."""
    names = [name for name in (*TOKENIZER_FILES, "generation_config.json") if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, folder / name)
    return names


def listing(folder: Path) -> dict[str, dict[str, Any]]:
    """{file, relative: bytes and SHA-256} of everything below `folder`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files
    }


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")


def _foreign(output: Path) -> str | None:
    """A file below `output` that its export.json does not list; None when all are the export's own."""
    try:
        listed = json.loads((output / MANIFEST).read_text(encoding="utf-8")).get("files", {})
    except (OSError, ValueError, AttributeError):
        listed = {}
    own = {*listed, MANIFEST}
    found = sorted(path.relative_to(output).as_posix() for path in output.rglob("*") if not path.is_dir())
    return next((name for name in found if name not in own), None)


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some filesystems cannot sync a directory
                raise
        finally:
            os.close(descriptor)


def _replace(temporary: Path, output: Path) -> None:
    if not output.exists():
        os.rename(temporary, output)
        return
    old = output.with_name(f".{output.name}.{os.getpid()}.old")
    os.rename(output, old)
    try:
        os.rename(temporary, output)
    except OSError:
        os.rename(old, output)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _disk_error(error: OSError, output: Path) -> CompressError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CompressError(f"the disk is full while {output} was written; nothing was left there")
    return CompressError(f"{output} cannot be written: {error.strerror or error}")
