"""Dense bit packing: signed b-bit codes as one little-endian bit stream a row, no bit wasted between codes.

The layout is the one of compressed-tensors >= 0.20 (`pack-quantized`): code `i` of a row, moved to unsigned by adding
`2^(b-1)`, occupies bits `[i*b, (i+1)*b)` of the row's stream, and the stream is cut into int32 words, low bits first.
Eight codes fill exactly `b` bytes, so both directions work on eight codes at a time. Rows are handled in slices: the
working memory stays a few MB whatever the size of the matrix. Words are reinterpreted as bytes, so the host must be
little-endian, as safetensors itself assumes.
"""

from __future__ import annotations

import torch

SLICE = 1 << 19  # codes handled at once: 4 MB of int64 working memory


def row_slices(rows: int, columns: int, most: int = SLICE) -> list[tuple[int, int]]:
    """(first, end) of rows that together have at most `most` elements, so that they stay in a cache, or in little memory."""
    step = max(1, most // max(1, columns))
    return [(start, min(rows, start + step)) for start in range(0, rows, step)]


def packed_words(count: int, bits: int) -> int:
    """How many int32 words `count` codes of `bits` bits take."""
    return -(-count * bits // 32)


def pack_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack int8 codes `[rows, columns]` in `[-2^(bits-1), 2^(bits-1)-1]` into int32 `[rows, packed_words(columns,
    bits)]`.
    """
    rows, columns = codes.shape
    out = torch.empty(rows, packed_words(columns, bits), dtype=torch.int32, device=codes.device)
    for start, stop in row_slices(rows, columns) if columns else ():
        out[start:stop] = _pack(codes[start:stop], bits)
    return out


def unpack_rows(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Inverse of `pack_rows`: int32 `[rows, words]` -> int8 codes `[rows, columns]`."""
    rows = packed.shape[0]
    out = torch.empty(rows, columns, dtype=torch.int8, device=packed.device)
    for start, stop in row_slices(rows, columns) if columns else ():
        _unpack(packed[start:stop], bits, out[start:stop])
    return out


def pack_columns(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack along dimension 0: int8 `[rows, columns]` -> int32 `[packed_words(rows, bits), columns]` (zero points)."""
    return pack_rows(codes.t(), bits).t().clone(memory_format=torch.contiguous_format)


def unpack_columns(packed: torch.Tensor, bits: int, rows: int) -> torch.Tensor:
    """Inverse of `pack_columns`: int32 `[words, columns]` -> int8 `[rows, columns]`."""
    return unpack_rows(packed.t(), bits, rows).t().clone(memory_format=torch.contiguous_format)


def pack_stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack int8 codes `[count]` as one stream: int32 `[packed_words(count, bits)]`."""
    # 1024 codes fill whole words, so rows of 1024 make the same stream; what fills up the last one is packed to zero bits.
    filled = torch.nn.functional.pad(codes, (0, -codes.numel() % 1024), value=-(1 << (bits - 1)))
    return pack_rows(filled.view(-1, 1024), bits).view(-1)[: packed_words(codes.numel(), bits)]


def unpack_stream(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Inverse of `pack_stream`: int32 `[words]` -> int8 `[count]`."""
    filled = torch.nn.functional.pad(packed, (0, -packed.numel() % (32 * bits)))
    return unpack_rows(filled.view(-1, 32 * bits), bits, 1024).view(-1)[:count]


def gather_stream(packed: torch.Tensor, bits: int, index: torch.Tensor) -> torch.Tensor:
    """Codes number `index` (int64 `[n]`) of a stream that `pack_stream` made: int8 `[n]`."""
    start = index * bits
    word, shift = start // 32, start % 32
    following = (word + 1).clamp(max=max(0, packed.numel() - 1))
    value = (packed[word].to(torch.int64) & 0xFFFFFFFF) | packed[following].to(torch.int64) << 32
    return (((value >> shift) & ((1 << bits) - 1)) - (1 << (bits - 1))).to(torch.int8)


def stream_of_rows(offsets: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets `[n + 1]` of a stream of these rows (int64 `[n]`) alone, and the places of its values in the stream of all.

    `offsets` int64 `[out + 1]` says where each row's values begin.
    """
    lengths = offsets.diff()[rows]
    found = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    index = torch.arange(int(found[-1]), device=rows.device)
    return found, index + torch.repeat_interleave(offsets[rows] - found[:-1], lengths)


def unpack_bits(packed: torch.Tensor) -> torch.Tensor:
    """A byte, 0 or 1, for each bit of uint8 `[rows, n]`, low bits first: `[rows, 8 n]`. Eight at a time come out of a table of 256."""
    every = torch.arange(256, device=packed.device)
    table = torch.stack([every >> i & 1 for i in range(8)], dim=-1).to(torch.uint8).view(torch.int64).view(-1)
    chosen = table.index_select(0, packed.reshape(-1).to(torch.int32))
    return chosen.view(packed.shape[0], packed.shape[1], 1).view(torch.uint8).flatten(1)


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    rows, columns = codes.shape
    words, eights = packed_words(columns, bits), -(-columns // 8)
    unsigned = (codes.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    if columns % 8:
        unsigned = torch.nn.functional.pad(unsigned, (0, eights * 8 - columns))
    unsigned = unsigned.view(rows, eights, 8)
    if bits == 8:
        stream = unsigned.reshape(rows, eights * 8)
    else:
        value = torch.zeros(rows, eights, dtype=torch.int64, device=codes.device)
        for i in range(8):
            value |= unsigned[..., i].to(torch.int64) << (i * bits)
        stream = value.unsqueeze(-1).view(torch.uint8)[..., :bits].reshape(rows, eights * bits)
    return _fit(stream, words * 4).reshape(-1).view(torch.int32).view(rows, words)


def _unpack(packed: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    rows, columns = out.shape
    eights, half = -(-columns // 8), 1 << (bits - 1)
    # A copy, because a tensor of one row or one word may count as contiguous and still refuse to be seen as bytes.
    stream = packed.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).view(rows, -1)
    if bits == 8:
        out.copy_(stream[:, :columns].to(torch.int16) - half)
        return
    if bits in (2, 4):  # codes never straddle a byte
        per_byte, mask = 8 // bits, (1 << bits) - 1
        parts = torch.stack([(stream >> (i * bits)) & mask for i in range(per_byte)], dim=-1)
        torch.sub(parts.view(rows, -1)[:, :columns].view(torch.int8), half, out=out)
        return
    stream = _fit(stream, eights * bits).reshape(rows, eights, bits)
    wide = torch.zeros(rows, eights, 8, dtype=torch.uint8, device=packed.device)
    wide[..., :bits] = stream
    value = wide.view(torch.int64).squeeze(-1)
    codes = torch.empty(rows, eights, 8, dtype=torch.int8, device=packed.device)
    for i in range(8):
        codes[..., i] = ((value >> (i * bits)) & ((1 << bits) - 1)) - half
    out.copy_(codes.view(rows, eights * 8)[:, :columns])


def _fit(stream: torch.Tensor, width: int) -> torch.Tensor:
    """Cut the byte rows to `width` or pad them with zero bytes."""
    if stream.shape[1] < width:
        return torch.nn.functional.pad(stream, (0, width - stream.shape[1]))
    return stream[:, :width]
