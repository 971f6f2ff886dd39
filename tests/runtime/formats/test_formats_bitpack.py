"""Bit packing: exact inverse, and bit for bit the layout of compressed-tensors."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

from runtime.formats import bitpack

SHAPES = [(1, 1), (3, 5), (7, 33), (16, 64), (5, 172), (2, 2049), (33, 8), (4, 100)]


def codes(bits, shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), shape, generator=generator, dtype=torch.int8)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_bits_as_compressed_tensors(bits, shape):
    value = codes(bits, shape)
    packed, columns = bitpack.pack_rows(value, bits), bitpack.pack_columns(value, bits)
    assert torch.equal(packed, pack_to_int32(value, bits))
    assert torch.equal(columns, pack_to_int32(value, bits, packed_dim=0))
    assert packed.shape == (shape[0], bitpack.packed_words(shape[1], bits))
    assert packed.is_contiguous()
    assert torch.equal(bitpack.unpack_rows(pack_to_int32(value, bits), bits, shape[1]), value)
    assert torch.equal(bitpack.unpack_columns(columns, bits, shape[0]), value)
    assert torch.equal(unpack_from_int32(packed, bits, torch.Size(shape)), value)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("count", [0, 1, 31, 1023, 1024, 1025, 5000])
def test_stream_is_one_long_row(bits, count):
    value = codes(bits, (count,))
    packed = bitpack.pack_stream(value, bits)
    assert packed.shape == (bitpack.packed_words(count, bits),)
    assert torch.equal(packed, bitpack.pack_rows(value.view(1, -1), bits).view(-1))
    assert torch.equal(bitpack.unpack_stream(packed, bits, count), value)


@pytest.mark.parametrize("bits", range(2, 9))
def test_gather_picks_codes_anywhere(bits):
    value = codes(bits, (3001,))
    packed = bitpack.pack_stream(value, bits)
    index = torch.tensor([3000, 0, 31, 32, 1023, 1024, 7, 7, 2999])
    assert torch.equal(bitpack.gather_stream(packed, bits, index), value[index])
    assert bitpack.gather_stream(packed, bits, index[:0]).shape == (0,)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_slices_join_seamlessly(bits, monkeypatch):
    value = codes(bits, (57, 131))
    whole = bitpack.pack_rows(value, bits)
    monkeypatch.setattr(bitpack, "SLICE", 400)  # three rows at a time
    assert torch.equal(bitpack.pack_rows(value, bits), whole)
    assert torch.equal(bitpack.unpack_rows(whole, bits, 131), value)


def test_a_view_packs_like_a_copy():
    value = codes(5, (40, 90)).t()[3:, 1:]
    assert torch.equal(bitpack.pack_rows(value, 5), bitpack.pack_rows(value.contiguous(), 5))
    packed = bitpack.pack_rows(value.contiguous(), 5)
    spaced = torch.stack([packed, packed], dim=-1)[..., 0]  # not contiguous
    assert torch.equal(bitpack.unpack_rows(spaced, 5, value.shape[1]), value)


def test_empty():
    assert bitpack.unpack_rows(bitpack.pack_rows(codes(3, (0, 9)), 3), 3, 9).shape == (0, 9)
    assert bitpack.unpack_rows(bitpack.pack_rows(codes(3, (4, 0)), 3), 3, 0).shape == (4, 0)
