"""Trials as processes of this machine. A killed one costs no other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from compress.core.files import write_json
from compress.sweeps.directory import SweepDirectory, read
from compress.sweeps.executors import Outcome, died, launcher_variables
from runtime.system.processes import how_it_ended

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_PATIENCE = 10.0  # seconds for trials to clean up when the sweep is stopped
_POLL = 0.05  # seconds


@dataclass
class _Running:
    process: subprocess.Popen[bytes]
    slot: int
    log: Path
    files: tuple[Path, Path]
    peak: int = 0  # bytes of memory seen so far


class ProcessExecutor:
    """See `Executor`. Threads are shared fairly: each trial has the machine's cores divided by `jobs`."""

    def __init__(self, jobs: int, directory: SweepDirectory, device: str) -> None:
        self.slots = jobs
        self._threads = threads_each(jobs)
        self._devices = devices(device, jobs)
        self._directory = directory
        self._running: dict[int, _Running] = {}
        order = f"{jobs} at a time" if jobs > 1 else "one after the other"
        threads = f"{self._threads} thread{'s' if self._threads > 1 else ''} each"
        self.description = f"processes of this machine, {order}, {threads}"

    def start(self, number: int, job: Mapping[str, Any]) -> None:
        """Start a process for trial `number` in the first free slot."""
        used = {running.slot for running in self._running.values()}
        slot = next(slot for slot in range(self.slots) if slot not in used)
        name = self._directory.name(number)
        given, found = (self._directory.work(f"{name}.{end}.json") for end in ("job", "result"))
        found.unlink(missing_ok=True)
        write_json(given, {**job, "threads": self._threads, "device": self._devices[slot]})
        log = self._directory.log(number)
        lock = self._directory.lock
        environment = {**os.environ, **dict.fromkeys(_THREADS, str(self._threads))}
        for variable in launcher_variables(os.environ):
            del environment[variable]
        with log.open("wb") as printed:
            process = subprocess.Popen(
                [sys.executable, "-m", "compress.sweeps.trial", str(given.absolute()), str(found.absolute())],
                stdin=subprocess.PIPE, stdout=printed, stderr=printed, start_new_session=True, env=environment,
                # So that the directory is locked until the last trial of a killed sweep has ended.
                pass_fds=() if lock is None else (lock,),
            )  # fmt: skip
        self._running[number] = _Running(process, slot, log, (given, found))

    def pids(self) -> dict[int, int]:
        """Process id of each trial that runs, by its number."""
        return {number: running.process.pid for number, running in self._running.items()}

    def wait(self) -> list[tuple[int, Outcome]]:
        """Block until a process ends; numbers and outcomes of all that have."""
        while True:
            found = [(number, self._ended(number)) for number in list(self._running)]
            ended = [(number, outcome) for number, outcome in found if outcome is not None]
            if ended:
                return ended
            time.sleep(_POLL)

    def _ended(self, number: int) -> Outcome | None:
        running = self._running[number]
        running.peak = max(running.peak, peak_of(running.process.pid))
        pid, status, usage = os.wait4(running.process.pid, os.WNOHANG)
        if pid == 0:
            return None
        code = running.process.returncode = os.waitstatus_to_exitcode(status)
        del self._running[number]
        given, found = running.files
        if found.is_file():
            outcome = read(found)
        else:
            memory = f"it had taken {(running.peak or usage.ru_maxrss * 1024) / 1e9:.2f} GB of memory"
            without = " and no result" if code >= 0 else ""
            outcome = died(f"its process {how_it_ended(code)}{without} ({memory})", str(running.log))
        assert running.process.stdin is not None
        running.process.stdin.close()
        given.unlink(missing_ok=True)
        found.unlink(missing_ok=True)
        if outcome["status"] == "finished":
            running.log.unlink(missing_ok=True)
        return outcome

    def close(self) -> None:
        """Terminate the processes that still run; kill those that do not end in time."""
        for running in self._running.values():
            running.process.terminate()
        end = time.monotonic() + _PATIENCE
        for running in self._running.values():
            try:
                running.process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()
            assert running.process.stdin is not None
            running.process.stdin.close()
        self._running.clear()


def threads_each(jobs: int) -> int:
    """Threads of one of so many trials: its share of the cores that this process may use, and at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(cores, psutil.cpu_count(logical=False) or cores)  # two threads of a core compute no faster than one
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        cores = min(cores, int(asked) * jobs)  # what a user allows one process
    return max(1, cores // jobs)


def devices(device: str, jobs: int) -> list[str]:
    """The device of each slot: with several GPUs and none named, each slot has its own as long as there are enough."""
    if device not in ("auto", "cuda"):
        return [device] * jobs
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [f"cuda:{slot % count}" if count > 1 else device for slot in range(jobs)]


def peak_of(process: int) -> int:
    """Peak resident memory of another process, in bytes; 0: it is gone, or the system does not say."""
    try:
        text = (Path("/proc") / str(process) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s+(\d+) kB", text, re.MULTILINE)
    return 0 if found is None else int(found[1]) * 1024
