"""Crashes at every moment of small runs, and damage to what they go on from: each must end with the bytes of an uninterrupted run.

    python benchmarks/faults.py [--damages N] [--every N] [--kinds compress,structure,...] [--output benchmarks/results/faults.json]

A moment is the disk before an operation that changes it (rename, unlink, mkdir, fsync), or with the file that is being written cut in
half (`tests/faults/moments.py`). Every moment is gone on from once as it is, and `--damages` times with a file of it flipped in one bit,
cut, emptied, zeroed or removed. Prints one JSON object; exits 1 where a run ended otherwise.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "faults"), str(ROOT / "tests"), str(ROOT)]

import torch  # noqa: E402
from runs import STAGES  # noqa: E402
from trials import Watched  # noqa: E402
from where import commit, cpu_name, memory_gb  # noqa: E402


def measure(kind: str, room: Path, damages: int, every: int, seed: int) -> dict[str, Any]:
    """All moments of a kind of run."""
    watched, chooser, start = Watched.of(kind, room), random.Random(seed), time.monotonic()
    wrong: list[str] = []
    trials = 0
    numbers = range(chooser.randrange(every), len(watched.found), every)
    for number in numbers:
        for damaged in range(1 + damages):
            what, problem = watched.resumed(number, room / "resumed", chooser if damaged else None)
            trials += 1
            if problem is not None:
                wrong.append(f"{what}: {problem}")
                print(f"{kind}: {wrong[-1]}", file=sys.stderr, flush=True)
    return {
        "operations": watched.operations, "moments": len(watched.found), "resumed": trials, "of_these_damaged": trials - len(numbers),
        "wrong": wrong, "seconds": round(time.monotonic() - start),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(STAGES))
    parser.add_argument("--damages", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="only every so many moments")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    found: dict[str, Any] = {
        "machine": {"cpu": cpu_name(), "memory_gb": memory_gb()}, "commit": commit(), "seed": options.seed, "kinds": {},
    }  # fmt: skip
    if options.output is not None and options.output.is_file():
        found = json.loads(options.output.read_text(encoding="utf-8"))  # kinds may be measured one by one
    for kind in options.kinds.split(","):
        with tempfile.TemporaryDirectory(prefix="compress-faults-") as room:
            found["kinds"][kind] = measure(kind, Path(room), options.damages, options.every, options.seed)
        text = json.dumps(found, indent=1) + "\n"
        if options.output is not None:
            options.output.write_text(text, encoding="utf-8")
    print(text)
    return 1 if any(kind["wrong"] for kind in found["kinds"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
