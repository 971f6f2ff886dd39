"""Compilation of many kernels, in as many processes as there are processors."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from runtime.errors import CompressError
from runtime.kernels.triton.signature import Variant
from runtime.system.processes import how_it_ended

_MOST = 8  # processes: each takes some 600 MB
_EACH = 4  # kernels that a process is worth starting for


@dataclass(frozen=True)
class Task:
    """One kernel for one GPU, `capability` 80, 90, 100."""

    variant: Variant
    capability: int


@dataclass(frozen=True)
class Built:
    """What became of a task.

    Attributes:
        entry: of the index, but for the file: `symbol`, `architecture`, `shared` bytes, `spill_bytes`, ...; `ptx_sha256` is of the
            assembly that the cubin was made of, `scratch_pointers` counts pointers to scratch memory that follow the arguments.
        error: why there is no kernel; "" when there is one.
    """

    task: Task
    cubin: bytes = b""
    entry: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def build(tasks: Sequence[Task], done: Callable[[Built], None] = lambda built: None) -> list[Built]:
    """Compile all, in any order; results in the order of the tasks. `done` is called after each, by any thread.

    Raises:
        CompressError: a compiling process died.
    """
    count = max(1, min(_MOST, len(os.sched_getaffinity(0)), -(-len(tasks) // _EACH)))
    results: list[Built | None] = [None] * len(tasks)

    def work(number: int, worker: subprocess.Popen[bytes]) -> None:
        for index, built in zip(range(number, len(tasks), count), _ask(worker, tasks[number::count]), strict=True):
            results[index] = built
            done(built)

    with ExitStack() as stack:
        cache = stack.enter_context(TemporaryDirectory(prefix="compress-triton-", ignore_cleanup_errors=True))
        pool = stack.enter_context(ThreadPoolExecutor(count))
        workers: list[subprocess.Popen[bytes]] = []
        stack.callback(_stop, workers)  # before the pool waits for its threads, which read from them
        workers += [_start(cache) for _ in range(count)]
        for future in as_completed([pool.submit(work, number, worker) for number, worker in enumerate(workers)]):
            future.result()
    return [built for built in results if built is not None]


def _start(cache: str) -> subprocess.Popen[bytes]:
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Nothing is taken from a cache of earlier compilations, and no line numbers are written, which would hold paths.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": cache,
        "TRITON_DISABLE_LINE_INFO": "1", "TRITON_ALWAYS_COMPILE": "1", "TRITON_INTERPRET": "0",
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "export.triton_aot.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, env=environment,
    )  # fmt: skip


def _stop(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        worker.kill()
        with (
            suppress(OSError),
            worker,
        ):  # which closes its pipes; what was still to be written to one that died cannot be
            pass


def _ask(worker: subprocess.Popen[bytes], tasks: Sequence[Task]) -> Iterator[Built]:
    """A `Built` for each task, as they come."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    with suppress(OSError):  # one that died is noticed below
        pickle.dump([(task.variant, task.capability) for task in tasks], worker.stdin)
        worker.stdin.close()
    for task in tasks:
        try:
            answer = pickle.load(worker.stdout)
        except (OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
            what = f"the process that compiles {task.variant.kernel} for sm_{task.capability}"
            raise CompressError(f"{what} {_ended(worker)}") from error
        yield Built(task, **answer)


def _ended(worker: subprocess.Popen[bytes]) -> str:
    try:
        return how_it_ended(worker.wait(timeout=5))
    except subprocess.TimeoutExpired:
        return how_it_ended(None)
