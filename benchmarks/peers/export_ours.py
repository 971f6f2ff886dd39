"""Write an artifact of this repository as a dense bfloat16 checkpoint: `python export_ours.py --config cell.json`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from dense_checkpoint import write_dense

import runtime
from runtime.engines.torch.engine import TorchEngine
from runtime.layers.compressed_module import CompressedModule


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    config = json.loads(parser.parse_args().config.read_text())
    engine = runtime.load(config["output"], device="cpu", kernels="reference").engine
    assert isinstance(engine, TorchEngine)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in engine.module.named_modules():
        if isinstance(module, CompressedModule):
            tensors[f"{name}.weight"] = module.dequantize()
        tensors |= {f"{name}.{key}": value.data for key, value in module.named_parameters(recurse=False)}
    write_dense(config["model"], tensors, config["dense"])


if __name__ == "__main__":
    main()
