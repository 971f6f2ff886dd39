"""Loads a GPTQ folder with GPTQModel and writes what it computes: `python load_gptqmodel.py FOLDER ASKED.npz ANSWERED.npz`.

A process of its own, since importing gptqmodel changes transformers; run by file name, so that it needs an interpreter with
gptqmodel, torch and numpy, and nothing else of this project. ASKED has `rows` int64 `[n, seq]`, `lengths` `[n]` (of the prompts that
the rows begin with) and `new_tokens`. ANSWERED has `half_logits` (GPTQModel as it is, float16) and, of the matrices that GPTQModel
unpacks multiplied in float32, `logits` `[n, seq, vocab]` and `tokens` `[n, new_tokens]`, so that arithmetic is not what differs.
"""

from __future__ import annotations

import sys
from typing import Any


def main(folder: str, asked: str, answered: str) -> None:
    import numpy as np
    import torch

    torch.set_num_threads(max(2, torch.get_num_threads()))  # with one thread GPTQModel does not load
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.nn_modules.qlinear import BaseQuantLinear

    with np.load(asked) as content:
        rows, lengths = torch.from_numpy(content["rows"]), content["lengths"].tolist()
        new_tokens = int(content["new_tokens"])
    loaded = GPTQModel.load(folder, device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16)
    model = loaded.model
    with torch.inference_mode():
        half = model(input_ids=rows, use_cache=False).logits.float()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, BaseQuantLinear)}
    for name, module in layers.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, dense(module))
    model.float()
    with torch.inference_mode():
        logits = model(input_ids=rows, use_cache=False).logits.float()
    tokens = [_greedy(model, row[:length].tolist(), new_tokens) for row, length in zip(rows, lengths, strict=True)]
    np.savez(answered, half_logits=half.numpy(), logits=logits.numpy(), tokens=tokens, layers=len(layers))


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


def _greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    import torch

    ids, cache, written = torch.tensor([prompt]), None, []
    with torch.inference_mode():
        for _ in range(count):
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            ids, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
            written.append(int(ids))
    return written


if __name__ == "__main__":
    main(*sys.argv[1:4])
