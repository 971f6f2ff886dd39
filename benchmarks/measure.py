"""Run a command and measure the whole process: wall time and peak resident memory. Imports nothing heavy on purpose.

`ru_maxrss` of a child starts from the resident memory of its parent (the kernel keeps the high-water mark across fork and exec),
so whoever calls this must be small; nothing of torch is imported here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Measured:
    """What one process cost.

    Attributes:
        seconds: wall time from start to end, imports included.
        cpu_seconds: user and system time of the process and of the children it waited for.
        peak_mb: largest resident memory of the process, or of the largest child it waited for, in MB (10^6 bytes).
        returncode: exit status, negative for a signal.
        timed_out: it was killed because its time was up.
    """

    seconds: float
    cpu_seconds: float
    peak_mb: float
    returncode: int
    timed_out: bool


def measure(
    command: Sequence[str], log: Path, environment: Mapping[str, str], timeout: float, cwd: Path | None = None
) -> Measured:
    """Run `command`, its output into `log`, and wait for it; after `timeout` seconds its process group is killed."""
    with log.open("wb") as stream:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=dict(environment), cwd=cwd, start_new_session=True
        )
        expired = threading.Event()

        def stop() -> None:
            expired.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(timeout, stop)
        timer.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            timer.cancel()
        seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    cpu = usage.ru_utime + usage.ru_stime
    peak = usage.ru_maxrss * 1024 / 1e6
    return Measured(round(seconds, 2), round(cpu, 2), round(peak, 1), process.returncode, expired.is_set())


def last_error(log: Path, lines: int = 3) -> str:
    """The last lines of a log that say something: what a failed run is recorded with."""
    text = [line.strip() for line in log.read_text(errors="replace").replace("\r", "\n").splitlines()]
    return " | ".join([line for line in text if line][-lines:])[-600:]
