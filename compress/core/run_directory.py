"""Output directory of a run: finished parts, resumption, and the remains of an interrupted run.

Everything a resume needs is in `.compress/` inside the output. A block counts as done when its record exists there; the record
is written last and atomically, after the shard and the hidden states it names are on the disk, and holds their SHA-256 and its
own. So what a disk or a crash has damaged is noticed and made again. `compress.json` is written last of all, so an interrupted run
never looks like an artifact.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from compress.core.files import DISK_FULL, read_object, read_sealed, sha256, write_sealed
from runtime.checkpoint.guard import GUARDS
from runtime.errors import ArtifactError, CompressError, RequestError, ResourceError
from runtime.system import lock

WORK = ".compress"
MANIFEST = "compress.json"
LOG = "compress.log"
REPORT = "report.html"
RECORD = "run.json"  # date, command, machine, times, samples (`compress.run.record`)
CARD = "README.md"
DRAFT = "draft"  # directory of a draft
DRAFTS = (DRAFT, "draft-2")  # a draft that replaces another is written beside it (`compress.distill.draft.redraft`)
CHOICE = "drafter.json"  # the drafter that was found fastest on a machine, which loading follows
# 1_Pooling/config.json: how sentence-transformers pools; draft/config.json and the like.
NESTED = re.compile(r"[0-9]+_\w+/config\.json|draft(-2)?/[^/\\]+")
# Not covered by the manifest's hashes: the manifest itself, the log and the record (they contain times), the report and the card (made
# from these; people edit cards), and what is chosen per machine.
UNHASHED = (MANIFEST, LOG, RECORD, REPORT, CARD, CHOICE)
_STATE = "run.json"
_SAMPLES = {"prompts", "tokens", "source", "artifact", "left_out", "engine"}
_log = logging.getLogger("compress")


def recorded_samples(path: Path) -> dict[str, Any] | None:
    """The samples of an artifact, as `compress.run.record.make_samples` gave them; None where there are none.

    Raises:
        ArtifactError: the record is damaged.
    """
    if not (path / RECORD).is_file():
        return None
    found: dict[str, Any] | None = read_object(path / RECORD, "remove it").get("samples")
    if found is not None and not (isinstance(found, dict) and found.keys() >= _SAMPLES):
        raise ArtifactError(f"{path / RECORD} has samples that no version of this tool writes; remove it")
    return found


class RunDirectory:
    """The output directory of one run.

    Attributes:
        path, work: the output, and the directory in it that holds what a resume needs.
        finished: the artifact is complete already (`inspect`).
        warn: called with a sentence for each damaged part.
        before_commit: called before a part is recorded.

    Args:
        resume: continue an unfinished run. overwrite: replace a finished artifact or an unfinished run.
    """

    def __init__(self, output: Path, resume: bool = False, overwrite: bool = False) -> None:
        self.path = output
        self.work = output / WORK
        self.finished = False
        self.warn: Callable[[str], None] = _log.warning
        self.before_commit: Callable[[], None] = lambda: None
        self.resume, self._overwrite = resume, overwrite
        self._identity: dict[str, Any] = {}
        self._run = ""
        self._state = self.work / _STATE
        self._replace = self._state_is_lost = False

    def begun(self) -> dict[str, Any] | None:
        """The identity of the run that is to be resumed; None where there is none, or nothing tells it."""
        if not self.resume or self._state.is_file() or not (self.path / MANIFEST).is_file():
            return read_sealed(self._state) if self.resume else None
        return _read_json(self.path / MANIFEST).get("identity")

    # ------------------------------------------------------------ before the run
    def inspect(self, identity: dict[str, Any]) -> None:
        """Find out what is there, and change nothing.

        Args:
            identity: what must be equal for a resume to give the same bytes.

        Raises:
            RequestError: the directory holds something else, another run's state, or a run that may not be resumed or replaced.
            ResourceError: another process is writing it.
        """
        for other in (lock.inside(self.path), lock.beside(self.path.absolute())):
            lock.refuse_held(other, self.path)
        self._identity = identity
        self._run = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self._look()

    def _look(self) -> None:
        path, manifest, begun = self.path, self.path / MANIFEST, self._state.is_file()
        if path.exists() and not path.is_dir():
            raise RequestError(f"output {path} is a file; name a directory that is new or empty")
        if begun and not self.resume:
            self._replace = self._overwrite
            if not self._replace:
                raise RequestError(f"output {path} holds an unfinished run; add --resume, or name another directory")
        elif begun and (before := read_sealed(self._state)) is not None:
            now = self._identity
            different = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
            if different:
                raise RequestError(
                    f"output {path} holds a run with another {', '.join(different).replace('_', ' ')}; "
                    "it cannot be resumed with this request: restore it, or name another directory"
                )
        elif begun or (self.resume and self.work.is_dir() and not manifest.is_file()):
            self._look_at_records()
        elif manifest.is_file():
            self.finished = self.resume and _read_json(manifest).get("identity") == self._identity
            self._replace = self._overwrite and not self.finished
            if not self.finished and not self._replace:
                raise RequestError(
                    f"output {path} holds a finished artifact; name another --output, or add --overwrite"
                )
        elif path.exists():
            # A run killed before its first record leaves at most an empty work directory.
            others = sorted(e.name for e in path.iterdir() if e.name not in (LOG, RECORD, lock.LOCK, WORK))
            if others:
                more = f" and {len(others) - 1} other entries" if len(others) > 1 else ""
                raise RequestError(
                    f"output {path} already holds {others[0]}{more}, which is no run of this tool; name a new or empty directory"
                )

    def _look_at_records(self) -> None:
        """An unfinished run without an identity that can be read: its records tell whose it is."""
        files = [file for file in self.work.glob("*.json") if file != self._state]
        records = [record for file in files if (record := read_sealed(file)) is not None]
        if not records and not self._state.is_file() and not any(self.work.iterdir()):
            return  # killed before it had begun
        if any(record.get("run") != self._run for record in records):
            raise RequestError(
                f"{self._state} is damaged or gone, and the records beside it are of another run than this request's; restore it, or name "
                "another directory"
            )
        if not self._state_is_lost:
            self.warn(f"{self._state} is damaged or gone and is written again")
        self._state_is_lost = True

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """`claim`, with all other processes locked out until the context is left."""
        before = (self.finished, self._replace, self._state.is_file())
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock.locked(lock.inside(self.path), self.path))
                self._look()  # another run may have come and gone since
                if before != (self.finished, self._replace, self._state.is_file()):
                    raise ResourceError(f"output {self.path} was changed by another run meanwhile; run it again")
                self.claim()
            except OSError as error:
                if error.errno in DISK_FULL:
                    raise
                raise ResourceError(f"output {self.path} cannot be written: {error.strerror or error}") from error
            yield

    def claim(self) -> None:
        """Make the directory this run's. Nothing is changed before, since the request could still be refused."""
        if self._replace:
            self._clear()
        self.work.mkdir(parents=True, exist_ok=True)
        if not self._state.is_file() or self._state_is_lost:
            write_sealed(self._state, self._identity)
        for leftover in [*self.path.glob(".*.tmp"), *self.work.glob(".*.tmp"), *self.work.glob("*.tmp")]:
            remove(leftover)

    def _clear(self) -> None:
        """Remove what a run of this tool wrote here; `_look` has refused every other directory."""
        manifest = _read_json(self.path / MANIFEST) if (self.path / MANIFEST).is_file() else {}
        for name in [*manifest.get("files", {}), *UNHASHED]:
            # A manifest cannot make us touch anything but plain files of this directory and of the folders of its modules.
            if Path(name).name == name or NESTED.fullmatch(name):
                (self.path / name).unlink(missing_ok=True)
        # With a manifest or without: an interrupted run leaves a draft that no manifest lists.
        drafts = [self.path / name for name in DRAFTS]
        for leftover in [
            *self.path.glob("model-*-of-*.safetensors"),
            self.path / GUARDS,
            *self.path.glob(".*.tmp"),
            *drafts,
        ]:
            remove(leftover)
        shutil.rmtree(self.work, ignore_errors=True)

    # ------------------------------------------------------------ records
    def record(self, part: str) -> dict[str, Any] | None:
        """The record of a finished part ("block-00003", "outside"), or None; a damaged one is removed, with a warning."""
        found = self._committed(part)
        return None if found is None else found["record"]  # type: ignore[no-any-return]

    def commit(
        self, part: str, record: dict[str, Any], holds: Iterable[Path] = (), sums: Mapping[Path, str] | None = None
    ) -> None:
        """Record that a part is finished.

        Args:
            holds: files and directories of the output that the part has written, which `whole` checks.
            sums: SHA-256 of those of these files that were hashed since.

        Raises:
            CompressError: the directory was removed or replaced while the run wrote to it.
        """
        if not self._state.is_file():
            raise CompressError(f"{self.path} was removed while it was being written; run it again")
        self.before_commit()
        files = [file for place in holds for file in _files(place)]
        found = {file.relative_to(self.path).as_posix(): (sums or {}).get(file) or sha256(file) for file in files}
        write_sealed(self._record_path(part), {"run": self._run, "record": record, "holds": found})

    def whole(self, part: str, *places: Path) -> bool:
        """Whether files or directories (all, if none is named) that a finished part has written are unchanged."""
        found = self._committed(part)
        if found is None:
            return False
        own = {self.path / name: digest for name, digest in found["holds"].items()}
        wanted = [[file for file in own if file == place or place in file.parents] for place in places or [self.path]]
        if not all(wanted) and places:
            return False
        with suppress(OSError):
            return all(file.is_file() and sha256(file) == own[file] for files in wanted for file in files)
        return False

    def forget(self, part: str) -> None:
        """Remove the record of a part, so that it is made again."""
        self._record_path(part).unlink(missing_ok=True)

    def _record_path(self, part: str) -> Path:
        return self.work / f"{part}.json"

    def _committed(self, part: str) -> dict[str, Any] | None:
        path = self._record_path(part)
        if not path.is_file():
            return None
        found = read_sealed(path)
        if found is None or found.get("run") != self._run:
            self.warn(f"{path} is damaged: {part} is made again")
            path.unlink()
            return None
        return found

    def hidden_path(self, block: int) -> Path:
        """Directory of the hidden states that enter `block`, for a resume."""
        return self.work / f"hidden-{block:05d}"

    def settle(self) -> None:
        """Remove what a run that was killed at its very end has left in a finished artifact, unless it is read-only."""
        if self.work.exists() or lock.inside(self.path).exists():
            with suppress(OSError), lock.locked(lock.inside(self.path), self.path):
                self.finish()

    def finish(self) -> None:
        """Remove what a resume needs, first the file that marks an unfinished run."""
        self._state.unlink(missing_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)


def remove(path: Path) -> None:
    """A file, a link or a whole directory; nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _files(place: Path) -> list[Path]:
    return sorted(f for f in place.rglob("*") if f.is_file()) if place.is_dir() else [place]


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path, "remove the directory or name another --output")
