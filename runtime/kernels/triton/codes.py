"""Functions that several kernels share: words of neighbouring tiles, codes as floats, slices of a weight, the second pass of split-K."""

from __future__ import annotations

import torch

from runtime.kernels.triton.jit import cdiv, entry, jit, kernel_constant, tl
from runtime.kernels.triton.layout import BLOCK
from runtime.kernels.triton.tables import INTERPRETED, entry_slice, look_up

ONE = 0x3F800000  # the bits of 1.0
FACTORS = kernel_constant(BLOCK)


@jit
def tile_words(base, last, N, rows, BLOCK_N: tl.constexpr, TILES: tl.constexpr):
    """Words of `rows` in the tiles `[*, N, 16]` from `base` on, `[BLOCK_N, TILES, 16]`; tiles after the one at `last` repeat it.

    Loaded with tiles and words as one dimension, so that threads spread over both before they take another row: each then keeps
    several rows, and uses the activations that it holds for all of them.
    """
    column = tl.arange(0, TILES * 16)
    here = tl.minimum(column // 16, last) * N * 16 + column % 16
    words = tl.load(base + rows[:, None] * 16 + here[None, :], eviction_policy="evict_first")
    return tl.reshape(words, [BLOCK_N, TILES, 16])


@jit
def code_plus(words, one, j: tl.constexpr, FIELD: tl.constexpr):
    """Field `j` of int32 words as the float32 `1 + u * 2^(place - 23)`, `place` where the code lies: one LOP3.

    The code is the mantissa of a number under the exponent of 1; a conversion from integer would cost twice as much, and `value *
    2^(23 - place) - c` is one exact FMA. `one` is `ONE` as an argument of the kernel: a constant would make two instructions,
    since LOP3 takes one immediate.
    """
    if FIELD * (j + 1) > 23:  # would reach into the exponent
        bits = (words >> 9) & (((1 << FIELD) - 1) << (FIELD * j - 9))
    else:
        bits = words & (((1 << FIELD) - 1) << (FIELD * j))
    return (bits | one).to(tl.float32, bitcast=True)


@jit
def code_minus(words, one, zero, j: tl.constexpr, FIELD: tl.constexpr, CODES: tl.constexpr):
    """Field `j` of int32 words as a float32, exactly, by a LOP3 and an FMA: `u - 2^(FIELD-1) - zero` of integers, `u - zero` under a
    minimum; floats as they are."""
    if CODES == "float":
        return code_tiny(words, j, FIELD, CODES) * 2.0 ** (126 if FIELD == 4 else 120)
    else:
        factor = 2.0 ** (23 - FIELD * j + (9 if FIELD * (j + 1) > 23 else 0))
        middle = 0 if CODES == "minimum" else 1 << (FIELD - 1)
        return code_plus(words, one, j, FIELD) * factor - (zero + (factor + middle))


@jit
def code_tiny(words, j: tl.constexpr, FIELD: tl.constexpr, CODES: tl.constexpr):
    """Field `j` of int32 words as the subnormal float32 `u * 2^(place - 149)` with `place` where the code lies, or, of a float e2m1
    (4 bits) or e4m3 (8 bits), as 2^-126 or 2^-120 of it.

    Masked in place, a code is the mantissa of a subnormal number: one AND, no conversion, exact, and as fast as any float. The
    factor is taken back in the other operand, so that products are `x * code * 2^-73` (`scale_for_tiny`). A float goes to the top of the
    word and back, its sign with it: exponent and mantissa, which may be subnormal, become the lowest of a float32.
    """
    if CODES == "float":
        top = words << (32 - FIELD * (j + 1))
        if FIELD == 4:
            return ((top >> 6) & -0x7E400000).to(tl.float32, bitcast=True)  # bits 31 and 24 to 22
        else:
            small = ((top >> 4) & -0x78100000).to(tl.float32, bitcast=True)  # bits 31 and 26 to 20
            return tl.where(((words >> (FIELD * j)) & 127) == 127, float("nan"), small)
    else:
        if FIELD * (j + 1) > 23:  # would reach into the exponent
            moved = words >> 9
        else:
            moved = words
        return (moved & (((1 << FIELD) - 1) << (FIELD * j - (9 if FIELD * (j + 1) > 23 else 0)))).to(
            tl.float32, bitcast=True
        )


@jit
def scale_for_tiny(x, j: tl.constexpr, FIELD: tl.constexpr, CODES: tl.constexpr):
    """Activations, scaled so that products with `code_tiny` are `x * code * 2^-73`, far from both ends of float32."""
    if CODES == "float":
        return x * 2.0 ** (53 if FIELD == 4 else 47)
    elif CODES == "table":
        return scale_for_tiny(x, j % 4, 8, "integer")
    else:
        return x * 2.0 ** (76 - FIELD * j + (9 if FIELD * (j + 1) > 23 else 0))


@jit
def load_scale(at):
    """Scales at pointers, as float32: of any float dtype, of e8m0 (uint8), or of e4m3 (int8: GPUs before sm_89 have no float8)."""
    stored = tl.load(at)
    if at.dtype.element_ty == tl.uint8:
        return tl.maximum(stored.to(tl.int32) << 23, 1 << 22).to(tl.float32, bitcast=True)  # 0 is the subnormal 2^-127
    elif at.dtype.element_ty == tl.int8:
        bits = stored.to(tl.int32)
        size = ((bits << 20) & -0x78100000).to(tl.float32, bitcast=True) * 2.0**120
        return tl.where((bits & 127) == 127, float("nan"), size)
    else:
        return stored.to(tl.float32)


@jit
def over_global_scale(value, scale, global_scale):
    """Float32 `value` over the global scale at the pointer `global_scale` where scales are e4m3 (as int8); else as it is."""
    if scale.dtype.element_ty == tl.int8:
        return tl.div_rn(value, tl.zeros_like(value) + tl.load(global_scale))
    else:
        return value


@jit
def _mantissas(words, dtype: tl.constexpr):
    """Codes `u` of 4 bits, the lowest of both halves of int32 words, as mantissas: two floats `2^7 + u` (bfloat16) or `2^10 + u` (float16).

    One LOP3. Written as two operations it is two: ptxas fuses them where at most one constant takes part, and an argument of the kernel
    instead would keep the compiler from loading words in the layout of an operand.
    """
    if INTERPRETED:
        return (words & 0x000F000F) | (0x43004300 if dtype == tl.bfloat16 else 0x64006400)
    elif dtype == tl.bfloat16:  # (a & b) | c
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000f000f, 0x43004300, 0xea;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000f000f, 0x64006400, 0xea;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )


@jit
def multiply_add(a, b, c):
    """`a b + c` of bfloat16 or float16 `[rows, columns]`, one rounding; `b` and `c` are representable in it and may have one row or column.

    Two numbers an instruction, which the compiler does not find for sm_80. The interpreter rounds twice, unless float32 holds `a b + c`,
    as it does here.
    """
    b, c = tl.broadcast_to(b.to(a.dtype), a.shape), tl.broadcast_to(c.to(a.dtype), a.shape)
    if INTERPRETED:
        return (a.to(tl.float32) * b.to(tl.float32) + c.to(tl.float32)).to(a.dtype)
    elif a.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.float16, is_pure=True, pack=2
        )


@jit
def code_slice(w, zero, table, j: tl.constexpr, FIELD: tl.constexpr, CODES: tl.constexpr, dtype: tl.constexpr):
    """Slice `j` of words `[rows, 16]`: codes minus `zero` `[rows]`, or entries of `table`, exactly, `[rows, 16]` in `dtype`.

    Codes of 4 bits become pairs of 16-bit floats. Two neighbouring words give two whose halves are neighbouring columns, of slices 0 to 3
    and of 4 to 7: two instructions for 16 codes. Then a pair takes a shift, a LOP3 and an FMA (of floats: two shifts, two LOP3).
    """
    tl.static_assert(CODES != "minimum" or dtype == tl.float32)
    if CODES == "table" and dtype != tl.float32:
        return entry_slice(w, table, j, dtype)
    elif CODES == "table":
        return code_minus(look_up(w, table, j), 0x3F800000, 0.0, j % 4, 8, "integer").to(dtype)
    elif FIELD == 4 and dtype != tl.float32:
        even, odd = tl.split(tl.reshape(w, [w.shape[0], 8, 2]))
        if j < 4:
            pairs = (even & 0xFFFF) | (odd << 16)
        else:
            pairs = ((even >> 16) & 0xFFFF) | (odd & -65536)
        # A float's sign and size go to the top of each half, its size on to the low bits of the exponent and the top of the mantissa.
        if CODES == "float":
            pairs = pairs << (12 - 4 * (j % 4))
            if dtype == tl.bfloat16:
                pairs = (pairs & -0x7FFF8000) | ((pairs >> 6) & 0x01C001C0)  # of 2^-126
            else:
                pairs = (pairs & -0x7FFF8000) | ((pairs >> 3) & 0x0E000E00)  # of 2^-14
        else:
            pairs = _mantissas(pairs >> (4 * (j % 4)), dtype)
        halves = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
        value = tl.reshape(halves, [w.shape[0], 16]).to(dtype, bitcast=True)
        if CODES == "float":
            factor: tl.constexpr = 2.0**126 if dtype == tl.bfloat16 else 2.0**14
            return multiply_add(value, tl.full([1, 1], factor, tl.float32), tl.full([1, 1], -0.0, tl.float32))
        else:
            base: tl.constexpr = -136.0 if dtype == tl.bfloat16 else -1032.0
            return multiply_add(value, tl.full([1, 1], 1.0, tl.float32), (base - zero)[:, None])
    else:
        # `ONE`: as an argument of the kernel it would keep the compiler from loading words in the layout of an operand.
        return code_minus(w, 0x3F800000, zero[:, None], j, FIELD, CODES).to(dtype)


@jit
def load_grids(scale, zero, group, rows, N, groups, GROUP: tl.constexpr, ASYMMETRIC: tl.constexpr):
    """Scales and zero points or minima (or 0.0), float32, of `group` and `rows`, int tensors that broadcast against each other.

    int16 scales are those of `layout.pack_products`, with the minima among them.
    """
    at = rows + group * N
    if scale.dtype.element_ty == tl.int16:
        pair = tl.load(scale + at).to(tl.int32)
        factor = scale + rows + (groups + group // (FACTORS // GROUP)) * N
        s = tl.load(factor).to(tl.float16, bitcast=True).to(tl.float32) * ((pair << 24) >> 24).to(tl.float32)
        z = tl.zeros_like(s)
        if ASYMMETRIC:
            least = tl.load(factor + groups // (FACTORS // GROUP) * N).to(tl.float16, bitcast=True)
            z = least.to(tl.float32) * (pair >> 8).to(tl.float32)
    else:
        s = load_scale(scale + at)
        z = tl.zeros_like(s)
        if ASYMMETRIC:
            z = tl.load(zero + at).to(tl.float32)
    return s, z


@jit
def load_grid(scale, zero, owned, column, N, groups, GROUP: tl.constexpr, ASYMMETRIC: tl.constexpr):
    """Scales and zero points or minima (or 0.0), float32 `[rows]`, of the group that `column` lies in."""
    group = tl.cast(0, tl.int64)
    if GROUP != 0:
        group = tl.cast(tl.minimum(column // GROUP, groups - 1), tl.int64)
    return load_grids(scale, zero, group, owned, N, groups, GROUP, ASYMMETRIC)


@jit
def dequantize_slice(
    w, s, z, table, j: tl.constexpr, FIELD: tl.constexpr, CODES: tl.constexpr, kind: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Slice `j` of words `[rows, 16]`, less zero points `z`, times scales `s` `[rows]` that are stored as `kind`: `[rows, 16]`; or times
    scales, less minima `z`.

    The rounded product, or of float32 scales the rounded float32 product; where `kind` is None, unscaled and exact.
    """
    HELD: tl.constexpr = kind == dtype or kind == tl.int8 or (kind == tl.uint8 and dtype == tl.bfloat16)
    if kind is None:
        return code_slice(w, z, table, j, FIELD, CODES, dtype)
    elif CODES == "minimum":
        return (code_slice(w, tl.zeros_like(z), table, j, FIELD, CODES, tl.float32) * s[:, None] - z[:, None]).to(dtype)
    elif HELD and dtype != tl.float32:
        return multiply_add(
            code_slice(w, z, table, j, FIELD, CODES, dtype), s[:, None], tl.full([1, 1], -0.0, tl.float32)
        )
    else:
        return (code_slice(w, z, table, j, FIELD, CODES, tl.float32) * s[:, None]).to(dtype)


@jit
def dequantize_slices(
    w, s, z, table, first: tl.constexpr, COUNT: tl.constexpr, FIELD: tl.constexpr, CODES: tl.constexpr, kind: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """`COUNT` slices from `first` on, a power of two of them, side by side: `[rows, 16 COUNT]`."""
    if COUNT == 1:
        return dequantize_slice(w, s, z, table, first, FIELD, CODES, kind, dtype)
    else:
        half: tl.constexpr = COUNT // 2
        return beside(
            dequantize_slices(w, s, z, table, first, half, FIELD, CODES, kind, dtype),
            dequantize_slices(w, s, z, table, first + half, half, FIELD, CODES, kind, dtype),
        )


@jit
def dequantize_groups(
    w, scale, zero, table, owned, column, N, groups, first: tl.constexpr, COUNT: tl.constexpr,
    GROUP: tl.constexpr, FIELD: tl.constexpr, CODES: tl.constexpr, RUN: tl.constexpr, ASYMMETRIC: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """`COUNT` runs of `RUN` slices from run `first` on, each under its own scale, side by side; `column` is the tile's first."""
    if COUNT == 1:
        s, z = load_grid(scale, zero, owned, column + first * (RUN * 16), N, groups, GROUP, ASYMMETRIC)
        return dequantize_slices(w, s, z, table, first * RUN, RUN, FIELD, CODES, scale.dtype.element_ty, dtype)
    else:
        half: tl.constexpr = COUNT // 2
        left = dequantize_groups(
            w, scale, zero, table, owned, column, N, groups, first, half, GROUP, FIELD, CODES, RUN, ASYMMETRIC, dtype
        )
        right = dequantize_groups(
            w,
            scale,
            zero,
            table,
            owned,
            column,
            N,
            groups,
            first + half,
            half,
            GROUP,
            FIELD,
            CODES,
            RUN,
            ASYMMETRIC,
            dtype,
        )
        return beside(left, right)


@jit
def beside(left, right):
    """Two blocks `[rows, columns]` as one of twice the columns."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), [left.shape[0], 2 * left.shape[1]])


@jit
def own_block(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows and columns of a product `[M, N]` that program `program_id(0)` computes. Programs in bands of 8 blocks of rows, so that those
    running together share both operands in the L2 cache."""
    blocks_m, blocks_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (8 * blocks_n)
    height = tl.minimum(blocks_m - band * 8, 8)
    inside = tl.program_id(0) % (8 * blocks_n)
    m = (band * 8 + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    return m, (inside // height) * BLOCK_N + tl.arange(0, BLOCK_N)


@jit
def store_part(out, y, m, n, M, N):
    """Store rows `m` and columns `n` of part `program_id(1)` of a product `[M, N]`."""
    out += tl.cast(tl.program_id(1), tl.int64) * M * N
    target = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(target, y.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@entry
def _sum_parts(parts, bias, out, MN, N, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < MN
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(PARTS):
        total += tl.load(parts + tl.cast(part, tl.int64) * MN + at, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def sum_parts(parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Second pass of split-K: float32 `[parts, M, N]` summed in order (so results repeat bit for bit), plus bias `[N]`."""
    count, block = out.numel(), 1024
    if count:
        _sum_parts[(cdiv(count, block),)](
            parts,
            bias if bias is not None else parts,
            out,
            count,
            out.shape[-1],
            parts.shape[0],
            bias is not None,
            block,
        )
    return out


def row_major(x: torch.Tensor) -> torch.Tensor:
    """`x` if its rows are dense, else a copy: the kernels take any distance between rows."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
