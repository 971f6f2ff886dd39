"""Products with the C library itself, the same in float64, and how far apart they may be."""

from __future__ import annotations

import ctypes
import platform
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from weight_cases import random_weight

from runtime import formats
from runtime.formats.bitpack import unpack_rows
from runtime.formats.block_float import BlockFloat
from runtime.formats.float8_block import Float8Block
from runtime.formats.k_quant import KINDS, KQuant
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.row_codebook import RowCodebook
from runtime.formats.scheme import ActivationScheme, CompressedWeight, GridScheme, Scheme
from runtime.formats.trellis import Trellis, window_values, windows
from runtime.kernels import Layer
from runtime.kernels.cpu import library, panels
from runtime.kernels.cpu.codebooks import CODEBOOKS
from runtime.kernels.cpu.sparse24 import S24
from runtime.layers.compressed_linear import CompressedLinear
from runtime.system import native

HERE = Path(__file__).parent
CPU = torch.device("cpu")
LAYOUTS = {
    "w4": panels.W4,
    "w8": panels.W8,
    "s24": S24,
    "e2m1": panels.FP4,
    "k": panels.K_QUANTS,
    "t": panels.TRELLIS,
    "c": CODEBOOKS,
}  # of codes up to 4 bits, up to 8, 2:4, 4-bit floats, block types of GGUF, trellises, row codebooks
FLOATS = {"mxfp4": Scheme(BlockFloat(4)), "nvfp4": Scheme(BlockFloat(4, group_size=16, scales="e4m3"))}
K_QUANTS = {kind: Scheme(KQuant(kind)) for kind in KINDS}
TRELLISES = [Scheme(Trellis(group)) for group in (16, 48, 512)]
ROW_CODEBOOKS = [
    Scheme(RowCodebook(*fields))
    for fields in ((2,), (3, 48), (4, None, 0.02), (2, 16, 0.05), (4, 512), (3, None, 0.01))
]
MXFP8 = Scheme(BlockFloat(8))
BLOCKS = Scheme(Float8Block())
#: {multiple of columns: schemes of activations too}
ROUNDED = {
    32: (
        Scheme(GridScheme(8, "int", True, "channel"), ActivationScheme(outliers=0.5)),
        Scheme(GridScheme(4, "int", False, "group", 32), ActivationScheme(symmetric=False)),
        Scheme(GridScheme(4, "int", True, "group", 32), ActivationScheme(8, "float")),
        Scheme(GridScheme(8, "float", True, "channel"), ActivationScheme(8, "float")),
        Scheme(BlockFloat(4), ActivationScheme(4, "float", strategy="group", group_size=32, scales="e8m0")),
    ),
    64: (
        Scheme(
            GridScheme(4, "int", True, "group", 32), ActivationScheme(4, strategy="group", group_size=32, int8_tail=32)
        ),
    ),
    128: (BLOCKS, Scheme(Float8Block(), ActivationScheme(8, "float", strategy="group", group_size=128))),
}
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of rounding, relative
TINY = {
    torch.float32: 2.0**-149,
    torch.bfloat16: 2.0**-133,
    torch.float16: 2.0**-24,
}  # distance of the smallest numbers


def emulated(*instruction_sets: str) -> ctypes.CDLL:
    """The kernels for these together, their intrinsics in plain C; not optimized, since compilers take minutes over it otherwise."""
    headers = [HERE / f"emulated_{name}.h" for name in instruction_sets]
    flags = ["-O0", "-ffp-contract=off", "-DCOMPRESS_EMULATED"]
    flags += ["-mno-avx512f"] if platform.machine().lower() in ("x86_64", "amd64") else []
    for header in headers:  # the names of libraries hold the flags, and so what is in a header
        flags += ["-include", str(header), f"-DEMULATION_{zlib.crc32(header.read_bytes())}"]
    loaded = native.library(library.SOURCE, (tuple(flags),))
    assert loaded is not None
    library.declare(loaded)
    return loaded


@dataclass
class Case:
    """A stored layer in one panel layout."""

    layer: Layer
    weight: CompressedWeight
    stored: dict[str, torch.Tensor]
    layout: panels.Panels
    prepared: dict[str, torch.Tensor]


def case(
    kind: str, scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype, seed: int = 0, storage: str | None = None
) -> Case:
    """A random layer of the scheme; `storage` is the format, or the one the artifact would have."""
    weight = random_weight(scheme, shape, dtype, seed)
    return of(kind, weight, storage)


def of(kind: str, weight: CompressedWeight, storage: str | None = None) -> Case:
    """The layer of this weight."""
    shape = weight.shape
    form = formats.get(storage) if storage else formats.choose(weight.scheme, shape)
    tensors = form.pack(weight)
    entry = ModuleEntry(weight.scheme, form.name, form.stored_count(tensors))
    layer, layout = Layer(entry, shape, weight.dtype, CPU), LAYOUTS[kind]
    assert layout.why_not(layer) is None
    return Case(layer, weight, tensors, layout, layout.pack(tensors, layer))


def whole(scheme: Scheme, columns: int) -> int:
    """At least so many columns, of which trellises and codebooks want whole groups."""
    size = scheme.weights.group_size or 1 if isinstance(scheme.weights, Trellis | RowCodebook) else 1
    return -(-columns // size) * size


def in_digits(made: Case, digits: int, bias: torch.Tensor | None = None) -> library.Linear:
    """The layer for C, its activations in so many digits; the case and the bias must outlive it."""
    found = made.layout.linear(made.prepared, made.layer, bias)
    found.digits = digits
    return found


def run(
    kernels: ctypes.CDLL, made: Case, x: torch.Tensor, digits: int, threads: int = 1, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x W^T + bias` by `kernels`, in the dtype of x."""
    return multiply(kernels, in_digits(made, digits, bias), x, threads)


def dense(weight: torch.Tensor, bias: torch.Tensor | None = None, scale: torch.Tensor | None = None) -> library.Linear:
    """A weight `[out, in]` as it is; it, the bias and the scales of rows (float32) must outlive what is returned."""
    kind = library.FLOAT8 if weight.dtype == torch.float8_e4m3fn else library.TYPES[weight.dtype]
    linear = library.Linear(kind=library.KINDS["dense"], weight_type=kind)
    linear.scale = None if scale is None else scale.data_ptr()
    linear.rows, linear.columns = weight.shape
    linear.weight, linear.bias = weight.data_ptr(), None if bias is None else bias.data_ptr()
    return linear


def multiply(kernels: ctypes.CDLL, linear: library.Linear, x: torch.Tensor, threads: int = 1) -> torch.Tensor:
    """What `kernels` makes of x `[rows, in]`, in its dtype."""
    x = x.contiguous()
    y = torch.full((x.shape[0], linear.rows), float("nan"), dtype=x.dtype)
    memory = torch.full((kernels.linear_memory(ctypes.byref(linear), x.shape[0]),), 0x5A, dtype=torch.uint8)
    kind = library.TYPES[x.dtype]
    address = ctypes.byref(linear)
    kernels.linear_run(address, x.data_ptr(), kind, x.shape[0], y.data_ptr(), kind, memory.data_ptr(), threads)
    return y


def exact_weight(weight: CompressedWeight) -> torch.Tensor:
    """`(code - zero) * scale` in float64."""
    scheme, columns = weight.scheme.weights, weight.values.shape[1]
    if isinstance(scheme, KQuant):
        terms = k_terms(weight)
        return terms[0] - terms[1]
    if isinstance(scheme, BlockFloat):
        own = weight.parameters
        scale = (
            own["scale"].double() / own["global_scale"].double()
            if "global_scale" in own
            else 2.0 ** (own["scale"].double() - 127)
        )
        return weight.values.double() / 2 * scheme.spread(scale, columns)
    if isinstance(scheme, Trellis):
        numbers = windows(weight.values.flatten(), window_values().double()).T.reshape(weight.shape)
        return numbers * weight.parameters["scale"].double().repeat_interleave(scheme.group_size, 1)
    if isinstance(scheme, RowCodebook):
        return codebook_weight(weight, scheme)
    assert weight.scale is not None
    codes = weight.values.double()
    if weight.zero_point is not None:
        codes = codes - scheme.spread(weight.zero_point, columns).double()
    return codes * scheme.spread(weight.scale, columns).double()


def codebook_weight(weight: CompressedWeight, scheme: RowCodebook) -> torch.Tensor:
    """Row after row, as the tensors on disk say it."""
    tensors = scheme.encode(weight.values, weight.parameters)
    codes = unpack_rows(tensors["weight_packed"], scheme.bits, weight.shape[1]).long() + 2 ** (scheme.bits - 1)
    scale = tensors["weight_scale"].double()
    found = torch.stack([row[numbers] for row, numbers in zip(tensors["weight_levels"].double(), codes, strict=True)])
    found *= scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1)
    if scheme.outliers:
        places = tensors["weight_outlier_columns"].long() % (1 << 16)
        for row, columns, values in zip(found, places, tensors["weight_outliers"].double(), strict=True):
            row[columns] = values
    return found


def k_terms(weight: CompressedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """What a weight of k-quants is the difference of, scaled codes and minima, in float64."""
    grid, columns = weight.scheme.weights, weight.values.shape[1]
    assert isinstance(grid, KQuant)
    own = {name: grid.spread(p.double(), columns) for name, p in grid.products(weight.parameters).items()}
    return weight.values.double() * own["scale"], own.get("zero_point", torch.zeros(()).double()).expand(weight.shape)


def error_bound(made: Case, x: torch.Tensor, digits: int, exact: torch.Tensor) -> torch.Tensor:
    """What a result may be off by, for each number of it.

    Activations are rounded to a step of their group: amax / 127, 2^-14 and 2^-22 of amax (the step's half is the error). Sums in
    float32 round once a group and digit. Then the result is rounded to its dtype.
    """
    group = made.layout.group(made.layer)
    share = {1: 1 / 254, 2: 2.0**-15, 3: 2.0**-22.9}[digits]
    wide = -(-x.shape[1] // group) * group
    inputs = torch.nn.functional.pad(x.double().abs(), (0, wide - x.shape[1])).view(x.shape[0], wide // group, group)
    weight = exact_weight(made.weight)
    terms = (weight, *(k_terms(made.weight) if isinstance(made.weight.scheme.weights, KQuant) else (weight,)))
    weights, *parts = (
        torch.nn.functional.pad(term.abs(), (0, wide - x.shape[1])).unflatten(1, (-1, group)).sum(-1) for term in terms
    )
    added = torch.stack(parts).sum(0)  # in float32, one after the other
    largest = inputs.amax(-1)
    rounding = (largest * share * (1 + 2.0**-20)).clamp(min=2.0**-126) * (largest > 0) @ weights.t()
    groups = inputs.shape[1]
    # A step of the smallest float times a sum of up to 2^24, for every group and digit: products of tiny scales.
    sums = (2 * groups * digits + 4) * 2.0**-24 * (largest @ added.t()) + groups * digits * 2.0**-126
    total = rounding + sums
    return total + UNIT[x.dtype] * (exact.abs() + total) + TINY[x.dtype]


def linear(
    scheme: Scheme, shape=(40, 192), dtype=torch.bfloat16, storage=None, weight=None
) -> tuple[CompressedLinear, CompressedWeight]:
    """A layer of the scheme with a random bias, not prepared yet, and its weight."""
    weight = random_weight(scheme, shape, dtype) if weight is None else weight
    form = formats.get(storage) if storage else formats.choose(scheme, shape)
    tensors = form.pack(weight)
    entry = ModuleEntry(scheme, form.name, form.stored_count(tensors))
    return CompressedLinear.from_tensors(entry, shape, tensors, torch.randn(shape[0]).to(dtype), dtype), weight
