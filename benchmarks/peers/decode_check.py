"""The checkpoint as a 4-bit engine sees it, dense again: what the engine's logits are held against.

`grid` in the request: "group" (codes of `rtn`, group 128), or "q4_0" (llama.cpp's blocks of 32).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode_common import Checkpoint, dequantize, main, rtn
from safetensors.torch import save_file


def prepare(request: dict[str, Any]) -> dict[str, Any]:
    source, path = Checkpoint(request["model"]), Path(request["path"])
    path.mkdir(parents=True, exist_ok=True)
    for file in source.directory.glob("*.json"):
        shutil.copyfile(file, path / file.name)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, shard in source.map.items():
        tensor = source[name].float()
        if tensor.dim() == 2 and (request["grid"] == "q4_0" or "embed" not in name):
            tensor = torch.from_numpy(rounded(tensor.numpy(), request["grid"]))
        shards.setdefault(shard, {})[name] = tensor
    for shard, tensors in shards.items():
        save_file(tensors, path / shard, metadata={"format": "pt"})
    return {"path": str(path)}


def compare(request: dict[str, Any]) -> dict[str, Any]:
    """The smallest cosine between rows of two files of logits."""
    first, second = (np.load(file) for file in request["files"])
    sizes = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return {"cosine": float(((first * second).sum(1) / sizes).min())}


def rounded(weight: Any, grid: str) -> Any:
    if grid == "group":
        return dequantize(*rtn(weight))
    from gguf import GGMLQuantizationType, quants

    kind = GGMLQuantizationType.Q4_0
    return quants.dequantize(quants.quantize(weight, kind), kind)


if __name__ == "__main__":
    main({"prepare": prepare, "compare": compare}, "torch")
