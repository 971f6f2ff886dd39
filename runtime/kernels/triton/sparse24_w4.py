"""2:4 sparse 4-bit weights at decoding: a matrix-vector product that reads the two kept codes of each quad and four bits of position.

At groups of 128 that is 3.125 bits a weight instead of 4.125. Positions are decompressed in registers: the four activations of a
quad are loaded for all rows, and each row picks two of them with selects (a gather out of the cache or shared memory would be
bound by its lanes). Words are laid out as in `layout.py`, over the kept codes, in an order such that word `w` of a tile holds both
codes of four quads and 16 bits beside it hold their positions:

- a tile is 256 columns, 64 quads; quad `i * 16 + w` (i < 4) has its codes in fields `2 i` and `2 i + 1` of word `w`;
- `positions` int32 `[tiles, ceil(N / 2), 16]`: nibble `i` of word `w`, of row `2 r` in the low half and of row `2 r + 1` in the
  high one (so that values and positions are read by the same threads, 16 bytes each). Bits 0 and 1 say that the first code is
  column 0, column 1 of the quad (neither: 2); bits 2 and 3 that the second is column 3, column 2 (neither: 1).

Many rows dequantize into a scratch matrix for cuBLAS, or for sparse tensor cores where those were measured to be faster. Measure
before preferring it to dense int4 for speed: it saves a quarter of the bytes and costs about twice the instructions a kept weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from runtime.kernels.triton import layout, semi_structured, tuning
from runtime.kernels.triton.codes import ONE, code_minus, code_tiny, row_major, tile_words
from runtime.kernels.triton.jit import cdiv, entry, jit, tl
from runtime.kernels.triton.split_k import product, vector_configurations, widest_split
from runtime.kernels.triton.tuning import Config

COLUMNS = 256  # of a tile
MAXIMUM_ROWS = 4  # each row is a pass over the weight, later ones out of the L2 cache


@dataclass(frozen=True)
class Sparse24Weight(layout.Weight):
    """A weight whose words hold the kept codes, 4 bits each, with `positions` int32 `[tiles, ceil(N / 2), 16]` beside them.

    K is a multiple of 4, `group` a multiple of 64 or 0.
    """

    positions: torch.Tensor = field(kw_only=True)

    @property
    def tile(self) -> int:
        """Columns of one tile."""
        return COLUMNS

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """Words, positions, scales and zero points as kernels take them."""
        words, *grids = super().operands
        return words, self.positions, *grids

    @property
    def constants(self) -> dict[str, int | bool | str]:
        """What the matrix-vector product is compiled for."""
        return {
            "GROUP": self.group,
            "RUN": layout.slices_per_group(self.group, 4, 64),
            "ASYMMETRIC": self.zero is not None,
        }


def pack(
    codes: torch.Tensor, first: torch.Tensor, second: torch.Tensor, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and positions of a `Sparse24Weight`.

    Args:
        codes: the kept ones, int8 `[N, K / 2]`.
        first, second: their columns inside the quad, `[N, K / 4]`, in order.
        columns: K.
    """
    rows, tiles = codes.shape[0], -(-columns // COLUMNS)
    spare = tiles * 64 - columns // 4  # quads that fill up the last tile: code 0, positions 0 and 1
    pairs = torch.nn.functional.pad(codes.view(rows, -1, 2), (0, 0, 0, spare)).view(rows, tiles, 4, 16, 2)
    values = layout.pack(pairs.transpose(3, 4).reshape(rows, -1), 4)
    a = torch.nn.functional.pad(first.to(torch.int32), (0, spare))
    b = torch.nn.functional.pad(second.to(torch.int32), (0, spare), value=1)
    bits = (a == 0).int() | (a == 1).int() << 1 | (b == 3).int() << 2 | (b == 2).int() << 3
    shifts = torch.arange(0, 16, 4, device=codes.device, dtype=torch.int32)
    words = (bits.view(rows, tiles, 4, 16) << shifts[:, None]).sum(2)
    words = torch.nn.functional.pad(words, (0, 0, 0, 0, 0, rows % 2)).view(-1, 2, tiles, 16)
    high = (words[:, 1] + 0x8000) % 0x10000 - 0x8000  # signed, so that the shifted number fits
    return values, (words[:, 0] | high << 16).to(torch.int32).transpose(0, 1).contiguous()


def unpack(weight: Sparse24Weight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inverse of `pack`: kept codes int8 `[N, K / 2]` and their columns inside the quad, int64 `[N, K / 4]` each."""
    (rows, columns), tiles = weight.shape, weight.words.shape[0]
    pairs = layout.unpack(weight.words, 4, tiles * 128).view(rows, tiles, 4, 2, 16).transpose(3, 4)
    codes = pairs.reshape(rows, -1)[:, : columns // 2].contiguous()
    shifts = torch.arange(0, 16, 4, device=codes.device)
    both = weight.positions.transpose(0, 1).long()
    halves = torch.stack([both & 0xFFFF, both >> 16 & 0xFFFF], dim=1).flatten(0, 1)[:rows]  # [rows, tiles, 16]
    bits = (halves.unsqueeze(2) >> shifts[:, None] & 15).reshape(rows, -1)[:, : columns // 4]
    first = torch.where(bits & 1 > 0, 0, torch.where(bits & 2 > 0, 1, 2))
    second = torch.where(bits & 4 > 0, 3, torch.where(bits & 8 > 0, 2, 1))
    return codes, first, second


@jit
def _load(x, k, K, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(x + k).to(tl.float32)[None, :, :]
    # K is a multiple of 4: a quad is inside or outside as a whole.
    return tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)[None, :, :]


@jit
def _bit(bits, place: tl.constexpr):
    return (bits & (1 << place)) != 0


@jit
def _pairs(w, bits, i: tl.constexpr, x0, x1, x2, x3, part, total):
    """Add quad `i` of every word: products to `part`, the activations met to `total`.

    Codes are subnormal floats, see matvec.py; the activations `[1, tiles, 16]`, common to all rows, get the factor 2^(76 - place).
    """
    fa = 2.0 ** (76 - 8 * i + (9 if 8 * i + 4 > 23 else 0))
    fb = 2.0 ** (76 - 8 * i - 4 + (9 if 8 * i + 8 > 23 else 0))
    a = tl.where(_bit(bits, 4 * i), x0 * fa, tl.where(_bit(bits, 4 * i + 1), x1 * fa, x2 * fa))
    b = tl.where(_bit(bits, 4 * i + 2), x3 * fb, tl.where(_bit(bits, 4 * i + 3), x2 * fb, x1 * fb))
    part += code_tiny(w, 2 * i, 4, "integer") * a
    part += code_tiny(w, 2 * i + 1, 4, "integer") * b
    total += a * (1.0 / fa)
    total += b * (1.0 / fb)
    return part, total


@jit
def _finish(sums, out, bias, n, N, HAS_BIAS: tl.constexpr):
    y = tl.sum(tl.sum(sums, 2), 1)
    if HAS_BIAS:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < N)


@jit
def _scaled(part, total, scale, zero, grid, ASYMMETRIC: tl.constexpr):
    z = 8.0
    if ASYMMETRIC:
        z = tl.load(zero + grid).to(tl.float32)[:, :, None] + 8.0
    return (part * 9444732965739290427392.0 - total * z) * tl.load(scale + grid).to(tl.float32)[:, :, None]  # 2^73


@entry
def sparse24_kernel(
    x, values, positions, scale, zero, bias, out,
    stride, M, N, K, tiles, groups,
    GROUP: tl.constexpr, RUN: tl.constexpr, ASYMMETRIC: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr, TILES: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    # Rows 2 r and 2 r + 1 share their position words. Past the end rows repeat the last one and are not stored.
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)) * 2
    owned_a, owned_b = tl.minimum(n, N - 1), tl.minimum(n + 1, N - 1)
    pairs = (N + 1) // 2
    pair = tl.minimum(n // 2, pairs - 1)
    tile, word = tl.arange(0, TILES), tl.arange(0, 16)
    x += tl.cast(tl.program_id(2), tl.int64) * stride
    sum_a = tl.zeros([BLOCK_N, TILES, 16], tl.float32)
    sum_b = tl.zeros([BLOCK_N, TILES, 16], tl.float32)
    steps = tl.cdiv(tiles, TILES)
    share = tl.cdiv(steps, SPLIT_K)
    first = tl.program_id(1) * share
    for step in range(first, tl.minimum(first + share, steps)):
        at = step * TILES + tile
        if not EVEN_K:
            at = tl.minimum(at, tiles - 1)  # tiles past the end: their activations are masked
        hop = tl.cast(step, tl.int64) * TILES * 16
        last = tiles - 1 - step * TILES
        bits_a = tile_words(positions + hop * pairs, last, pairs, pair, BLOCK_N, TILES)
        bits_b = bits_a >> 16
        w_a = tile_words(values + hop * N, last, N, owned_a, BLOCK_N, TILES)
        w_b = tile_words(values + hop * N, last, N, owned_b, BLOCK_N, TILES)
        for run in tl.static_range(4 // RUN):
            part_a = tl.zeros([BLOCK_N, TILES, 16], tl.float32)
            total_a, part_b, total_b = part_a, part_a, part_a
            for i in tl.static_range(RUN):
                k = (step * TILES + tile)[:, None] * 256 + (run * RUN + i) * 64 + word[None, :] * 4
                x0, x1 = _load(x, k, K, EVEN_K), _load(x, k + 1, K, EVEN_K)
                x2, x3 = _load(x, k + 2, K, EVEN_K), _load(x, k + 3, K, EVEN_K)
                part_a, total_a = _pairs(w_a, bits_a, run * RUN + i, x0, x1, x2, x3, part_a, total_a)
                part_b, total_b = _pairs(w_b, bits_b, run * RUN + i, x0, x1, x2, x3, part_b, total_b)
            if GROUP == 0:
                group = tile[None, :] * 0
            else:
                group = tl.minimum((at * 256 + run * RUN * 64) // GROUP, groups - 1)[None, :] * N
            sum_a += _scaled(part_a, total_a, scale, zero, group + owned_a[:, None], ASYMMETRIC)
            sum_b += _scaled(part_b, total_b, scale, zero, group + owned_b[:, None], ASYMMETRIC)
    out += (tl.cast(tl.program_id(1), tl.int64) * M + tl.program_id(2)) * N
    _finish(sum_a, out, bias, n, N, HAS_BIAS)
    _finish(sum_b, out, bias, n + 1, N, HAS_BIAS)


@entry
def expand_kernel(
    values, positions, scale, zero, out, N, K, groups, one,
    GROUP: tl.constexpr, ASYMMETRIC: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    owned, word = tl.minimum(n, N - 1), tl.arange(0, 16)
    w = tl.load(values + tl.cast(t, tl.int64) * N * 16 + owned[:, None] * 16 + word[None, :])
    both = tl.load(positions + tl.cast(t, tl.int64) * ((N + 1) // 2) * 16 + (owned // 2)[:, None] * 16 + word[None, :])
    bits = both >> (owned % 2 * 16)[:, None]
    for i in tl.static_range(4):
        at = owned
        if GROUP != 0:
            at = owned + tl.cast(tl.minimum((t * 256 + i * 64) // GROUP, groups - 1), tl.int64) * N
        z = 0.0
        if ASYMMETRIC:
            z = tl.load(zero + at).to(tl.float32)[:, None]
        s = tl.load(scale + at).to(tl.float32)[:, None]
        a = code_minus(w, one, z, 2 * i, 4, "integer") * s
        b = code_minus(w, one, z, 2 * i + 1, 4, "integer") * s
        a0, a1 = _bit(bits, 4 * i), _bit(bits, 4 * i + 1)
        b3, b2 = _bit(bits, 4 * i + 2), _bit(bits, 4 * i + 3)
        v0 = tl.where(a0, a, 0.0)
        v1 = tl.where(a1, a, tl.where(b3 | b2, 0.0, b))
        v2 = tl.where(a0 | a1, tl.where(b2, b, 0.0), a)
        v3 = tl.where(b3, b, 0.0)
        quads = tl.permute(tl.join(tl.join(v0, v1), tl.join(v2, v3)), (0, 1, 3, 2))  # [rows, 16, high bit, low bit]
        k = t * 256 + i * 64 + tl.arange(0, 64)
        dense = tl.reshape(quads, [BLOCK_N, 64]).to(out.dtype.element_ty)
        tl.store(out + n.to(tl.int64)[:, None] * K + k[None, :], dense, mask=(n < N)[:, None] & (k < K)[None, :])


def dequantize(weight: Sparse24Weight, dtype: torch.dtype) -> torch.Tensor:
    """Dense `[N, K]` in `dtype`, one rounding a weight."""
    n, columns = weight.shape
    out = torch.empty(n, columns, dtype=dtype, device=weight.words.device)
    if out.numel():
        expand_kernel[(cdiv(n, 64), weight.words.shape[0])](
            *weight.operands, out, n, columns, weight.scale.shape[0], ONE,
            GROUP=weight.group, ASYMMETRIC=weight.zero is not None, BLOCK_N=64, num_warps=4,
        )  # fmt: skip
    return out


def configurations(weight: Sparse24Weight) -> list[Config]:
    """Launches worth trying, the default first."""
    tiles = weight.words.shape[0]
    split = widest_split(weight.shape[0] // 32, 512, tiles // 8)
    chosen = [
        (16, 4, split, 4), (8, 4, split, 4), (16, 2, split, 4), (16, 4, 2 * split, 4), (32, 2, split, 4), (16, 8, split, 8),
    ]  # fmt: skip
    return vector_configurations(chosen, tiles)


def linear(x: torch.Tensor, weight: Sparse24Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + bias`: `[M, K]` float16 or bfloat16 -> `[M, N]`. Up to `MAXIMUM_ROWS` rows a matrix-vector product each, with the
    range of `matvec.py`; more multiply a dequantized scratch matrix.
    """
    rows, n = x.shape[0], weight.shape[0]
    if rows > MAXIMUM_ROWS and n > 0:
        return _many(row_major(x), weight, bias)

    def grid(config: Config) -> tuple[int, ...]:
        return cdiv(n, 2 * config["BLOCK_N"]), config["SPLIT_K"], rows

    return product(sparse24_kernel, x, weight, bias, configurations(weight), grid, key=rows)


def _many(x: torch.Tensor, weight: Sparse24Weight, bias: torch.Tensor | None) -> torch.Tensor:
    if not semi_structured.worth_timing(x.shape[0], weight.shape, x.dtype, x.device):
        return torch.nn.functional.linear(x, dequantize(weight, x.dtype), bias)

    def launch(config: Config) -> torch.Tensor:
        multiply = semi_structured.linear if config["sparse"] else torch.nn.functional.linear
        return multiply(x, dequantize(weight, x.dtype), bias)

    key = (*weight.key, tuning.row_class(x.shape[0]))
    return launch(tuning.choose("sparse24_many", key, x, [{"sparse": False}, {"sparse": True}], launch))
