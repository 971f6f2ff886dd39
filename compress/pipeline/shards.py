"""Write one finished part of the model (a block, or all that is outside of the blocks) as a shard of its own, and account for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from compress.pipeline.files import disk_errors, sha256, written_beside
from compress.pipeline.layer import SolvedLayer, weight_digest
from runtime import formats
from runtime.checkpoint import Checkpoint
from runtime.errors import CompressError
from runtime.quantization_config import entry_to_dict


def shard_name(number: int, total: int) -> str:
    """File name of shard `number` (from 1) of `total`, as transformers names them."""
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def write_part(
    directory: Path,
    shard: str,
    source: Checkpoint,
    names: list[str],
    changed: dict[str, torch.Tensor],
    layers: dict[str, SolvedLayer],
    skipped: dict[str, str],
) -> dict[str, Any]:
    """Write `shard`, read it back, and return its record.

    Args:
        names: source tensors that belong to this part; each of them ends as compressed or copied; none is dropped.
        changed: tensors whose values a transform changed (norms, biases), by name; also tensors the source did not store.
        layers: solved layers by module name.
        skipped: layers the recipe named that were left as they are, with the reason.
    """
    tensors: dict[str, torch.Tensor] = {}
    account: dict[str, Any] = {}
    for name in names:
        module = name.rpartition(".")[0]
        size = source.nbytes(name)
        if name.endswith(".weight") and module in layers:
            stored = {f"{module}.{key}": value.contiguous().cpu() for key, value in layers[module].tensors.items()}
            tensors.update(stored)
            account[name] = {
                "action": "compressed", "stored_as": sorted(stored), "bytes_before": size, "bytes_after": _bytes(stored),
                "format": layers[module].entry.format,
            }  # fmt: skip
        else:
            value = changed[name] if name in changed else source.get(name)
            tensors[name] = value.contiguous().cpu()
            account[name] = {
                "action": "copied",
                "stored_as": [name],
                "bytes_before": size,
                "bytes_after": _bytes({name: tensors[name]}),
            }
            if name in changed:
                account[name]["reason"] = "took the scale of the layers that read it"
            if module in skipped:
                account[name]["reason"] = skipped[module]
    for name, value in changed.items():
        if name not in account:
            tensors[name] = value.contiguous().cpu()
            account[name] = {
                "action": "copied",
                "stored_as": [name],
                "bytes_before": 0,
                "bytes_after": _bytes({name: value}),
                "reason": "was tied",
            }
    for module, layer in layers.items():
        if f"{module}.weight" not in account:
            stored = {f"{module}.{key}": value.contiguous().cpu() for key, value in layer.tensors.items()}
            tensors.update(stored)
            account[f"{module}.weight"] = {
                "action": "compressed", "stored_as": sorted(stored), "bytes_before": 0, "bytes_after": _bytes(stored),
                "format": layer.entry.format, "reason": "was tied",
            }  # fmt: skip

    path = directory / shard
    with disk_errors(f"writing {path}"), written_beside(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    verify_part(path, tensors, layers)
    return {
        "shard": shard,
        "sha256": sha256(path),
        "bytes": path.stat().st_size,
        "tensors": account,
        "stored": {name: _bytes({name: value}) for name, value in sorted(tensors.items())},
        "layers": [layer.record for layer in layers.values()],
        "entries": {name: entry_to_dict(layer.entry) for name, layer in layers.items()},
        "digests": {name: layer.digest for name, layer in layers.items()},
    }


def verify_part(path: Path, tensors: dict[str, torch.Tensor], layers: dict[str, SolvedLayer]) -> None:
    """Load-back gate of one shard: what the disk gives is what was written, and unpacks to the weights that were solved."""
    with safe_open(path, framework="pt") as file:
        if set(file.keys()) != set(tensors):
            raise CompressError(f"{path} does not hold the tensors that were written to it")
        for name, layer in layers.items():
            stored = {key: file.get_tensor(f"{name}.{key}") for key in layer.tensors}
            weight = formats.get(layer.entry.format).unpack(stored, layer.entry.scheme, layer.shape, layer.dense.dtype)
            if weight_digest(weight.dequantize()) != layer.digest:
                raise CompressError(f"{path}: layer {name} read back from the disk is not the weight that was solved")


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())
