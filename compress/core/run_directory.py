"""The output directory of a run: what is finished, what resumes, what an interrupted run leaves.

Everything a resume needs is in `.compress/` inside the output. A block counts as done when its record exists there; the record
is written last and atomically, after the shard and the hidden states it speaks of are on the disk, and holds their SHA-256 and its
own. So what a disk or a crash has damaged is noticed, and made again. `compress.json` is the last file of all, so an interrupted run
never looks like an artifact.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from compress.core.files import DISK_FULL, read_object, sha256, write_text
from runtime.errors import CompressError, RequestError, ResourceError
from runtime.system import lock
from runtime.system.self_hash import KEY, json_is_whole, sealed_json

WORK = ".compress"
MANIFEST = "compress.json"
LOG = "compress.log"
REPORT = "report.html"
DRAFT = "draft"  # directory of a draft
DRAFTS = (DRAFT, "draft-2")  # a draft that replaces another is written beside it (`compress.run.redraft`)
CHOICE = "drafter.json"  # the drafter that was found fastest on a machine, which loading follows
# 1_Pooling/config.json: how sentence-transformers pools; draft/config.json and the like.
NESTED = re.compile(r"[0-9]+_\w+/config\.json|draft(-2)?/[^/\\]+")
# Not covered by the manifest's hashes: the manifest itself, the log (it has times in it), the report (made from the manifest), and what is
# chosen again on every machine.
UNHASHED = (MANIFEST, LOG, REPORT, CHOICE)
_STATE = "run.json"
_log = logging.getLogger("compress")


class RunDirectory:
    """Claim `output` for a run described by `identity` (what must be equal for a resume to give the same bytes).

    Attributes:
        path, work: the output, and what a resume needs inside of it.
        finished: the artifact is there already.
        committed: is told of every part that is finished, once its record is there; None: nobody listens.
        warn: is told of every part that was damaged.

    Raises:
        RequestError: the directory holds something else, an unfinished run and `resume` is False, or another run's state; or another
            process writes it just now.
    """

    def __init__(self, output: Path, identity: dict[str, Any], resume: bool, overwrite: bool = False) -> None:
        self.path = output
        self.work = output / WORK
        self.finished = False
        self.committed: Callable[[str], None] | None = None
        self.warn: Callable[[str], None] = _log.warning
        self._identity = identity
        self._run = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self._replace = self._begun = False
        for other in (lock.inside(output), lock.beside(output.absolute())):
            lock.refuse_held(other, output)
        self._look(resume, overwrite)
        self._asked = (resume, overwrite)

    def _look(self, resume: bool, overwrite: bool) -> None:
        """Find out what is there; RequestError where it is not for this run."""
        output, identity = self.path, self._identity
        if output.exists() and not output.is_dir():
            raise RequestError(f"output {output} is a file; name a directory that is new or empty")
        entries = [e for e in output.iterdir() if e.name not in (LOG, lock.LOCK)] if output.exists() else []
        state = self.work / _STATE
        if state.is_file():
            self._open_unfinished(state, identity, resume, overwrite)
        elif (output / MANIFEST).is_file():
            self._open_finished(identity, resume, overwrite)
        elif resume and self.work.is_dir():
            self._open_unnamed(state)
        elif entries and not self._is_only_ours(entries):
            raise RequestError(
                f"output {output} already holds {_listing(entries)}, which is no run of this tool; name a new or empty directory"
            )

    @staticmethod
    def begun(output: Path) -> dict[str, Any] | None:
        """The identity of the run that made or was making what is in `output`; None: there is none that says it."""
        state, manifest = output / WORK / _STATE, output / MANIFEST
        if state.is_file():
            return _read_json(state) if json_is_whole(state.read_bytes()) else None
        found: dict[str, Any] | None = _read_json(manifest).get("identity") if manifest.is_file() else None
        return found

    @classmethod
    def shared(cls, output: Path) -> RunDirectory:
        """The directory of a run that another process has claimed and writes the records of."""
        directory = cls.__new__(cls)
        directory.path, directory.work = output, output / WORK
        directory.finished, directory.committed, directory.warn = False, None, _log.warning
        directory._identity, directory._run, directory._replace, directory._begun = {}, "", False, False
        return directory

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """`claim`, with all other processes kept out until this is left."""
        before = (self.finished, self._replace, (self.work / _STATE).is_file())
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock.locked(lock.inside(self.path), self.path))
                self._look(*self._asked)  # another run may have come and gone since
                if before != (self.finished, self._replace, (self.work / _STATE).is_file()):
                    raise ResourceError(
                        f"output {self.path} was changed by another run meanwhile; give the command again"
                    )
                self.claim()
            except OSError as error:
                if error.errno in DISK_FULL:
                    raise
                raise ResourceError(f"output {self.path} cannot be written: {error.strerror or error}") from error
            yield

    def claim(self) -> None:
        """Make the directory this run's: only now is anything changed, since until now the request could still be refused."""
        if self._replace:
            self._clear()
        self.work.mkdir(parents=True, exist_ok=True)
        state = self.work / _STATE
        if not state.is_file() or self._begun:
            write_text(state, sealed_json(self._identity))
        for leftover in [*self.path.glob(".*.tmp"), *self.work.glob(".*.tmp"), *self.work.glob("*.tmp")]:
            remove(leftover)

    def _open_unfinished(self, state: Path, identity: dict[str, Any], resume: bool, overwrite: bool) -> None:
        if overwrite and not resume:
            self._replace = True
            return
        if resume and not json_is_whole(state.read_bytes()):
            self._open_unnamed(state)
            return
        if not resume:
            raise RequestError(
                f"output {self.path} holds an unfinished run; add --resume to continue it, or name another directory"
            )
        before = {key: value for key, value in _read_json(state).items() if key != KEY}
        different = sorted(key for key in set(before) | set(identity) if before.get(key) != identity.get(key))
        if different:
            raise RequestError(
                f"output {self.path} holds a run with another {', '.join(different).replace('_', ' ')}; "
                "it cannot be resumed with this request: restore it, or name another directory"
            )

    def _open_unnamed(self, state: Path) -> None:
        """A run that can no longer say whose it is: its parts can."""
        records = [file for file in self.work.glob("*.json") if file != state and json_is_whole(file.read_bytes())]
        if not records and not state.is_file() and not any(self.work.iterdir()):
            return  # killed before it had begun
        if any(_read_json(file).get("run") != self._run for file in records):
            raise RequestError(
                f"{state} is damaged or gone, and what is finished beside it is of another run than this request's; restore it, or name "
                "another directory"
            )
        if not self._begun:
            self.warn(f"{state} is damaged or gone and is written again")
        self._begun = True

    def _open_finished(self, identity: dict[str, Any], resume: bool, overwrite: bool) -> None:
        manifest = _read_json(self.path / MANIFEST)
        if resume and manifest.get("identity") == identity:
            self.finished = True
            return
        if overwrite:
            self._replace = True
            return
        raise RequestError(
            f"output {self.path} already holds a finished artifact; name another directory with --output, or add --overwrite"
        )

    def _is_only_ours(self, entries: list[Path]) -> bool:
        """A run killed before its first record leaves at most an empty work directory."""
        return all(e.name == WORK for e in entries)

    def _clear(self) -> None:
        """Remove what a run of ours wrote here (and only a directory that is recognisably ours gets to this point)."""
        manifest = _read_json(self.path / MANIFEST) if (self.path / MANIFEST).is_file() else {}
        for name in [*manifest.get("files", {}), *UNHASHED]:
            # A manifest cannot make us touch anything but plain files of this directory and of the folders of its modules.
            if Path(name).name == name or NESTED.fullmatch(name):
                (self.path / name).unlink(missing_ok=True)
        # With a manifest or without: an interrupted run leaves a draft that no manifest lists.
        drafts = [self.path / name for name in DRAFTS]
        for leftover in [*self.path.glob("model-*-of-*.safetensors"), *self.path.glob(".*.tmp"), *drafts]:
            remove(leftover)
        shutil.rmtree(self.work, ignore_errors=True)

    # ------------------------------------------------------------ records
    def record_path(self, part: str) -> Path:
        return self.work / f"{part}.json"

    def record(self, part: str) -> dict[str, Any] | None:
        """The record of a finished part ("block-00003", "outside"), or None; one that is damaged is removed, and told of."""
        found = self._committed(part)
        return None if found is None else found["record"]  # type: ignore[no-any-return]

    def commit(self, part: str, record: dict[str, Any], holds: Iterable[Path] = ()) -> None:
        """Note that a part is finished.

        Args:
            holds: files and directories of the output that it has written, which `whole` then knows.

        Raises:
            CompressError: the directory was removed or replaced while the run wrote to it.
        """
        if not (self.work / _STATE).is_file():
            raise CompressError(f"{self.path} was removed while it was being written; run it again")
        sums = {file.relative_to(self.path).as_posix(): sha256(file) for place in holds for file in _files(place)}
        write_text(self.record_path(part), sealed_json({"run": self._run, "record": record, "holds": sums}))
        if self.committed is not None:
            self.committed(part)

    def whole(self, part: str, *places: Path) -> bool:
        """Whether files or directories (all, if none is named) that a finished part has written are as it has left them."""
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
        """A finished part is no longer one: it is made again."""
        self.record_path(part).unlink(missing_ok=True)

    def _committed(self, part: str) -> dict[str, Any] | None:
        path = self.record_path(part)
        if not path.is_file():
            return None
        if json_is_whole(path.read_bytes()):
            found = _read_json(path)
            if found.get("run") == self._run:
                return found
        self.warn(f"{path} is damaged: {part} is made again")
        path.unlink()
        return None

    def hidden_path(self, block: int) -> Path:
        """Where the hidden states that enter `block` are kept for a resume."""
        return self.work / f"hidden-{block:05d}"

    def settle(self) -> None:
        """Remove from a finished artifact what a run that was killed at its very end has left; where nothing can be written it stays."""
        if self.work.exists() or lock.inside(self.path).exists():
            with suppress(OSError), lock.locked(lock.inside(self.path), self.path):
                self.finish()

    def finish(self) -> None:
        """Remove what a resume needs; what says that there is an unfinished run goes first."""
        (self.work / _STATE).unlink(missing_ok=True)
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


def _listing(entries: list[Path]) -> str:
    names = sorted(e.name for e in entries)
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} other entries"
