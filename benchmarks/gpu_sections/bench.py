"""Bench of one section: its device, its clock, its time and what it records. Only here does a dry run differ from a GPU."""

from __future__ import annotations

import gc
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from gpu_sections.files import write_json

Row = dict[str, Any]
Value = TypeVar("Value")
REPEATS = 15


class MissingPeerError(Exception):
    """What a section is compared with, or built on, is not installed. The message is one sentence."""


class Bench:
    """What a section computes with and records to.

    Args:
        dry: on the CPU, with tiny shapes and interpreted kernels.
        seconds: that the section may take.
        file: where everything recorded so far is written.
        work: directory for checkpoints and artifacts, which sections share.
        gpt_fast: checkout of gpt-fast; None: there is none.

    Attributes:
        device: of tensors.
        record: {"cases", "failed", "left_out", "rows", "facts", "missing_peers", "failed_peers", "peer_figures"}.
    """

    def __init__(self, dry: bool, seconds: float, file: Path, work: Path, gpt_fast: Path | None = None) -> None:
        self.dry, self.file, self.work, self.gpt_fast = dry, file, work, gpt_fast
        self.device = torch.device("cpu" if dry else "cuda:0")
        self._end = time.monotonic() + seconds
        self.record: Row = {
            "cases": 0, "failed": [], "left_out": [], "rows": [], "facts": {}, "missing_peers": {}, "failed_peers": {},
            "peer_figures": 0,
        }  # fmt: skip

    # ---------------------------------------------------------------- shapes, time and memory
    def pick(self, real: Value, dry: Value) -> Value:
        """A size: of the GPU's run, or of a dry one."""
        return dry if self.dry else real

    def left(self) -> float:
        """Seconds that the section still has."""
        return self._end - time.monotonic()

    def enough(self, name: str, seconds: float = 5.0) -> bool:
        """Whether there is time for a cell that takes about so many seconds; what is left out is recorded."""
        if self.left() >= seconds:
            return True
        self.record["left_out"].append(f"{name}: no time left")
        self._write()
        return False

    def free_bytes(self) -> int:
        """Memory of the device that nobody has taken."""
        if self.dry:
            return 1 << 30
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def free_share(self) -> float:
        """Part of the device's memory that nobody has taken."""
        return 1.0 if self.dry else self.free_bytes() / torch.cuda.get_device_properties(self.device).total_memory

    # ---------------------------------------------------------------- records
    def add(self, row: Row) -> None:
        """Record a row of figures."""
        self.record["rows"].append(row)
        print("  " + json.dumps(row), file=sys.stderr, flush=True)
        self._write()

    def fact(self, **facts: Any) -> None:
        """Record what rows have in common."""
        self.record["facts"] |= facts
        self._write()

    def case(self, name: str, error: float, limit: float) -> None:
        """Record a case of a check: `error` must be a number of at most `limit`."""
        self.record["cases"] += 1
        worst = self.record["facts"].setdefault("worst", {})
        kind = name.split(",")[0]
        worst[kind] = max(worst.get(kind, 0.0), error) if error == error else error
        if not error <= limit:  # also where it is not a number
            self.fail(f"{name}: {error:.3g}, at most {limit:.3g} is rounding")
        self._write()

    def merge(self, record: Row) -> None:
        """Add what a check of other cases, in another process, has recorded."""
        self.record["cases"] += record["cases"]
        for name in ("failed", "left_out"):
            self.record[name] += record[name]
        worst = self.record["facts"].setdefault("worst", {})
        for kind, error in record["facts"].get("worst", {}).items():
            worst[kind] = max(worst.get(kind, 0.0), error) if error == error else error
        self._write()

    def fail(self, reason: str) -> None:
        """Record that something of ours is wrong or does not run; the section goes on."""
        self.record["failed"].append(reason)
        print(f"  FAILED {reason}", file=sys.stderr, flush=True)
        self._write()

    def ours(self, row: Row, name: str, measure: Callable[[], Any]) -> None:
        """A figure of ours: `row[name]`, or a failure."""
        row[name] = None
        try:
            row[name] = measure()
        except Exception as error:
            self.fail(f"{name}: {said(error)}")
            self.recover()

    def peer(self, row: Row, name: str, measure: Callable[[], Any]) -> None:
        """A figure of a peer: `row[name]`, or the reason why there is none, which is a result too."""
        row[name] = self.of_peer(row, name, measure)
        self.record["peer_figures"] += row[name] is not None

    def of_peer(self, row: Row, name: str, make: Callable[[], Value]) -> Value | None:
        """What a peer makes, as its model; None: it raised, and the reason is in the row and the record."""
        label = f"{row['engine']}, {name}" if "engine" in row else name
        try:
            return make()
        except ImportError as error:
            self.record["missing_peers"][label] = said(error)
            return None
        except Exception as error:
            reason = said(error)
        row[f"{name}_reason"] = reason
        self.record["failed_peers"].setdefault(label, reason)
        self._write()  # before what ends the section where the device is poisoned
        self.recover()
        return None

    def recover(self) -> None:
        """After an exception: what it held is freed. A fault that poisons the device raises here and ends the section."""
        gc.collect()
        if not self.dry:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _write(self) -> None:
        write_json(self.file, self.record)

    # ---------------------------------------------------------------- clock
    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.dry:
            torch.cuda.synchronize(self.device)

    def timed(self, run: Callable[[], Any]) -> float:
        """Seconds of one call: CUDA events around it, or the clock."""
        if self.dry:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def seconds(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Median seconds of one of `calls`, the same work on different buffers, replayed from one CUDA graph if it captures."""
        if self.dry:  # that it runs is all there is to see
            return self.timed(calls[0])
        for call in calls:
            call()  # compiles and tunes
        self.synchronize()

        def every() -> None:
            for call in calls:
                call()

        replay = self._captured(every)
        for _ in range(2):
            replay()
        return statistics.median(self.timed(replay) / len(calls) for _ in range(REPEATS))

    def _captured(self, run: Callable[[], None]) -> Callable[[], Any]:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run()
        except RuntimeError as error:  # of a peer, as a rule: launch overhead is then part of its time
            print(f"  not captured: {said(error)}", file=sys.stderr, flush=True)
            torch.cuda.synchronize()
            return run
        return graph.replay

    def wall(self, run: Callable[[], Any]) -> float:
        """Seconds by the clock until the device is done."""
        self.synchronize()
        start = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - start

    def copies(self, size: int) -> int:
        """How many buffers of so many bytes exceed twice the L2 cache, 2 to 64: in turn, nothing is served from it."""
        cache = 0 if self.dry else torch.cuda.get_device_properties(self.device).L2_cache_size
        return max(2, min(64, -(-2 * cache // size) + 1))

    def limits(self) -> tuple[float, float]:
        """Bytes a second that a large copy reads and writes, and operations a second of a large cuBLAS product in bfloat16."""
        source = torch.empty(self.pick(1 << 30, 1 << 20), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        bandwidth = 2 * source.numel() / self.seconds([lambda: target.copy_(source)] * 2)
        size = self.pick(8192, 64)
        a, b = (torch.randn(size, size, device=self.device).bfloat16() for _ in range(2))
        operations = 2 * size**3 / self.seconds([lambda: a @ b] * 2)
        self.fact(copy_bytes_per_second=bandwidth, bf16_operations_per_second=operations)
        return bandwidth, operations

    # ---------------------------------------------------------------- artifacts
    def artifact(self, recipe: str) -> Path:
        """The bundled checkpoint, compressed on the device by a bundled recipe; sections that want the same share it."""
        import compress

        path = self.work / recipe
        if not (path / "compress.json").is_file():
            smaller = ["calibration.samples=16", "evaluate.samples=16"]
            compress.apply(recipe, output=path, set=smaller, device=str(self.device), overwrite=True, quiet=True)
        return path


def require(package: str, name: str) -> None:
    """MissingPeerError unless a package can be imported; `name` is what people call it."""
    if importlib.util.find_spec(package) is None:
        raise MissingPeerError(f"{name} is not installed")


def said(error: BaseException) -> str:
    """An exception in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:240]}" if lines else type(error).__name__
