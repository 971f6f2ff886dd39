#!/usr/bin/env python
"""What structured_peers.py printed, cell by cell, in one file, with what could not be measured and why.

python structured_collect.py --text train.txt --lines *.jsonl --experts mixture/*.jsonl --output ../results/structured_peers.json

`--experts` are lines of a mixture of experts: they stand apart from those of the other model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

COULD_NOT = {
    "torch-pruning, heads": "1.6.1 did not finish grouping the heads of a Llama with grouped key heads: minutes in its dependency graph "
    "without an end (transformers 5.23 with either attention, 4.57 with the eager one). It has no depth pruning.",
    "torch-pruning, hessian": "It ran, but 1.6.1 keeps the squared gradient of the last row only: it asks for a name among tensors.",
    "amd-quark, 10 %": "OSSCAR of 0.13 rounds to multiples of 128 channels: a tenth and a fifth of 768 both become 640.",
    "nvidia-modelopt, gradnas": "Removed in 0.47.0, deprecated in 0.45; 0.44.0, which has it, knows the heads "
    "of BERT and GPT-J only.",
    "nvidia-modelopt, mcore_minitron": "Needs a Megatron-Core model with Transformer Engine layers; without these it is not registered.",
    "nvidia-modelopt, fastnas": "It ran on the channels only, and with torchprofile 0.0.4 only (0.1.0 has no `handlers`).",
    "llmcompressor, structure": "0.14.0.1 removes nothing of a dense model, and has no training to recover; "
    "its experts (REAP) are in `experts`.",
    "llmcompressor, causal mask": "Its sequential pipeline (0.14.0.1 with transformers 5.17) calibrates a Qwen3-MoE without a causal mask: "
    "the mask is made from a copy of the configuration that does not know of the eager attention that it computes with. `reap` is as it "
    "comes, `reap + causal mask` is given the mask with the rows. Its cells of the bundled Llama have the mask.",
    "torch-kirigami": "0.2.1 cannot trace the whole model (`co_varnames is too small`). MLP by MLP its magnitude and Taylor scores gave "
    "torch-pruning's perplexities (four cells), at 28 to 197 s of planning a cell.",
    "pruna": "torch_structured of 0.3.4 (torch-pruning inside) refuses Llama: OPT and vision models only.",
    "nncf": "prune() of 3.4.0 masks single weights, by magnitude or while training; it removes no structure any more.",
    "neural-compressor": "3.10 (neural-compressor-pt) has no pruning any more.",
    "ptblop": "0.4.0 applies a list of blocks to remove that it is given; it ranks nothing.",
    "LLM-Pruner, SliceGPT, FLAP, wanda": "Not on PyPI.",
}


def cells_of(files: list[Path]) -> list[dict[str, Any]]:
    """What was printed into files."""
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.strip()]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="that was calibrated on")
    parser.add_argument("--rows", type=int, default=128, help="of it")
    parser.add_argument("--model", default="stdlib-4m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lines", type=Path, nargs="+", required=True, help="files of printed lines")
    parser.add_argument("--experts", type=Path, nargs="*", default=[], help="files of lines of a mixture")
    parser.add_argument("--mixture", default="structured_model.py --family moe --steps 360", help="which one")
    parser.add_argument("--note", help="on how it was measured")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    cells, experts = cells_of(arguments.lines), cells_of(arguments.experts)
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    result = {
        "machine": {"cpu": names[0].split(":", 1)[1].strip(), "threads": arguments.threads},
        "model": arguments.model, "text": arguments.text.name, "rows": arguments.rows,
        **({"note": arguments.note} if arguments.note else {}), "cells": cells,
        **({"experts": {"model": arguments.mixture, "cells": experts}} if experts else {}), "could_not": COULD_NOT,
    }  # fmt: skip
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
