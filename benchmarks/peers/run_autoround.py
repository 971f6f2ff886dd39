"""Compress a checkpoint with AutoRound, or write dense what it wrote. Runs in AutoRound's own environment.

python run_autoround.py --config cell.json            compress (this is what is timed)
python run_autoround.py --config cell.json --export   its output as a dense bfloat16 checkpoint
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from dense_checkpoint import Phases, read_calibration, run, write_dense, write_report


def compress(config: dict[str, Any], phases: Phases) -> None:
    """Run one cell and save it in AutoRound's dense format: the weights on their grid, in the dtype of the model."""
    import torch
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    phases.done("import")
    rows = read_calibration(config["calibration"])
    quantize = config["quantize"]
    model = AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(config["model"])
    phases.done("load")
    tuner = AutoRound(
        model,
        tokenizer,
        scheme=f"W{quantize['bits']}A16",
        group_size=quantize["group_size"],
        sym=quantize["symmetric"],
        dataset=[{"input_ids": torch.tensor([row])} for row in rows],
        nsamples=len(rows),
        seqlen=len(rows[0]),
        device_map="cpu",
        **config.get("settings", {}),
    )
    tuner.quantize()
    phases.done("compress")
    tuner.save_quantized(config["output"], format="fake")
    phases.done("save")
    versions = {name: importlib.metadata.version(name) for name in ("auto-round", "torch", "transformers")}
    notes = ["saved dense (format `fake`), so the bytes of its output are not those of codes"]
    write_report(config["report"], phases, versions=versions, notes=notes)


def export(config: dict[str, Any]) -> None:
    """Write the saved weights under the original configuration."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(Path(config["output"]).rglob("*.safetensors")):
        tensors |= load_file(file)
    write_dense(config["model"], tensors, config["dense"])


if __name__ == "__main__":
    run(__doc__, compress, export)
