"""Shard of one finished part of the model (a block, or all that is outside of the blocks), with the account of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from compress.core.files import disk_errors, sha256, written_beside
from compress.model.source import SourceCheckpoint
from compress.weights.packed_layer import SolvedLayer, weight_digest
from runtime import formats
from runtime.errors import CompressError
from runtime.formats.quantization_config import entry_to_dict


def write_part(
    directory: Path,
    shard: str,
    source: SourceCheckpoint,
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
    wholes = _wholes(source, names, changed, layers)
    for name in names:
        module = name.rpartition(".")[0]
        size = source.nbytes(name)
        if name.endswith(".weight") and module in layers:
            stored = _stored(source, module, layers[module])
            tensors.update(stored)
            account[name] = {
                "action": "compressed", "stored_as": sorted(stored), "bytes_before": size, "bytes_after": _bytes(stored),
                "format": layers[module].entry.format,
            }  # fmt: skip
        else:
            own = wholes.get(name) or source.published(name)
            if own not in tensors:
                value = changed[name] if name in changed else source.whole(name) if name in wholes else source.get(name)
                tensors[own] = value.contiguous().cpu()
            after = size if name in wholes else _bytes({own: tensors[own]})
            account[name] = {"action": "copied", "stored_as": [own], "bytes_before": size, "bytes_after": after}
            if name in changed:
                account[name]["reason"] = "took the scale of the layers that read it"
            if module in skipped:
                account[name]["reason"] = skipped[module]
    for name, value in changed.items():
        if name not in account:
            own = source.published(name)
            tensors[own] = value.contiguous().cpu()
            account[name] = {
                "action": "copied",
                "stored_as": [own],
                "bytes_before": 0,
                "bytes_after": _bytes({own: value}),
                "reason": "was tied",
            }
    for module, layer in layers.items():
        if f"{module}.weight" not in account:
            stored = _stored(source, module, layer)
            tensors.update(stored)
            account[f"{module}.weight"] = {
                "action": "compressed", "stored_as": sorted(stored), "bytes_before": 0, "bytes_after": _bytes(stored),
                "format": layer.entry.format, "reason": "was tied",
            }  # fmt: skip

    path = directory / shard
    with disk_errors(f"writing {path}"), written_beside(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    verify_part(path, tensors, {source.published_module(name): layer for name, layer in layers.items()})
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


def _stored(source: SourceCheckpoint, module: str, layer: SolvedLayer) -> dict[str, torch.Tensor]:
    """The tensors of a compressed layer under the names that they are written by."""
    home = source.published_module(module)
    return {f"{home}.{key}": value.contiguous().cpu() for key, value in layer.tensors.items()}


def _wholes(
    source: SourceCheckpoint, names: list[str], changed: dict[str, torch.Tensor], layers: dict[str, SolvedLayer]
) -> dict[str, str]:
    """{tensor of an expert: the one of all experts that is copied in its stead}, where no expert of a layer has changed."""
    touched = {name.rpartition(".")[0] for name in changed} | layers.keys()
    homes: dict[str, bool] = {}
    for name in source.pieces.keys() & set(names):
        home = source.pieces[name].home
        homes[home] = homes.get(home, True) and name.rpartition(".")[0] not in touched
    pieces = {name: source.pieces[name] for name in names if name in source.pieces}
    return {name: piece.source.name for name, piece in pieces.items() if homes[piece.home]}


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
