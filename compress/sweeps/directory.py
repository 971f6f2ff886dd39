"""Directory of a sweep: its owner, the record of every trial, and the changes that a resume may bring.

Records are written atomically: after a kill -9 they say what is finished, and a proposed trial continues in its own run directory. One
process at a time writes to the directory; it holds a lock, as do the processes of its trials until they have ended.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from compress.core.files import read_object, read_sealed, write_json, write_sealed
from compress.core.run_directory import MANIFEST, remove
from compress.sweeps.records import Trial
from compress.sweeps.space import read_values
from runtime.errors import CompressError, RequestError, ResourceError

WORK = ".sweep"
TRIALS = "trials"
RESULTS = "sweep.json"
OURS = (RESULTS, "sweep.yaml", "table.csv", "pareto.svg", "pareto.png", "report.html")
_STATE = "identity.json"
_WAIT = 20.0  # seconds for the trials of a killed sweep to end


class SweepDirectory:
    """Claim `path` for a sweep.

    Attributes:
        path: of the sweep. trials: the records, by number. damaged: incomplete records, whose trials run again.

    Raises:
        RequestError: the directory holds something else, a sweep and neither `resume` nor `overwrite` is asked for, or a sweep that
            the request does not continue.
        CompressError: another process works on it.
    """

    def __init__(self, path: Path, identity: dict[str, Any], resume: bool, overwrite: bool = False) -> None:
        self.path = path
        self.trials: dict[int, Trial] = {}
        self.damaged: list[Path] = []
        self.lock: int | None = None
        before = self._look(identity, resume, overwrite)
        (path / WORK).mkdir(parents=True, exist_ok=True)
        self.take_lock()
        try:
            found = self._look(identity, resume, overwrite)  # another sweep may have come and gone since
            if found != before:
                raise ResourceError(f"output {path} was changed by another sweep meanwhile; run the command again")
            self._claim(identity, clear=found is not None and not (found[1] and resume))
        except BaseException:
            self.close()
            raise

    def _look(self, identity: dict[str, Any], resume: bool, overwrite: bool) -> tuple[bytes, bool] | None:
        """The directory's identity file and whether a trial was begun; None: no sweep. RequestError: it is not for this sweep."""
        path, state = self.path, self.path / WORK / _STATE
        if path.exists() and not path.is_dir():
            raise RequestError(f"output {path} is a file; name a directory that is new or empty")
        known = state.is_file()
        ours = known and any((path / TRIALS).glob("[0-9]*.json"))
        foreign = sorted(entry.name for entry in path.iterdir()) if path.exists() and not known else []
        if foreign and foreign != [WORK]:
            raise RequestError(f"output {path} holds {foreign[0]}, which is not a sweep; name a new or empty directory")
        if ours and not resume and not overwrite:
            ways = "add --resume to continue it or --overwrite to start over, or name another directory"
            raise RequestError(f"output {path} already holds a sweep; {ways}")
        if ours and resume:
            check_continues(read(state), identity, path)
        return (state.read_bytes(), ours) if known else None

    def _claim(self, identity: dict[str, Any], clear: bool) -> None:
        path = self.path
        if clear:
            self._clear()
        (path / TRIALS).mkdir(exist_ok=True)
        write_json(path / WORK / _STATE, identity)
        patterns = ((path, ".*.tmp"), (path / TRIALS, ".*.tmp"), (path / WORK, ".*.tmp"), (path / WORK, "[0-9]*.json"))
        for leftover in [found for folder, pattern in patterns for found in folder.glob(pattern)]:
            remove(leftover)
        for file in sorted((path / TRIALS).glob("[0-9]*.json")):
            trial = read_record(file)
            if trial is not None:
                self.trials[trial.number] = trial
                continue
            self.damaged.append(file)
            remove(file)
            artifact = file.with_suffix("")
            if not (artifact / MANIFEST).is_file():  # one that is finished says itself whose it is
                remove(artifact)

    def close(self) -> None:
        """Release the lock."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    @property
    def in_order(self) -> list[Trial]:
        """All trials, by number."""
        return [self.trials[number] for number in sorted(self.trials)]

    def record(self, trial: Trial) -> None:
        """Write a trial's record; on return it is on the disk."""
        write_sealed(self.path / TRIALS / f"{self.name(trial.number)}.json", asdict(trial))
        self.trials[trial.number] = trial

    @staticmethod
    def name(number: int) -> str:
        """Four-digit name of a trial's files."""
        return f"{number:04d}"

    def artifact(self, number: int) -> Path:
        """Where the trial's artifact is, or will be."""
        return self.path / TRIALS / self.name(number)

    def log(self, number: int) -> Path:
        """Output of the trial's process."""
        return self.path / TRIALS / f"{self.name(number)}.log"

    def work(self, name: str) -> Path:
        """Path of a file in the sweep's directory for temporary files."""
        return self.path / WORK / name

    def take_lock(self) -> None:
        """Wait for the trials of a killed sweep to end; CompressError: another sweep holds the directory."""
        self.lock = os.open(self.path / WORK / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        end = time.monotonic() + _WAIT
        while time.monotonic() < end:
            with suppress(BlockingIOError):
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.1)
        self.close()
        raise CompressError(f"another sweep is running in {self.path}; wait until it ends, or name another directory")

    def _clear(self) -> None:
        for name in OURS:
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / TRIALS, ignore_errors=True)
        for entry in (self.path / WORK).iterdir():
            if entry.name != "lock":
                remove(entry)


def recorded(path: Path) -> set[str]:
    """`Trial.key` of every trial of the sweep in `path`, if there is one."""
    trials = (read_record(file) for file in (path / TRIALS).glob("[0-9]*.json"))
    return {trial.key for trial in trials if trial is not None}


def read_record(file: Path) -> Trial | None:
    """The trial of a record; None: the file is not as `SweepDirectory.record` wrote it."""
    content = read_sealed(file)
    names = {field.name for field in fields(Trial)}
    if content is None or set(content) != names or SweepDirectory.name(content["number"]) != file.stem:
        return None
    return Trial(**content)


def read(file: Path) -> dict[str, Any]:
    """The JSON object of a file; ArtifactError where it holds none."""
    return read_object(file, "remove the sweep's directory or name another")


def check_continues(before: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """Refuse to go on with another sweep. More values and more trials are the same sweep, extended.

    Args:
        before, now: `identity` of the sweep in the directory, and of the request (`compress.sweeps.run`).
    """

    def refuse(text: str) -> RequestError:
        return RequestError(f"output {path} holds another sweep: {text}; undo that, or name another directory")

    for key in sorted(set(before["sweep"]) | set(now["sweep"])):
        one, other = before["sweep"].get(key), now["sweep"].get(key)
        if one != other:
            raise refuse(f"'{key}' was {_short(one)} and is {_short(other)} (only values and trials can be added)")
    if before["trials"] is not None and before["trials"] > now["trials"]:
        raise refuse(f"search.trials was {before['trials']} and is {now['trials']} (trials can only be added)")
    for key in [*before["vary"], *now["vary"]]:
        if key not in now["vary"] or key not in before["vary"]:
            verb, other = ("varies", "not varied") if key not in now["vary"] else ("does not vary", "varied")
            raise refuse(f"it {verb} {key}, which is {other} now")
        if not read_values(now["vary"][key]).covers(read_values(before["vary"][key])):
            values = f"{_short(before['vary'][key])} and are {_short(now['vary'][key])}"
            raise refuse(f"the values of {key} were {values} (values can only be added)")
    # The texts and checkpoints that a recipe reads depend on its methods, so on the first values: those of both are compared.
    for key in sorted(set(before["base"]) & set(now["base"])):
        if before["base"][key] != now["base"][key]:
            raise refuse(f"the {key.replace('_', ' ')} has changed since")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:117]}..."
