"""Plan of a GGUF file: every tensor of the artifact, its name and number type there, and what that changes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from export.gguf import families, grids
from export.gguf.options import GgufOptions
from export.source import Source, dtype_name
from export.target import Conversion, merged
from runtime import formats
from runtime.errors import RequestError
from runtime.formats.k_quant import KQuant
from runtime.formats.scheme import GridScheme, Scheme

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
DENSE = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Planned:
    """One tensor of the file.

    Attributes:
        name: in the file.
        parameter: in the artifact, such as `model.layers.0.mlp.up_proj.weight`.
        module: of a compressed weight; None where the artifact stores the tensor as it is.
        shape: rows and columns, or one length.
        type: GGUF's number type.
        heads: rows are permuted for this many heads; None: they keep their order.
        why: for compressed weights: the sentence of the conversion.
        exact: no weight changes.
        anew: the weight is rounded anew to `type` (its codes are not kept).
        before: bytes in the artifact.
    """

    name: str
    parameter: str
    module: str | None
    shape: tuple[int, ...]
    type: str
    heads: int | None
    why: str = ""
    exact: bool = True
    anew: bool = False
    before: int = 0

    @property
    def bytes(self) -> int:
        """Size of the stored tensor, bytes."""
        count = math.prod(self.shape)
        if self.type in DTYPES:
            return count * DTYPES[self.type].itemsize
        return grids.stored_bytes(count, self.type)


def plan(source: Source, options: GgufOptions) -> Iterator[Planned]:
    """All tensors of the file, in its order. Reads scales and zero points, no codes (but those of asymmetric int8).

    Raises:
        RequestError: a layer's grid is not one of GGUF's, and `requantize` was not asked for.
    """
    checkpoint = source.artifact.checkpoint
    for parameter, name in families.names(source).items():
        assert name is not None  # families.why_not
        heads = families.heads_of(source, name)
        module = parameter.rpartition(".")[0]
        if module in source.entries and parameter.endswith(".weight"):
            found, before = _compressed(source, module, options), source.module_bytes(module)
            yield Planned(name, parameter, module, source.shapes[module], found[0], heads, *found[1:], before)
            continue
        if not checkpoint.has(parameter):
            continue  # tied: llama.cpp takes the embedding where there is no output.weight
        if parameter in source.tied and _repeats(source, parameter):
            continue
        shape = checkpoint.shape(parameter)
        kind = "F32" if len(shape) == 1 else _dense_type(options, checkpoint.dtype(parameter))
        yield Planned(name, parameter, None, shape, kind, heads, before=checkpoint.nbytes(parameter))


def why_not(source: Source, options: GgufOptions) -> str | None:
    """What schemes alone tell: groups that cut through the blocks."""
    if options.requantize:
        return None
    for module, entry in source.entries.items():
        scheme, columns = entry.scheme.grid, source.shapes[module][1]
        if _blocked(scheme, columns) and scheme is not None and not grids.aligned(scheme, columns):
            return (
                f"{module} has groups of {scheme.group_size}, and GGUF's blocks of {grids.BLOCK} weights have one scale; "
                "allowed are multiples of 32, or --requantize"
            )
    return None


def _repeats(source: Source, parameter: str) -> bool:
    """Whether a stored tensor that config.json ties is the one it is tied to."""
    twin, checkpoint = source.tied[parameter], source.artifact.checkpoint
    if not checkpoint.has(twin):
        return False
    if torch.equal(checkpoint.get(parameter), checkpoint.get(twin)):
        return True
    raise RequestError(
        f"config.json of {source.path} ties {parameter} to {twin}, and the artifact stores two different tensors; "
        "set tie_word_embeddings to false, or store one"
    )


def _blocked(scheme: GridScheme | None, columns: int) -> bool:
    """Whether the weights go into blocks at all."""
    return scheme is not None and scheme.type == "int" and columns % grids.BLOCK == 0


def _compressed(source: Source, module: str, options: GgufOptions) -> tuple[str, str, bool, bool]:
    """(type, sentence, exact, rounded anew) of one compressed module."""
    scheme, columns = source.entries[module].scheme, source.shapes[module][1]
    if isinstance(scheme.weights, KQuant):
        kind = scheme.weights.kind
        return kind, f"{kind} blocks are copied as they are", True, False
    weights, dense = scheme.grid, _dense_type(options, source.dtype)
    as_stored = DENSE.get(source.dtype) == dense
    words = f"dense {dense}" + ("" if as_stored else f", rounded from {dtype_name(source.dtype)}")
    exact = as_stored or dense == "F32"
    if weights is None:
        return dense, f"{scheme.sparsity or 'sparse'} float weights become {words}, zeros stored", exact, False
    grid = _describe(scheme)
    if not _blocked(weights, columns):
        reason = "GGUF has no float8" if weights.type == "float" else "rows are no multiple of 32"
        what = f"{grid} weights become {words} ({reason}): the values the artifact has in that type"
        return dense, what, exact, False
    if not grids.aligned(weights, columns):
        kind = grids.nominal_type(weights)
        return kind, f"{grid} weights in groups of {weights.group_size} are rounded anew to {kind}", False, True
    scale, zero = grid_of(source, module)
    kind = grids.block_type(weights)
    finite = scale.to(torch.float16).isfinite()
    if not bool(finite.all()):
        raise RequestError(f"{module} has a scale of {float(scale[~finite][0]):g}; GGUF's are fp16, 65504 at most")
    kept = grids.scale_fits(scale)
    if not kept and not options.requantize:
        worst = scale.flatten()[(scale.to(torch.float16).float() != scale.float()).flatten()][0]
        raise RequestError(
            f"{module} has scales that fp16 does not hold, such as {float(worst):.9g}, and GGUF's scales are fp16; "
            "--requantize rounds them and reports the loss"
        )
    if zero is not None and weights.bits == 4:
        fits = grids.scale_fits(grids.minimum(scale, zero))
        if options.asymmetric == "q4_1" or (options.asymmetric == "auto" and fits):
            kind, kept = "Q4_1", kept and fits
    if zero is not None and weights.bits == 8 and not grids.codes_fit(source.weight(module), kind):
        if not options.requantize:
            raise RequestError(
                f"{module} is asymmetric int8 with codes more than 128 from their zero point, which Q8_0 has no room for; "
                "--requantize rounds them anew and reports the loss"
            )
        return kind, f"{grid} weights are rounded anew to {kind}", False, True
    size = f"groups of {weights.group_size}" if weights.strategy == "group" else f"one scale a {weights.strategy}"
    what = f"{grid} weights, {size}, become {kind}: the same codes in blocks of 32 with their group's scale in fp16"
    if not kept:
        what += f", {'minima' if kind == 'Q4_1' and grids.scale_fits(scale) else 'scales'} rounded to fp16"
    if scheme.sparsity:
        what += "; pruned weights are stored as zeros"
    return kind, what, kept, False


def grid_of(source: Source, module: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale and zero point (int8, of the scale's shape) as stored; the codes are not read."""
    entry, checkpoint = source.entries[module], source.artifact.checkpoint
    assert entry.scheme.grid is not None
    names = ("weight_scale",) if entry.scheme.grid.symmetric else ("weight_scale", "weight_zero_point")
    tensors = {name: checkpoint.get(f"{module}.{name}") for name in names}
    return tensors["weight_scale"], formats.get(entry.format).zero_point(tensors, entry.scheme.grid)


def conversions(source: Source, tensors: list[Planned]) -> list[Conversion]:
    """What the file has in another way than the artifact, one entry a kind of change."""
    result = merged(_changes(source, tensors))
    turned = tuple(t.parameter for t in tensors if t.heads is not None)
    if turned:
        what = "rows of q and k are put in the order of llama.cpp's rotary embedding"
        result.append(Conversion(what, turned, bytes=0))
    quantized = tuple(m for m, entry in source.entries.items() if entry.scheme.activations is not None)
    if quantized:
        what = (
            "inputs of layers are not rounded to the artifact's activation grid, which GGUF cannot say: llama.cpp computes "
            "with the same weights and activations of its own choice"
        )
        result.append(Conversion(what, quantized, bytes=0))
    return result


def _changes(source: Source, tensors: list[Planned]) -> Iterator[Conversion]:
    for tensor in tensors:
        grown = tensor.bytes - tensor.before
        if tensor.module is not None:
            yield Conversion(tensor.why, (tensor.module,), tensor.exact, grown)
            continue
        dtype = source.artifact.checkpoint.dtype(tensor.parameter)
        if tensor.type != DENSE.get(dtype):
            vector = len(tensor.shape) == 1
            what = "norms and biases" if vector else "uncompressed matrices"
            why = ", which llama.cpp computes them in" if vector else ""
            what = f"{what} of {dtype_name(dtype)} become {tensor.type}{why}"
            yield Conversion(what, (tensor.parameter,), tensor.type == "F32", grown)


def _describe(scheme: Scheme) -> str:
    weights = scheme.grid
    assert weights is not None
    sparse = f"{scheme.sparsity} " if scheme.sparsity else ""
    if weights.type == "float":
        return f"{sparse}float8"
    return f"{sparse}{'symmetric' if weights.symmetric else 'asymmetric'} int{weights.bits}"


def _dense_type(options: GgufOptions, dtype: torch.dtype) -> str:
    return DENSE.get(dtype, "F32") if options.dense == "auto" else options.dense.upper()
