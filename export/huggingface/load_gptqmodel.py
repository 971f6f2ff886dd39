"""Script that loads a GPTQ folder with GPTQModel and writes its results: `python load_gptqmodel.py FOLDER ASKED.npy ANSWERED.npz [LOADER]`.

LOADER is "gptqmodel" (GPTQModel.load) or "transformers" (AutoModelForCausalLM, which needs optimum beside gptqmodel).

A process of its own, since importing gptqmodel changes transformers; run by file name, so that it needs an interpreter with
gptqmodel, torch and numpy, and nothing else of this project. ASKED is `rows` int64 `[n, seq]`. ANSWERED has `half_logits`
`[n, seq, vocab]` (GPTQModel as it is, float16) and `logits`, of the matrices that GPTQModel unpacks multiplied in float32, so that
arithmetic is not what differs.
"""

from __future__ import annotations

import sys
from typing import Any


def main(folder: str, asked: str, answered: str, loader: str = "gptqmodel") -> None:
    """Load `folder` with GPTQModel (or with transformers), compute what `asked` lists, write it to `answered`."""
    import os

    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # GPTQModel compiles its unpacking, for minutes; the numbers are the same
    import numpy as np
    import torch

    torch.set_num_threads(max(2, torch.get_num_threads()))  # with one thread GPTQModel does not load
    from gptqmodel.nn_modules.qlinear import BaseQuantLinear

    rows = torch.from_numpy(np.load(asked))
    model = _by_transformers(folder) if loader == "transformers" else _by_gptqmodel(folder)
    with torch.inference_mode():
        half = model(input_ids=rows, use_cache=False).logits.float()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, BaseQuantLinear)}
    for name, module in layers.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, dense(module))
    torch.nn.Module.float(model)  # transformers forbids the method on models that it has loaded quantized
    with torch.inference_mode():
        logits = model(input_ids=rows, use_cache=False).logits.float()
    np.savez(answered, half_logits=half.numpy(), logits=logits.numpy(), layers=len(layers))


def _by_gptqmodel(folder: str) -> Any:
    import torch
    from gptqmodel import BACKEND, GPTQModel

    return GPTQModel.load(folder, device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16).model


def _by_transformers(folder: str) -> Any:
    import json
    from pathlib import Path

    import torch
    from transformers import AutoModelForCausalLM, GPTQConfig

    # The kernel whose matrices can be read back; everything else is as config.json says.
    stored = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
    config = GPTQConfig(bits=stored["bits"], backend="gptq_torch")
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float16, device_map="cpu", quantization_config=config
    )


def dense(module: Any) -> Any:
    """The layer with the matrix that GPTQModel unpacks, not rounded to float16."""
    import torch

    module.scales = module.scales.float()
    with torch.inference_mode():
        matrix = type(module).dequantize_weight(module).T.contiguous().float().clone()
    layer = torch.nn.Linear(matrix.shape[1], matrix.shape[0], bias=module.bias is not None)
    layer.weight = torch.nn.Parameter(matrix, requires_grad=False)
    if module.bias is not None:
        layer.bias = torch.nn.Parameter(module.bias.detach().float(), requires_grad=False)
    return layer


if __name__ == "__main__":
    main(*sys.argv[1:5])
