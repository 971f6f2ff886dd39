"""Compressed checkpoints made from random weights, one for every scheme."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import save
from weight_cases import random_mask

from runtime import formats
from runtime.formats.block_float import BlockFloat
from runtime.formats.dfloat11 import DFloat11
from runtime.formats.input_transform import ORDER, InputTransform
from runtime.formats.k_quant import KQuant
from runtime.formats.quantization_config import ModuleEntry, build
from runtime.formats.row_codebook import RowCodebook
from runtime.formats.scheme import ActivationScheme, CompressedWeight, GridScheme, Scheme
from runtime.formats.ternary_dictionary import TernaryDictionary
from runtime.formats.trellis import Trellis
from runtime.modeling.skeleton import linear_shapes

BATCH = torch.randint(2, 400, (2, 9), generator=torch.Generator().manual_seed(1))

SCHEMES = {
    "pack-quantized": Scheme(GridScheme(4, group_size=32)),
    "int-quantized": Scheme(GridScheme(8, strategy="channel"), ActivationScheme()),
    "float-quantized": Scheme(GridScheme(8, "float", strategy="channel"), ActivationScheme(8, "float")),
    "packed": Scheme(GridScheme(3, symmetric=False, group_size=40)),
    "sparse24": Scheme(GridScheme(4, group_size=32), sparsity="2:4"),
    "bitmap": Scheme(None, sparsity="unstructured"),
    "mxfp4-pack-quantized": Scheme(BlockFloat(4)),
    "mxfp8-quantized": Scheme(BlockFloat(8)),
    "nvfp4-pack-quantized": Scheme(BlockFloat(4, group_size=16, scales="e4m3")),
    "k_quant": Scheme(KQuant("IQ4_NL")),
    "trellis": Scheme(Trellis(32)),
    "row_codebook": Scheme(RowCodebook(4, None, 0.01)),
    "ternary_dictionary": Scheme(TernaryDictionary(0.7)),
    "dfloat11": Scheme(DFloat11()),
}


def random_basis(transform: InputTransform, columns: int, name: str) -> dict[str, torch.Tensor]:
    """Matrices of an input transform, neither orthogonal nor symmetric, or a random order: those of layers of one input (or of all, where
    the transform is called "same") are equal."""
    name = "" if transform.name == "same" else name
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    found = {}
    for key, spec in transform.tensors(columns).items():
        size = spec.shape[0]
        if key == ORDER:
            found[key] = torch.randperm(size, generator=generator).to(spec.dtype)
            continue
        spread = torch.linalg.qr(torch.randn(size, size, generator=generator)).Q
        found[key] = (
            (spread + 0.2 * torch.randn(size, size, generator=generator) / size**0.5).to(spec.dtype).contiguous()
        )
    return found


def nearest(weight: torch.Tensor, scheme: Scheme) -> CompressedWeight:
    """Round to nearest; zeros where the pattern wants them."""
    dtype, mask = weight.dtype, None
    if scheme.sparsity == "2:4":
        order = weight.abs().reshape(weight.shape[0], -1, 4).argsort(-1, descending=True)
        mask = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order[..., :2], True).reshape(weight.shape)
    elif scheme.sparsity == "unstructured":
        mask = weight.abs() > weight.abs().median()
    elif scheme.sparsity is not None:
        mask = random_mask(scheme.sparsity, (weight.shape[0], weight.shape[1]))
    if mask is not None:
        weight = weight * mask
    grid = scheme.weights
    if grid is None:
        return CompressedWeight(weight, None, None, mask, scheme, dtype)
    if type(grid) is not GridScheme:
        weight = weight.bfloat16() if grid.lossless else weight
        parameters = grid.fit(weight.float(), dtype)
        return CompressedWeight.of(grid.round(weight.float(), parameters), parameters, mask, scheme, dtype)
    size = grid.group_size or weight.shape[1]
    chunks = weight.float().split(size, dim=1)
    low = torch.stack([c.amin(1).clamp(max=0) for c in chunks], 1)
    high = torch.stack([c.amax(1).clamp(min=0) for c in chunks], 1)
    index = torch.arange(weight.shape[1]) // size
    if grid.type == "float":
        scale = (torch.maximum(-low, high) / 448).to(dtype)
        values = (weight.float() / scale.float()[:, index]).clamp(-448, 448).to(torch.float8_e4m3fn)
        return CompressedWeight(values, scale, None, mask, scheme, dtype)
    smallest, largest = grid.code_range
    zero = None
    if grid.symmetric:
        scale = (torch.maximum(-low, high) / largest).clamp(min=1e-6).to(dtype)
        codes = weight.float() / scale.float()[:, index]
    else:
        scale = ((high - low) / (largest - smallest)).to(dtype)
        zero = (smallest - low / scale.float()).round().clamp(smallest, largest).to(torch.int8)
        codes = weight.float() / scale.float()[:, index] + zero.float()[:, index]
    return CompressedWeight(codes.round().clamp(smallest, largest).to(torch.int8), scale, zero, mask, scheme, dtype)


def compress(model: Any, path: Path, choose: Any) -> dict[str, CompressedWeight]:
    """Write `model` as an artifact; `choose(name)` gives (format, scheme) or None. Returns the compressed weights."""
    save(model, path)
    tensors = load_file(path / "model.safetensors")
    entries, weights = {}, {}
    for name, module in model.named_modules():
        chosen = choose(name)
        if chosen is None:
            continue
        storage, scheme = formats.get(chosen[0]), chosen[1]
        transposed = type(module).__name__ == "Conv1D"
        dense, turned = module.weight.data.T.contiguous() if transposed else module.weight.data, scheme.transform
        basis = {} if turned is None else random_basis(turned, dense.shape[1], name.rpartition(".")[0])
        weight = nearest(dense if turned is None else turned.to_weight(dense, basis).to(dense.dtype), scheme)
        tensors.pop(f"{name}.weight", None)
        packed = storage.pack(weight) | basis
        tensors |= {f"{name}.{key}": value for key, value in packed.items()}
        entries[name] = ModuleEntry(scheme, chosen[0], storage.stored_count(packed))
        weights[name] = weight
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = build(entries, list(linear_shapes(model)))
    (path / "config.json").write_text(json.dumps(config))
    return weights


def inside_blocks(storage: str) -> Any:
    return lambda name: (storage, SCHEMES[storage]) if name.endswith("_proj") else None
