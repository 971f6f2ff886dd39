"""Write the token ids that every tool gets: calibration rows and held-out windows, as `compress` itself would draw them.

python token_ids.py --model CHECKPOINT --output ids.json [--samples 128] [--length 256] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer

from compress.data import load, load_evaluation
from compress.recipe.models import CalibrationConfig, EvaluateConfig


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    vocabulary = AutoConfig.from_pretrained(arguments.model).vocab_size
    wanted = CalibrationConfig(samples=arguments.samples, sequence_length=arguments.length, seed=arguments.seed)
    calibration = load(wanted, tokenizer, vocabulary)
    rows = torch.cat([ids for ids, _ in calibration.batches])
    heldout = load_evaluation(EvaluateConfig(sequence_length=arguments.length), tokenizer, vocabulary).ids
    facts = {"calibration": calibration.description, "calibration_sha256": calibration.sha256}
    data = {**facts, "input_ids": rows.tolist(), "heldout": heldout.tolist()}
    arguments.output.write_text(json.dumps(data))


if __name__ == "__main__":
    main()
