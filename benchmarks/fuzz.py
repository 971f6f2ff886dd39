"""Hostile files: good ones changed at random, and what reading them did.

    python benchmarks/fuzz.py [--minutes M | --inputs N] [--kinds "index,recipe,..."] [--seed S] [--output benchmarks/results/fuzz.json]

An input may be read, or refused in a sentence. It must not crash, hang, take much memory, open or write anything outside of its directory,
run code, or ask the network (`tests/hostile/watching.py`). Prints one JSON object: inputs by kind and outcome; exits 1 where one was wrong,
and keeps such inputs in the directory `--keep`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "hostile"), str(ROOT / "tests" / "faults"), str(ROOT / "tests"), str(ROOT)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from kinds import KINDS, allowed, hostile, make_good, mend  # noqa: E402
from watching import Outcome, watch  # noqa: E402
from where import commit, cpu_name, memory_gb  # noqa: E402


class Fuzzer:
    """Counts.

    Attributes:
        counts: of outcomes by kind. wrong: {what is wrong: example}.
    """

    def __init__(self, room: Path, keep: Path | None) -> None:
        self.room, self.keep = room, keep
        self.counts: dict[str, Counter[str]] = {}
        self.seconds: Counter[str] = Counter()
        self.wrong: dict[str, str] = {}

    def one(self, name: str, seed: int) -> None:
        kind, chooser = KINDS[name], random.Random(f"{name} {seed}")
        start = time.perf_counter()
        directory, file = hostile(kind, self.room, chooser)
        outcome = watch(kind.read, directory, allowed(self.room))
        self.counts.setdefault(name, Counter())[outcome.kind] += 1
        self.seconds[name] += time.perf_counter() - start  # type: ignore[assignment]
        if outcome.wrong:
            self._note(name, seed, file, outcome, directory)
        mend(kind, self.room, file)

    def _note(self, name: str, seed: int, file: str, outcome: Outcome, directory: Path) -> None:
        place = outcome.text.rpartition(" at ")[2] if outcome.kind == "crash" else outcome.text
        key = f"{name}: {outcome.kind}: {place}"
        if key in self.wrong:
            return
        self.wrong[key] = f"seed {seed}, {file}: {outcome.text}"
        print(f"{key}\n    {self.wrong[key]}", file=sys.stderr, flush=True)
        if self.keep is not None:
            target = self.keep / f"{len(self.wrong):03d}"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(directory, target, symlinks=True, ignore=_special)

    def report(self) -> dict[str, Any]:
        kinds = {
            name: {"inputs": sum(counts.values()), **dict(counts), "seconds": round(self.seconds[name], 1)}
            for name, counts in self.counts.items()
        }
        return {
            "inputs": sum(kind["inputs"] for kind in kinds.values()),
            "wrong": len(self.wrong),
            "kinds": kinds,
            "examples": self.wrong,
        }


def _special(directory: str, names: list[str]) -> list[str]:
    """What is no file and no directory cannot be copied."""
    return [name for name in names if not (Path(directory) / name).is_file() and not (Path(directory) / name).is_dir()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--inputs", type=int, default=100, help="of each kind")
    parser.add_argument("--kinds", default=";".join(KINDS), help="separated by ;")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = options.kinds.split(";")
    with tempfile.TemporaryDirectory(prefix="compress-fuzz-") as directory:
        room = Path(os.path.realpath(directory))
        make_good(room)
        logging.disable(logging.CRITICAL)
        for name in names:  # what is imported and compiled once is no input's
            KINDS[name].read(room / KINDS[name].directory)
        fuzzer, start = Fuzzer(room, options.keep), time.monotonic()
        number = options.seed
        # As much time for each kind: those that load a model are a hundred times slower than a header.
        while (
            (time.monotonic() - start < 60 * options.minutes)
            if options.minutes
            else number - options.seed < options.inputs
        ):
            least = min(fuzzer.seconds[name] for name in names)
            for name in names:
                if options.minutes is None or fuzzer.seconds[name] <= least + 1:
                    fuzzer.one(name, number)
            number += 1
        found = {
            "machine": {"cpu": cpu_name(), "memory_gb": memory_gb()},
            "commit": commit(),
            "seed": options.seed,
            **fuzzer.report(),
        }
    text = json.dumps(found, indent=1) + "\n"
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
    print(text)
    return 1 if fuzzer.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
