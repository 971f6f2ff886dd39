"""Tables of 16 entries a row, looked up in registers: levels of row codebooks, values of IQ4.

The interpreter knows no assembly, so it computes the same with shifts; a test runs the assembly as PTX defines it.
"""

from __future__ import annotations

from runtime.kernels.triton.jit import jit, kernel_constant, tl, triton

#: PTX of `look_up`: $1 has four fields, $2 to $5 the table.
LOOK_UP = kernel_constant("""{
.reg .b32 place, low, high;
and.b32 place, $1, 0x7777;
prmt.b32 low, $2, $3, place;
prmt.b32 high, $4, $5, place;
shr.b32 place, $1, 1;
lop3.b32 place, place, 0x4444, 0x3210, 0xea;
prmt.b32 $0, low, high, place;
}""")
#: PTX of `_pairs`.
FIRST_PAIR, SECOND_PAIR = (
    kernel_constant("prmt.b32 $0, $1, $2, 0x5140;"),
    kernel_constant("prmt.b32 $0, $1, $2, 0x7362;"),
)
#: Whether kernels run in triton's interpreter, which knows no assembly.
INTERPRETED = kernel_constant(triton is not None and triton.knobs.runtime.interpret)


@jit
def load_table(tables, rows, N, CODES: tl.constexpr):
    """The tables of `rows`, 16 bytes each, as four int32 words: of `tables` `[4, N]`. Other codes have none."""
    if CODES == "table":
        return (
            tl.load(tables + rows), tl.load(tables + N + rows), tl.load(tables + 2 * N + rows), tl.load(tables + 3 * N + rows)
        )  # fmt: skip
    else:
        return (rows, rows, rows, rows)


@jit
def look_up(words, table, j: tl.constexpr):
    """Entries that 4-bit fields of int32 words select from the tables of their rows, as bytes: field `j` becomes the 8-bit field `j % 4`.

    Six instructions for four fields, of the upper half seven: a PRMT picks four bytes out of eight, so two ask both halves of a table, and
    a third takes the answer of one for each byte.
    """
    words = words >> (16 * (j // 4))
    if INTERPRETED:
        found = words * 0
        for i in tl.static_range(4):
            place = (words >> (4 * i)) & 15
            low, high = tl.where(place < 4, table[0], table[1]), tl.where(place < 12, table[2], table[3])
            found |= ((tl.where(place < 8, low, high) >> (8 * (place & 3))) & 255) << (8 * i)
        return found
    else:
        return tl.inline_asm_elementwise(
            LOOK_UP,
            "=r,r,r,r,r,r", [words, table[0], table[1], table[2], table[3]], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@jit
def _bytes_as(entries, HIGH: tl.constexpr, dtype: tl.constexpr):
    """Low or high bytes of what four entries, a word of a table, are as 16-bit floats; these hold them exactly."""
    found = entries * 0
    for i in tl.static_range(4):
        bits = (((entries >> (8 * i)) & 255) - 128).to(dtype).to(tl.int16, bitcast=True).to(tl.int32)
        found |= ((bits >> (8 if HIGH else 0)) & 255) << (8 * i)
    return found


@jit
def _table_as(table, HIGH: tl.constexpr, dtype: tl.constexpr):
    return (
        _bytes_as(table[0], HIGH, dtype), _bytes_as(table[1], HIGH, dtype),
        _bytes_as(table[2], HIGH, dtype), _bytes_as(table[3], HIGH, dtype),
    )  # fmt: skip


@jit
def _pairs(low, high, SECOND: tl.constexpr):
    """Bytes 0 and 1, or 2 and 3, of both words as two 16-bit numbers: one PRMT."""
    if INTERPRETED:
        low, high = low >> (16 if SECOND else 0), high >> (16 if SECOND else 0)
        return (low & 255) | ((high & 255) << 8) | ((low & 0xFF00) << 8) | ((high & 0xFF00) << 16)
    elif SECOND:
        return tl.inline_asm_elementwise(SECOND_PAIR, "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise(FIRST_PAIR, "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1)


@jit
def entry_slice(w, table, j: tl.constexpr, dtype: tl.constexpr):
    """Slice `j` of words `[rows, 16]`: the entries of `table` that it selects, as 16-bit floats `[rows, 16]`.

    Their low and high bytes are looked up, for neighbouring columns together, so that nothing is converted.
    """
    even, odd = tl.split(tl.reshape(w >> (4 * (j % 2)), [w.shape[0], 8, 2]))
    both = (even & 0x0F0F0F0F) | ((odd & 0x0F0F0F0F) << 4)
    low = look_up(both, _table_as(table, False, dtype), j)
    high = look_up(both, _table_as(table, True, dtype), j)
    pairs = _pairs(low, high, j % 4 >= 2)
    halves = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    return tl.reshape(halves, [w.shape[0], 16]).to(dtype, bitcast=True)
