#!/usr/bin/env python
"""Seconds until an artifact is loaded: on a new machine, for the first time, and later; JSON.

    python benchmarks/loading.py ARTIFACT [--rounds 3] [--output FILE]        `streaming.py --make` makes one of the 1.1B shape

Every load is a process of its own, with a cache directory of its own that is made for each round. The states, one after another:

- new: nothing is compiled, no weights are laid out;
- first: the C library is compiled, the artifact was never loaded;
- later: the program and the prepared weights are known.

`imports`: of torch and this runtime, before `runtime.load`; `seconds`: `runtime.load`, which imports transformers and its code of the model
where it needs them. `imported` loads have imported these before, so that `seconds` is what is not an import. `read`: reading
all of the artifact's files, which the page cache holds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from where import commit, cpu_name, memory_gb

HERE = Path(__file__).resolve().parent
STATES = ("new", "first", "later")
_MODEL = "transformers.models.llama.modeling_llama"


def load(path: str, imported: bool) -> dict[str, Any]:
    """One load in this process, and one token."""
    start = time.perf_counter()
    import_module("runtime.api.load")
    if imported:
        for name in ("AutoModelForCausalLM", "AutoTokenizer"):
            getattr(import_module("transformers"), name)
        import_module(_MODEL)
    before = time.perf_counter()
    model = import_module("runtime").load(path)
    loaded = time.perf_counter()
    model.generate([5, 6, 7, 8], max_new_tokens=1, ignore_eos=True)
    return {
        "imports": before - start, "seconds": loaded - before, "first_token": time.perf_counter() - loaded,
        "engine": type(model.engine).__name__, "transformers": _MODEL in sys.modules,
    }  # fmt: skip


def read(path: Path) -> float:
    """Seconds to read every file of the artifact once more."""
    found = []
    for _ in range(2):  # the first fills the page cache
        start = time.perf_counter()
        for file in sorted(path.iterdir()):
            if file.is_file():
                with file.open("rb", buffering=0) as stream:
                    while stream.read(1 << 22):
                        pass
        found.append(time.perf_counter() - start)
    return found[-1]


def round_of(path: Path, imported: bool) -> dict[str, dict[str, Any]]:
    """All states, each in a process."""
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE.parent), "COMPRESS_CACHE": cache}
        command = [sys.executable, str(Path(__file__).resolve()), str(path), "--one", *(["--imported"] * imported)]
        for state in STATES:
            if state == "first":
                for entry in Path(cache, "prepared").rglob("*"):
                    if entry.is_file():
                        entry.unlink()
            os.sync()  # what the load before has written is not this one's
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
            found[state] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--imported", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(load(str(arguments.artifact), arguments.imported)))
        return
    result: dict[str, Any] = {
        "machine": {
            "cpu": cpu_name(), "cores": os.cpu_count(), "memory_gb": memory_gb(), "commit": commit(),
            "load_before": os.getloadavg()[0],
        },
        "bytes": sum(file.stat().st_size for file in arguments.artifact.iterdir() if file.is_file()),
        "read": read(arguments.artifact),
    }  # fmt: skip
    for kind, imported in (("cold", False), ("imported", True)):
        rounds = [round_of(arguments.artifact, imported) for _ in range(arguments.rounds)]
        result[kind] = {
            state: {
                "median_seconds": statistics.median(each[state]["seconds"] for each in rounds),
                "rounds": [each[state] for each in rounds],
            }
            for state in STATES
        }
    text = json.dumps(result, indent=1)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
