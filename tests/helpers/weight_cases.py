"""Random compressed weights and small checkpoints made of them, for the tests of formats, kernels and loaders."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from runtime import formats
from runtime.formats.quantization_config import ModuleEntry, build
from runtime.formats.scheme import CompressedWeight, GridScheme, Scheme

FLOAT8 = torch.float8_e4m3fn


def random_mask(
    sparsity: str | None, shape: tuple[int, int], seed: int = 0, density: float = 0.5
) -> torch.Tensor | None:
    """A mask of the pattern; unstructured ones have a row pruned away whole and one kept whole."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = shape
    if sparsity is None:
        return None
    if sparsity == "unstructured":
        mask = torch.rand(shape, generator=generator) < density
        mask[0] = False
        mask[-1] = True
        return mask
    if sparsity.startswith("block:"):
        height, width = (int(v) for v in sparsity.removeprefix("block:").split("x"))
        blocks = torch.rand(-(-rows // height), -(-columns // width), generator=generator) < density
        return blocks.repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :columns]
    kept, of = (int(v) for v in sparsity.split(":"))
    order = torch.rand(rows, columns // of, of, generator=generator).argsort(-1).argsort(-1)
    return (order < kept).view(shape)


def random_weight(
    scheme: Scheme,
    shape: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    mask: torch.Tensor | None = None,
) -> CompressedWeight:
    """A weight whose codes use the whole grid, zeros in kept places included."""
    generator = torch.Generator().manual_seed(seed + 1)
    weights, columns = scheme.weights, shape[1]
    mask = random_mask(scheme.sparsity, shape, seed) if mask is None else mask
    if weights is None:
        values = torch.randn(shape, generator=generator).to(dtype)
        return CompressedWeight(values if mask is None else values * mask, None, None, mask, scheme, dtype)
    if type(weights) is not GridScheme:
        dense = torch.randn(shape, generator=generator) * (1 if mask is None else mask)
        dense = dense.bfloat16() if weights.lossless else dense
        parameters = weights.fit(dense, dtype)
        return CompressedWeight.of(weights.round(dense, parameters), parameters, mask, scheme, dtype)
    grid = (1,) if weights.strategy == "tensor" else (shape[0], weights.groups(columns))
    scale = (torch.rand(grid, generator=generator) * 0.1 + 0.01).to(dtype)
    if weights.type == "float":
        values = (torch.randn(shape, generator=generator) * 100).clamp(-448, 448)
        values = (values if mask is None else values * mask).to(FLOAT8)
        return CompressedWeight(values, scale, None, mask, scheme, dtype)
    low, high = weights.code_range
    values = torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int8)
    zero = None
    if not weights.symmetric:
        zero = torch.randint(low, high + 1, grid, generator=generator, dtype=torch.int8)
    if mask is not None:
        empty = torch.zeros(1, dtype=torch.int8) if zero is None else weights.spread(zero, columns)
        values = torch.where(mask, values, empty)
    return CompressedWeight(values, scale, zero, mask, scheme, dtype)


def hostile_weights(rows: int, columns: int) -> torch.Tensor:
    """Rows of very different size, of zeros, with a group of zeros, one outlier, numbers that underflow, and of one sign."""
    weight = torch.randn(rows, columns) * torch.logspace(-4, 1, rows)[:, None]
    weight[1] = 0
    weight[2, :32] = 0
    weight[3, 5] = 300.0
    weight[4] = 1e-39
    weight[5] = weight[5].abs()
    weight[6] = -weight[6].abs()
    return weight


def int_scheme(bits: int, symmetric: bool = True, group: int | str = "channel", sparsity: str | None = None) -> Scheme:
    """Weight-only integer scheme; `group` is a size, "channel" or "tensor"."""
    if isinstance(group, str):
        return Scheme(GridScheme(bits, "int", symmetric, group), None, sparsity)  # type: ignore[arg-type]
    return Scheme(GridScheme(bits, "int", symmetric, "group", group), None, sparsity)


def quantize(dense: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> CompressedWeight:
    """Round-to-nearest of a real matrix, so that a model made of the result still computes something sensible."""
    shape = (dense.shape[0], dense.shape[1])
    mask = random_mask(scheme.sparsity, shape)
    dense = dense.float() if mask is None else dense.float() * mask
    weights = scheme.weights
    if weights is None:
        return CompressedWeight(dense.to(dtype), None, None, mask, scheme, dtype)
    width = weights.group_size if weights.strategy == "group" and weights.group_size else shape[1]
    groups = -(-shape[1] // width)
    parts = torch.nn.functional.pad(dense, (0, groups * width - shape[1])).view(shape[0], groups, width)
    grouped = GridScheme(weights.bits, weights.type, weights.symmetric, "group", width)
    if weights.type == "float":
        scale = (parts.abs().amax(-1) / 448).to(dtype)
        values = (dense / grouped.spread(scale.float(), shape[1])).clamp(-448, 448).to(FLOAT8)
        return CompressedWeight(values, scale, None, mask, scheme, dtype)
    low, high = weights.code_range
    if weights.symmetric:
        scale, zero = (parts.abs().amax(-1) / high).to(dtype), None
        codes = dense / grouped.spread(scale.float(), shape[1])
    else:
        smallest, largest = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scale = ((largest - smallest) / (high - low)).to(dtype)
        zero = (low - smallest / scale.float()).round().clamp(low, high)
        codes = dense / grouped.spread(scale.float(), shape[1]) + grouped.spread(zero, shape[1])
    values = codes.round().clamp(low, high).to(torch.int8)
    if zero is not None:
        zero = zero.to(torch.int8)
        if mask is not None:
            values = torch.where(mask, values, grouped.spread(zero, shape[1]))
    return CompressedWeight(values, scale, zero, mask, scheme, dtype)


def write_checkpoint(
    directory: Path,
    model: torch.nn.Module,
    schemes: dict[str, Scheme],
    dtype: torch.dtype,
    input_scale: float | None = None,
) -> dict[str, torch.Tensor]:
    """Store `model` (a transformers causal LM) with the named modules compressed; {module: dequantized weight}."""
    from safetensors.torch import save_file

    stored = {name: value.contiguous() for name, value in model.state_dict().items()}
    dense, entries = {}, {}
    for name, scheme in schemes.items():
        weight = quantize(stored.pop(f"{name}.weight"), scheme, dtype)
        storage = formats.choose(scheme, (weight.values.shape[0], weight.values.shape[1]))
        scale = None if input_scale is None else torch.tensor([input_scale], dtype=dtype)
        tensors = storage.pack(weight, input_scale=scale)
        stored |= {f"{name}.{key}": value for key, value in tensors.items()}
        entries[name] = ModuleEntry(scheme, storage.name, storage.stored_count(tensors))
        dense[name] = weight.dequantize()
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    config = model.config.to_dict() | {
        "architectures": [type(model).__name__],
        "dtype": str(dtype).removeprefix("torch."),
        "quantization_config": build(entries, linear),
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return dense
