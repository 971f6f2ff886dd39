"""Compile many kernels, in as many processes as there are processors."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
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

    def as_dict(self) -> dict[str, Any]:
        """For `worker`."""
        arguments = [argument.as_dict() for argument in self.variant.arguments]
        return {
            "kernel": self.variant.kernel, "arguments": arguments, "options": dict(self.variant.options),
            "capability": self.capability,
        }  # fmt: skip


@dataclass(frozen=True)
class Built:
    """What became of a task.

    Attributes:
        error: why there is no kernel; "" when there is one.
        ptx_sha256: of the assembly that the cubin was made of.
        symbol, num_warps, shared, registers, spill_bytes: of the kernel.
    """

    task: Task
    cubin: bytes
    ptx_sha256: str = ""
    symbol: str = ""
    num_warps: int = 0
    shared: int = 0
    registers: int = 0
    spill_bytes: int = 0
    error: str = ""


def build(tasks: Sequence[Task], done: Callable[[Built], None] = lambda built: None) -> list[Built]:
    """Compile all, in any order; results in the order of the tasks. `done` is called after each, by any thread.

    Raises:
        CompressError: a compiling process died.
    """
    count = max(1, min(_MOST, len(os.sched_getaffinity(0)), -(-len(tasks) // _EACH)))
    idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
    cache = TemporaryDirectory(prefix="compress-triton-", ignore_cleanup_errors=True)
    workers = [_start(cache.name) for _ in range(count)]
    for worker in workers:
        idle.put(worker)

    def one(task: Task) -> Built:
        worker = idle.get()
        try:
            built = _ask(worker, task)
        finally:
            idle.put(worker)
        done(built)
        return built

    try:
        with ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(one, task) for task in tasks]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                _stop(workers)  # what waits for an answer shall not wait
                raise
    finally:
        _stop(workers)
        cache.cleanup()


def _start(cache: str) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Nothing is taken from a cache of earlier compilations, and no line numbers are written, which would hold paths.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": cache,
        "TRITON_DISABLE_LINE_INFO": "1", "TRITON_ALWAYS_COMPILE": "1", "TRITON_INTERPRET": "0",
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "export.triton_aot.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env=environment,
    )  # fmt: skip


def _stop(workers: Sequence[subprocess.Popen[str]]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.wait()
        for pipe in (worker.stdin, worker.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was still to be written to one that died
                    pipe.close()


def _ended(worker: subprocess.Popen[str]) -> str:
    try:
        return how_it_ended(worker.wait(timeout=5))
    except subprocess.TimeoutExpired:
        return how_it_ended(None)


def _ask(worker: subprocess.Popen[str], task: Task) -> Built:
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        print(json.dumps(task.as_dict()), file=worker.stdin, flush=True)
        line = worker.stdout.readline()
    except (OSError, ValueError) as error:
        raise CompressError(f"the process that compiles {task.variant.kernel} {_ended(worker)}") from error
    if not line:
        raise CompressError(
            f"the process that compiles {task.variant.kernel} for sm_{task.capability} {_ended(worker)}"
        )
    answer = json.loads(line)
    if "error" in answer:
        return Built(task, b"", error=answer["error"])
    return Built(task, base64.b64decode(answer.pop("cubin")), **answer)
