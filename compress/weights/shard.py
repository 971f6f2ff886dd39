"""Shard of compressed and copied tensors: written, read back, and recorded tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from compress.core.files import disk_errors, sha256, written_beside
from compress.model.source import SourceCheckpoint
from compress.weights.block import BlockResult
from compress.weights.packed_layer import SolvedLayer, weight_digest
from runtime.checkpoint.headers import TensorEntry, read_header
from runtime.errors import CompressError
from runtime.formats.quantization_config import entry_to_dict


def write_shard(
    path: Path, source: SourceCheckpoint, names: list[str], changed: dict[str, torch.Tensor], result: BlockResult
) -> dict[str, Any]:
    """Write a shard, read it back, and return its record.

    Args:
        path: of the shard.
        names: source tensors that belong to this part; each of them ends as compressed or copied; none is dropped.
        changed: tensors whose values a transform changed (norms, biases), by name; also tensors the source did not store.
        result: solved layers, and layers the recipe named that were left as they are.
    """
    layers, skipped = result.layers, result.skipped
    tensors: dict[str, torch.Tensor] = {}
    account: dict[str, Any] = {}
    own, wholes = set(names), _wholes(source, names, changed, layers)
    # Tensors that the source does not store were tied to others.
    for name in dict.fromkeys([*names, *changed, *(f"{module}.weight" for module in layers)]):
        module, tied = name.rpartition(".")[0], name not in own
        before = 0 if tied else source.nbytes(name)
        if name.endswith(".weight") and module in layers:
            home = source.published_module(module)
            stored = {f"{home}.{key}": value.contiguous().cpu() for key, value in layers[module].tensors.items()}
            entry = _entry("compressed", stored, before, format=layers[module].entry.format)
        elif name in wholes:
            stored = {wholes[name]: tensors[wholes[name]] if wholes[name] in tensors else source.whole(name)}
            entry = _entry("copied", stored, before) | {"bytes_after": before}
        else:
            value = changed[name] if name in changed else source.get(name)
            stored = {source.published(name): value.contiguous().cpu()}
            entry = _entry("copied", stored, before)
        if tied:
            entry["reason"] = "was tied"
        elif module in skipped and entry["action"] == "copied":
            entry["reason"] = skipped[module]
        elif name in changed:
            entry["reason"] = "took the scale of the layers that read it"
        tensors |= stored
        account[name] = entry

    with disk_errors(f"writing {path}"), written_beside(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    verify_shard(path, tensors, {source.published_module(name): layer for name, layer in layers.items()})
    return {
        "shard": path.name,
        "sha256": sha256(path),
        "bytes": path.stat().st_size,
        "tensors": account,
        "stored": {name: _bytes({name: value}) for name, value in sorted(tensors.items())},
        "layers": [layer.record for layer in layers.values()],
        "entries": {name: entry_to_dict(layer.entry) for name, layer in layers.items()},
        "digests": {name: layer.digest for name, layer in layers.items()},
    }


def _entry(action: str, stored: dict[str, torch.Tensor], before: int, **more: str) -> dict[str, Any]:
    """The account of one tensor of the source."""
    return {
        "action": action, "stored_as": sorted(stored), "bytes_before": before, "bytes_after": _bytes(stored), **more,
    }  # fmt: skip


def _wholes(
    source: SourceCheckpoint, names: list[str], changed: dict[str, torch.Tensor], layers: dict[str, SolvedLayer]
) -> dict[str, str]:
    """{tensor of an expert: the one of all experts that is copied in its stead}, where no expert of a layer has changed."""
    touched = {name.rpartition(".")[0] for name in changed} | layers.keys()
    homes: dict[str, bool] = {}
    for name in source.expert_tensors.keys() & set(names):
        home = source.expert_tensors[name].home
        homes[home] = homes.get(home, True) and name.rpartition(".")[0] not in touched
    pieces = {name: source.expert_tensors[name] for name in names if name in source.expert_tensors}
    return {name: piece.source.name for name, piece in pieces.items() if homes[piece.home]}


def verify_shard(path: Path, tensors: dict[str, torch.Tensor], layers: dict[str, SolvedLayer]) -> None:
    """Load-back gate of one shard: what the disk gives is what was written, and unpacks to the weights that were solved."""
    entries = read_header(path).tensors
    with safe_open(path, framework="pt") as file:
        if set(file.keys()) != set(tensors):
            raise CompressError(f"{path} does not hold the tensors that were written to it")
        for name in tensors.keys() - {f"{home}.{key}" for home, layer in layers.items() for key in layer.tensors}:
            if not _is_stored(entries[name], tensors[name]):
                raise CompressError(f"{path}: tensor {name} read back from the disk is not the one that was written")
        for name, layer in layers.items():
            stored = {key: file.get_tensor(f"{name}.{key}") for key in layer.tensors}
            if weight_digest(layer.unpacked(stored)) != layer.digest:
                raise CompressError(f"{path}: layer {name} read back from the disk is not the weight that was solved")


#: Bytes of a copied tensor that are read back at a time: not by mmap, whose pages would count as memory of the process.
_READ_BACK = 2**24


def _is_stored(entry: TensorEntry, tensor: torch.Tensor) -> bool:
    """Whether a file has this tensor, bit for bit."""
    if (entry.dtype, entry.shape) != (tensor.dtype, tuple(tensor.shape)):
        return False
    with entry.file.open("rb") as stream:
        stream.seek(entry.offset)
        return all(stream.read(len(part)) == part for part in _pieces(tensor))


def _pieces(tensor: torch.Tensor) -> Iterator[bytes]:
    whole = tensor.reshape(-1).view(torch.uint8)
    return (part.numpy().tobytes() for part in (whole.split(_READ_BACK) if len(whole) else ()))


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())
