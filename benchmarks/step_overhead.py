#!/usr/bin/env python
"""What a decode step costs besides its weights: a 22-layer Llama so narrow that its products take no time.

    python benchmarks/step_overhead.py [--layers 22]

Prints one JSON object: milliseconds of one thread a token of `generate` through the decoder in C, and through transformers' modules
with the same kernels (the same artifact, layers called one by one).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from make_random_llama import write

import compress
import runtime
from runtime.api.model import Model
from runtime.engines.native.engine import NativeEngine

PROMPT, NEW, ROUNDS = 32, 128, 5


def milliseconds(model: Model) -> list[float]:
    """Processor time of each round, a token (the prompt's share included): what else runs on the machine counts little."""
    prompt = torch.randint(2, 1000, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    rounds = []
    for _ in range(ROUNDS + 1):
        start = time.process_time()
        model.generate(prompt, max_new_tokens=NEW, ignore_eos=True)
        rounds.append(1e3 * (time.process_time() - start) / NEW)
    return rounds[1:]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=22)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        write(source, options.layers, hidden=64, intermediate=128, heads=4, kv_heads=2, vocabulary=32000)
        stages = [{"quantize": {"method": "rtn", "bits": 4, "group_size": 32, "ignore": []}}]
        recipe = Path(folder) / "recipe.json"
        recipe.write_text(json.dumps({"name": "narrow", "model": str(source), "stages": stages}))
        out = compress.apply(str(recipe), output=str(Path(folder) / "out"), quiet=True).path
        lean = runtime.load(out, threads=1)
        assert isinstance(lean.engine, NativeEngine)
        plain = Model(lean.engine.torch_engine, None, lean.artifact, frozenset())
        found: dict[str, Any] = {
            "layers": options.layers,
            "threads": 1,
            "processor_milliseconds_a_token": {
                lean.stats["engine"]: statistics.median(milliseconds(lean)),
                plain.engine.description: statistics.median(milliseconds(plain)),
            },
            "new_tokens": NEW,
            "rounds": ROUNDS,
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
        }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
