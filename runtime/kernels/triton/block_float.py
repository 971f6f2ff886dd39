"""Block-float inputs: rounding (float4 or float8 codes, an e8m0 or e4m3 scale a group), and a block-scaled product with such weights.

Blackwell for data centers (sm_100) multiplies codes on block-scaled tensor cores. On other GPUs, and for few rows, inputs are rounded and
dequantized, which gives the reference's inputs bit for bit, and go through the kernels for unquantized inputs.
"""

from __future__ import annotations

import torch

from runtime.formats.block_float import BlockFloat
from runtime.formats.scheme import ActivationScheme
from runtime.kernels.triton import gpu, layout, tuning
from runtime.kernels.triton.codes import over_global_scale, own_block, row_major, store_part
from runtime.kernels.triton.jit import cdiv, entry, jit, tl
from runtime.kernels.triton.split_k import split_k
from runtime.kernels.triton.tuning import Config
from runtime.kernels.triton.w8a8 import magnitude

LEAST_ROWS = 65  #: From which tensor cores multiply codes: fewer do not fill them.


@jit
def round_float(value, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    """Nearest float with `MANTISSA` stored bits of mantissa and least normal number `2^LEAST`, ties to even; float32, not clamped.

    Adding and subtracting 1.5 times a power of two rounds to the last bit of the sum. GPUs before sm_89 cannot convert to float8.
    """
    exponent = tl.maximum((value.to(tl.int32, bitcast=True) >> 23) & 255, LEAST + 127)
    large = (((exponent + (23 - MANTISSA)) << 23) | (1 << 22)).to(tl.float32, bitcast=True)
    return (value + large) - large


@jit
def power_of_two(largest, LIMIT: tl.constexpr, dtype: tl.constexpr):
    """Scales e8m0 of groups with these largest magnitudes, as float32: `runtime.kernels.activations._power_of_two`.

    `LIMIT`: exponent (of `frexp`) of the largest code.
    """
    # A quarter of the mantissa more carries into the exponent from 7/4 on.
    exponent = ((largest.to(tl.int32, bitcast=True) + (1 << 21)) >> 23) + (1 - LIMIT)
    s = tl.maximum(exponent << 23, 1 << 22).to(tl.float32, bitcast=True)  # the least is the subnormal 2^-127
    s = tl.where(largest == 0, 2.0**-LIMIT, s).to(dtype).to(tl.float32)
    return tl.where(largest < float("inf"), tl.where(s == 0, 1.0, s), float("nan"))


@jit
def bits_of(code, BITS: tl.constexpr):
    """Float32 numbers that are e2m1 (4 bits) or e4m3 (8 bits), as int32 with the bits of those: the inverse of `codes.code_tiny`."""
    if BITS == 4:
        small = (code * 2.0**-126).to(tl.int32, bitcast=True)
        return ((small >> 28) & 8) | ((small >> 22) & 7)
    else:
        small = (code * 2.0**-120).to(tl.int32, bitcast=True)
        return ((small >> 24) & 128) | ((small >> 20) & 127)


@jit
def pairs_of_bytes(w):
    """The 4-bit fields of words `[rows, 16]` as int32 `[rows, 8, 2]` of two fields a byte: byte `b` of word `(v, p)` holds columns
    `16 (2 b + p) + v` and, above it, `16 (2 b + p) + v + 8`."""
    low, high = tl.split(tl.permute(tl.reshape(w, [w.shape[0], 2, 8]), (0, 2, 1)))
    even = (low & 0x0F0F0F0F) | ((high & 0x0F0F0F0F) << 4)
    return tl.join(even, ((low >> 4) & 0x0F0F0F0F) | (high & -0x0F0F0F10))


@jit
def bytes_of_tile(w, FIELD: tl.constexpr):
    """Words `[rows, 16]` of a tile as uint8 `[rows, 64]`, blocks of 16 columns one after another: 8-bit fields in the order of the columns,
    4-bit ones with columns `v` and `v + 8` of a block as byte `v` of 8."""
    if FIELD == 4:
        w = pairs_of_bytes(w)
    a, b = (w & 255).to(tl.uint8), ((w >> 8) & 255).to(tl.uint8)
    c, d = ((w >> 16) & 255).to(tl.uint8), ((w >> 24) & 255).to(tl.uint8)
    every = tl.join(tl.join(a, b), tl.join(c, d))
    if FIELD == 4:
        return tl.reshape(tl.permute(every, (0, 4, 3, 2, 1)), [w.shape[0], 64])
    else:
        return tl.reshape(tl.permute(every, (0, 3, 2, 1)), [w.shape[0], 64])


@entry
def round_inputs_kernel(
    x, global_scale, out, scale, stride, K, groups,
    BITS: tl.constexpr, GLOBAL_SCALE: tl.constexpr, GROUP: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.cast(tl.program_id(0), tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], (group < groups)[:, None]
    value = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    limit = 6.0 if BITS == 4 else 448.0
    largest = tl.max(magnitude(value), 1)
    # Rounded to the dtype of x where the reference is.
    if GLOBAL_SCALE:
        over = tl.load(global_scale)
        stored = tl.div_rn(largest, tl.zeros_like(largest) + limit).to(x.dtype.element_ty).to(tl.float32) * over
        stored = round_float(tl.minimum(stored, 448.0), 3, -6)
        stored = tl.where(stored == 0, 0.125, stored)
        numbers = tl.max((value != value).to(tl.int32), 1) == 0  # infinities saturate
        s = tl.where(numbers, tl.div_rn(stored, tl.zeros_like(stored) + over), float("nan"))
        code = tl.div_rn(value, tl.zeros_like(value) + s[:, None])
        byte = tl.where(numbers, bits_of(stored, 8), 127)
    else:
        s = power_of_two(largest, 3 if BITS == 4 else 9, x.dtype.element_ty)
        code = tl.div_rn(value, tl.zeros_like(value) + s[:, None]).to(x.dtype.element_ty).to(tl.float32)
        byte = (s.to(tl.int32, bitcast=True) >> 23) & 255
    code = tl.minimum(tl.maximum(code, -limit), limit)
    code = round_float(code, 1, 0) if BITS == 4 else round_float(code, 3, -6)
    if CODES:
        tl.store(scale + row * groups + group, byte.to(scale.dtype.element_ty), mask=group < groups)
        bits = bits_of(code, BITS)
        if BITS == 4:
            both = tl.reshape(bits, [BLOCK, GROUP // 16, 2, 8])
            low, high = tl.split(tl.permute(both, (0, 1, 3, 2)))
            bits = tl.reshape(low | (high << 4), [BLOCK, GROUP // 2])
        size: tl.constexpr = GROUP * BITS // 8
        place = group[:, None] * size + tl.arange(0, size)[None, :]
        tl.store(out + row * (groups * size) + place, bits.to(tl.uint8), mask=inside)
    else:
        tl.store(out + row * K + at, (code * s[:, None]).to(x.dtype.element_ty), mask=inside)


def _round(
    x: torch.Tensor,
    scheme: ActivationScheme,
    global_scale: torch.Tensor | None,
    out: torch.Tensor,
    scale: torch.Tensor | None,
) -> None:
    (rows, columns), group = x.shape, scheme.group_size
    assert group is not None
    assert (global_scale is not None) == (scheme.scales == "e4m3")
    if rows:
        groups, block = columns // group, max(1, 1024 // group)
        round_inputs_kernel[(rows, cdiv(groups, block))](
            x, x if global_scale is None else global_scale, out, out if scale is None else scale, x.stride(0), columns, groups,
            BITS=scheme.bits, GLOBAL_SCALE=global_scale is not None, GROUP=group, CODES=scale is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip


def round_inputs(x: torch.Tensor, scheme: ActivationScheme, global_scale: torch.Tensor | None = None) -> torch.Tensor:
    """`x` `[M, K]` float16 or bfloat16, rounded to codes and back. Reference: `runtime.kernels.activations.fake_quantize`.

    Args:
        scheme: floats with a scale of e8m0 or e4m3 for each group, whose size is a power of two.
        global_scale: float32 `[1]`, what e4m3 scales are divided by.
    """
    x = row_major(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _round(x, scheme, global_scale, out, None)
    return out


def quantize(
    x: torch.Tensor, scheme: ActivationScheme, global_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of `round_inputs`, uint8 `[M, K]`, of 4 bits `[M, K / 2]` in the order of `bytes_of_tile`, and scales `[M, K / group]`, uint8
    (e8m0) or int8 (the bits of e4m3)."""
    x = row_major(x)
    (rows, columns), group = x.shape, scheme.group_size
    assert group is not None
    codes = torch.empty(rows, columns * scheme.bits // 8, dtype=torch.uint8, device=x.device)
    dtype = torch.uint8 if global_scale is None else torch.int8
    scale = torch.empty(rows, columns // group, dtype=dtype, device=x.device)
    _round(x, scheme, global_scale, codes, scale)
    return codes, scale


@entry
def block_float_kernel(
    x, x_scale, x_global_scale, words, scale, global_scale, bias, out,
    M, N, K, tiles, groups,
    FIELD: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    m, n = own_block(M, N, BLOCK_M, BLOCK_N)
    row, owned, word = tl.minimum(m, M - 1).to(tl.int64), tl.minimum(n, N - 1), tl.arange(0, 16)
    length = K * FIELD // 8  # bytes of a row of x; a tile has 64
    blocks: tl.constexpr = 512 // FIELD // GROUP
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    share = tl.cdiv(tiles, SPLIT_K)
    first = tl.program_id(1) * share
    for t in tl.range(first, tl.minimum(first + share, tiles), num_stages=STAGES):
        w = tl.load(words + tl.cast(t, tl.int64) * N * 16 + owned[:, None] * 16 + word[None, :])
        at, group = t * 64 + tl.arange(0, 64), t * blocks + tl.arange(0, blocks)
        a = tl.load(x + row[:, None] * length + at[None, :], mask=(at < length)[None, :], other=0)
        inside = (group < groups)[None, :]
        of_rows = tl.load(x_scale + row[:, None] * groups + group[None, :], mask=inside, other=0)
        of_columns = tl.load(scale + group.to(tl.int64)[None, :] * N + owned[:, None], mask=inside, other=0)
        if scale.dtype.element_ty == tl.int8:
            of_rows, of_columns = of_rows.to(tl.float8e4nv, bitcast=True), of_columns.to(tl.float8e4nv, bitcast=True)
        b = tl.trans(bytes_of_tile(w, FIELD))
        if FIELD == 4:
            sums = tl.dot_scaled(a, of_rows, "e2m1", b, of_columns, "e2m1", sums)
        else:
            left, right = a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True)
            sums = tl.dot_scaled(left, of_rows, "e4m3", right, of_columns, "e4m3", sums)
    sums = over_global_scale(over_global_scale(sums, scale, x_global_scale), scale, global_scale)
    if HAS_BIAS:
        sums += tl.load(bias + owned).to(tl.float32)[None, :]
    store_part(out, sums, m, n, M, N)


def multiplies_codes(device: torch.device, rows: int, weights: BlockFloat, inputs: ActivationScheme) -> bool:
    """Whether tensor cores of the device (sm_100 and its relatives) multiply these block floats, and rows are so many that it pays."""
    alike = (weights.bits, weights.group_size, weights.scales) == (inputs.bits, inputs.group_size, inputs.scales)
    return alike and rows >= LEAST_ROWS and gpu.capability(device)[0] == 10


def configurations(rows: int, weight: layout.Weight) -> list[Config]:
    """Launches worth trying, the default first. The tensor cores want 128 rows."""
    chosen = [(128, 128, 1, 8, 3), (128, 64, 1, 4, 4), (128, 128, 2, 8, 3), (128, 64, 2, 4, 4)]
    names, tiles = ("BLOCK_M", "BLOCK_N", "SPLIT_K", "num_warps", "STAGES"), weight.words.shape[0]
    return [dict(zip(names, each, strict=True)) for each in chosen if each[2] <= tiles]


def product(
    codes: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None, weight: layout.Weight, dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Product of block floats -> `[M, N]` in `dtype`. Scales of e4m3 have no sign, as in NVFP4.

    Args:
        codes, scale: of `quantize`, with the bits and groups of the weight.
        global_scale: float32 `[1]`, what e4m3 scales of the inputs are divided by.
        weight: floats `[N, K]`.
    """
    rows, (n, columns) = codes.shape[0], weight.shape

    def launch(config: Config, target: torch.Tensor, bias: torch.Tensor | None) -> None:
        blocks = cdiv(rows, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"])
        block_float_kernel[(blocks, config["SPLIT_K"])](
            codes, scale, scale if global_scale is None else global_scale, *weight.operands, scale if bias is None else bias, target,
            rows, n, columns, weight.words.shape[0], weight.scale.shape[0],
            FIELD=weight.field, GROUP=weight.group, HAS_BIAS=bias is not None, **config,
        )  # fmt: skip

    key = (*weight.key, tuning.row_class(rows))
    out = torch.empty(rows, n, dtype=dtype, device=codes.device)
    return split_k("block_float", key, codes, out, bias, configurations(rows, weight), launch)
