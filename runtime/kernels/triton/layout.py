"""Layout of weights of 4- and 8-bit codes in GPU memory. Plain torch: nothing here needs triton.

A matrix `[N, K]` of codes becomes int32 words `[tiles, N, 16]`. A tile is as many columns as 16 words hold: 128 with 4-bit
fields, 64 with 8-bit ones. Field `j` of word `w` holds column `tile * 16 * fields + j * 16 + w`, so

- the rows of one tile lie side by side: a program that owns some rows reads one contiguous piece a tile, 16 bytes a thread;
- all words shifted by the same amount are 16 neighbouring columns in order: a slice that multiplies 16 neighbouring
  activations, without any shuffle, as one step of a tensor core instruction (K = 16) or of a dot product;
- a group whose size is a multiple of 16 never ends inside a slice, so a slice has one scale a row.

Integers are stored unsigned (`code + 2^(field - 1)`), floats (e2m1 of 4 bits, e4m3 of 8) as they are; columns that fill up the last
tile hold 0 (of floats minus zero; index 8 of a table).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from runtime.formats.bitpack import row_slices
from runtime.formats.representation import Tensors

WIDTH = 16  # words of a row in one tile, and columns of a slice
BLOCK_COLUMNS = 128  # of float8 weights with scales of blocks
SMALLEST_UNIT = 32  # columns of an integer tensor core instruction
Codes = Literal["integer", "minimum", "float", "table"]
BLOCK = 256  # columns that share the factors of `pack_products`
DENSE = 16  # "bits of a code" of weights that are no codes
_SLICE = 1 << 24  # codes reordered at once: bounds the working memory


@dataclass(frozen=True)
class Weight:
    """A reordered weight.

    Attributes:
        words: int32 `[tiles, N, 16]`.
        scale: `[groups, N]`, any float dtype; one group when there is one scale a channel. Of floats, uint8 (e8m0) or int8 (the bits of
            e4m3). Or int16, of `pack_products`, with the minima.
        zero: int8 `[groups, N]` in the signed code range; None when symmetric, and where minima are among the scales.
        shape: `(N, K)`.
        group: columns that share a scale, a multiple of 16 (the last group may be shorter); 0 for one scale a channel.
        field: bits that hold one code, 4 or 8.
        two_of_four: of each four in a row at least two are zero once dequantized.
        codes: what fields hold: integers in the signed range of their bits ("integer"), unsigned ones of `code * scale - minimum`
            ("minimum", with int16 scales), floats ("float"), or indices into the table of their row ("table", of 4 bits).
        global_scale: float32 `[1]`, the divisor of NVFP4's e4m3 scales; None for other formats.
        table: int32 `[4, N]`, of `table_words`, where 4-bit codes number entries of a table of their row.
    """

    words: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    shape: tuple[int, int]
    group: int
    field: int
    two_of_four: bool = False
    codes: Codes = "integer"
    global_scale: torch.Tensor | None = None
    table: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert self.codes != "minimum" or self.products, "minima are among scales of `pack_products`"
        assert self.codes != "table" or (self.table is not None and self.field == 4)

    @property
    def tile(self) -> int:
        """Columns of one tile."""
        return tile_columns(self.field)

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """Arguments of kernels: words, scales and a third: zero points, the global scale of NVFP4, tables, else the scales
        again, which nobody reads there.
        """
        given = (each for each in (self.zero, self.global_scale, self.table, self.scale) if each is not None)
        return self.words, self.scale, next(given)

    @property
    def key(self) -> tuple[int | bool | str, ...]:
        """What a choice of launches depends on."""
        return (
            self.field,
            self.group,
            self.zero is not None,
            *self.shape,
            *(() if self.codes == "integer" else (self.codes,)),
            *(("products",) if self.products else ()),
        )

    @property
    def products(self) -> bool:
        """Whether scales are integers times factors (`pack_products`)."""
        return self.scale.dtype == torch.int16

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return -(-self.shape[1] // self.group) if self.group else 1

    @property
    def constants(self) -> dict[str, int | bool | str]:
        """What kernels are compiled for."""
        run = slices_per_group(self.group, 32 // self.field)
        return {
            "GROUP": self.group, "FIELD": self.field, "CODES": self.codes, "RUN": run,
            "ASYMMETRIC": self.zero is not None or self.codes == "minimum",
        }  # fmt: skip


@dataclass(frozen=True)
class Stack(Weight):
    """Weights of one shape `(N, K)`, one after another.

    Packed ones have `words` `[E, tiles, N, 16]`, `scale` and `zero` `[E, groups, N]`. Dense ones have field `DENSE`, `words` `[E, N, K]`
    float16, bfloat16 or float32, and no scales (`scale` is `words`).
    """

    @classmethod
    def dense(cls, weights: torch.Tensor) -> Stack:
        """Of `[E, N, K]`, which is not copied."""
        return cls(weights, weights, None, (weights.shape[1], weights.shape[2]), 0, DENSE)

    @property
    def count(self) -> int:
        """Number of weights."""
        return self.words.shape[0]


def tile_columns(field: int) -> int:
    """Columns of one tile: 128 for 4-bit fields, 64 for 8-bit ones."""
    return WIDTH * (32 // field)


def slices_per_group(group: int, slices: int, width: int = WIDTH) -> int:
    """Of a tile's `slices` of `width` columns, how many in a row surely share a scale: the largest run that divides tile and group."""
    run = slices
    while group and (group // width) % run:
        run //= 2
    return run


def pack(codes: torch.Tensor, field: int) -> torch.Tensor:
    """int8 codes `[N, K]` in `[-2^(field-1), 2^(field-1) - 1]` -> int32 words `[ceil(K / tile), N, 16]`."""
    rows, columns = codes.shape
    wide, fields = tile_columns(field), 32 // field
    tiles = -(-columns // wide)
    out = torch.empty(tiles, rows, WIDTH, dtype=torch.int32, device=codes.device)
    if not out.numel():
        return out
    for start, stop in row_slices(rows, tiles * wide, _SLICE):
        part = codes[start:stop]
        unsigned = torch.nn.functional.pad(
            part.to(torch.int16) + (1 << field - 1), (0, tiles * wide - columns), value=1 << field - 1
        )
        unsigned = unsigned.to(torch.uint8).view(part.shape[0], tiles, fields, WIDTH)
        if field == 4:
            unsigned = unsigned[:, :, 0::2] | unsigned[:, :, 1::2] << 4
        words = unsigned.permute(1, 0, 3, 2).contiguous().view(torch.int32)  # four bytes, low ones first
        out[:, start:stop] = words.squeeze(-1)
    return out


def blank_words(shape: tuple[int, int], field: int) -> torch.Tensor:
    """Words of a matrix `[N, K]` on meta."""
    return torch.empty(-(-shape[1] // tile_columns(field)), shape[0], WIDTH, dtype=torch.int32, device="meta")


def unpack(words: torch.Tensor, field: int, columns: int) -> torch.Tensor:
    """Inverse of `pack`: int32 `[tiles, N, 16]` -> int8 codes `[N, columns]`."""
    tiles, rows, _ = words.shape
    out = torch.empty(rows, columns, dtype=torch.int8, device=words.device)
    if not out.numel():
        return out
    for start, stop in row_slices(rows, tiles * tile_columns(field), _SLICE):
        part = words[:, start:stop].contiguous().unsqueeze(-1).view(torch.uint8)  # [tiles, rows, 16, 4]
        if field == 4:
            part = torch.stack([part & 15, part >> 4], dim=-1).flatten(3)
        codes = part.permute(1, 0, 3, 2).reshape(part.shape[1], -1)[:, :columns]
        out[start:stop] = codes.to(torch.int16) - (1 << field - 1)
    return out


def table_words(entries: torch.Tensor) -> torch.Tensor:
    """int8 entries of tables `[N, 16]` -> int32 words `[4, N]`, entries as unsigned bytes `entry + 128`."""
    return (entries.view(torch.uint8) ^ 128).view(torch.int32).t().contiguous()


def table_entries(words: torch.Tensor) -> torch.Tensor:
    """Inverse of `table_words`."""
    return (words.t().contiguous().view(torch.uint8) ^ 128).view(torch.int8)


def pack_products(parameters: Tensors) -> torch.Tensor:
    """Scales of a k-quant, and its minima if it has any -> int16 `[groups + factors, N]`: the integers of a group, the scale in the lower
    byte, and below them the bits of `d`, and of `dmin`, of every `BLOCK` columns.

    Args:
        parameters: `d`, `dmin` float16 `[N, blocks]`, `scale`, `minimum` int8 `[N, groups]`.
    """
    pairs = parameters["scale"].short() & 255
    if "minimum" in parameters:
        pairs = pairs | parameters["minimum"].short() << 8
    factors = [parameters[name].view(torch.int16) for name in ("d", "dmin") if name in parameters]
    return torch.cat([pairs, *factors], dim=1).t().contiguous()


def unpack_products(products: torch.Tensor, groups: int, minima: bool) -> Tensors:
    """Inverse of `pack_products`."""
    given = products.t()
    pairs, factors = (
        given[:, :groups],
        given[:, groups:].clone(memory_format=torch.contiguous_format).view(torch.float16),
    )
    found = {"scale": (pairs << 8 >> 8).to(torch.int8)}
    if not minima:
        return {"d": factors, **found}
    d, dmin = factors.chunk(2, dim=1)
    return {"d": d.contiguous(), **found, "dmin": dmin.contiguous(), "minimum": (pairs >> 8).to(torch.int8)}
