"""Panels hold a weight exactly, and layers made of them can be copied, pickled, moved and called from several threads."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from products import case, linear
from weight_cases import int_scheme, random_weight

from runtime import formats
from runtime.kernels.cpu import library, planes
from runtime.system import instruction_sets

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")
STORAGES = [
    ("w4", "pack-quantized", None), ("w4", "packed", None), ("w4", "sparse24", "2:4"), ("w4", "bitmap", "unstructured"),
    ("w8", "pack-quantized", None), ("w8", "packed", None), ("w8", "int-quantized", None),
    ("w8", "sparse24", "2:4"), ("w8", "bitmap", "unstructured"), ("s24", "sparse24", "2:4"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "storage", "sparsity"), STORAGES)
def test_stored_tensors_come_back_bit_for_bit(kind, storage, sparsity):
    bits = (5, 6, 8) if kind == "w8" else (2, 3, 4)
    done = 0
    shapes = ((1, 16), (16, 64), (17, 100), (50, 384), (33, 1), (47, 36))
    grids = itertools.product(bits, (True, False), (16, 32, 48, 64, 384, "channel", "tensor"), shapes)
    for (width, symmetric, group, shape), dtype in itertools.product(grids, (torch.bfloat16, torch.float32)):
        scheme = int_scheme(width, symmetric, group, sparsity)
        if formats.get(storage).why_not(scheme, shape) or (kind == "s24" and (not symmetric or group in (16, 48))):
            continue
        made = case(kind, scheme, shape, dtype, done, storage)
        weight = made.layout.unpack(made.prepared, made.layer)
        again = formats.get(storage).pack(weight)
        assert again.keys() == made.stored.keys()
        for name, tensor in made.stored.items():
            assert torch.equal(again[name].view(torch.uint8), tensor.view(torch.uint8)), (name, scheme, shape)
        done += 1
    assert done > 20


def test_scales_keep_their_bits():
    """Negative, zero, not finite: whatever the artifact says."""
    weight = random_weight(int_scheme(4, True, 32), (20, 64))
    weight.scale[0, 0], weight.scale[1, 1], weight.scale[2, 0] = float("nan"), float("-inf"), -0.0
    layer, _ = linear(weight.scheme, (20, 64), weight=weight)
    before = layer.weight_scale.clone()
    layer.prepare("int4-c")
    assert torch.equal(layer.state_dict()["weight_scale"].view(torch.int16), before.view(torch.int16))


def test_float64_scales_come_back():
    layer, _ = linear(int_scheme(4, False, 32), dtype=torch.float64)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.float().prepare("int4-c")
    assert layer(torch.randn(2, 192)).isfinite().all()
    after = layer.state_dict()
    assert all(torch.equal(after[name], tensor.to(after[name].dtype)) for name, tensor in before.items())
    assert after["weight_scale"].dtype == torch.float64


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("columns", [16, 32])
def test_planes(bits, columns):
    """Each bit of a unit is where planes.h says, and takes no more room than its half of a word needs."""
    codes = torch.randint(0, 1 << bits, (5, 3, columns)).to(torch.int8)
    words = planes.pack_planes(codes, bits)
    assert words.shape[-1] * 4 == library.group_bytes(bits, columns)
    assert torch.equal(planes.unpack_planes(words, bits, columns), codes)
    expected, first, place = torch.zeros(5, 3, words.shape[-1], dtype=torch.int64), 0, 0
    for width in (width for width in (8, 4, 2, 1) if bits & width):
        for column in range(columns):
            part = codes[..., column].to(torch.int64) >> place & (1 << width) - 1
            eight, high, byte = column // 8, column // 4 % 2, column % 4
            word, shift = {
                8: (column // 4, 0), 4: (eight, 4 * high), 2: (eight // 2, 4 * high + 2 * (eight % 2)), 1: (0, 4 * high + eight),
            }[width]  # fmt: skip
            expected[..., first + word] |= part << (8 * byte + shift)
        first, place = first + -(-columns * width // 32), place + width
    assert torch.equal(words.to(torch.int64) & 0xFFFFFFFF, expected)


def test_words():
    codes = torch.randint(-8, 8, (5, 40), dtype=torch.int8)
    packed = planes.pack_nibbles(codes + 8)
    assert torch.equal(planes.unpack_nibbles(packed) - 8, codes)
    assert torch.equal(planes.from_stream(formats.bitpack.pack_rows(codes, 4)), packed)
    assert torch.equal(planes.group_sums(packed, 5), codes.view(5, 5, 8).sum(-1).to(torch.int16))


@pytest.mark.parametrize("shape", [(64, 512), (37, 216), (1, 40), (33, 1000), (96, 32), (70, 72)])
def test_streams_are_packed_in_c_as_in_torch(shape, monkeypatch):
    """Byte for byte, whatever the instruction set and the threads, beyond the last row and column too."""
    for scheme in (int_scheme(4, True, 32), int_scheme(4, False, "channel")):
        made = case("w4", scheme, shape, torch.bfloat16)
        packed = made.stored["weight_packed"]
        # Every code, of the last word too.
        packed.copy_(torch.randint(-(2**31), 2**31 - 1, packed.shape, dtype=torch.int64))
        monkeypatch.setattr(library, "pack_stream", lambda *_: None)
        wanted = made.layout.pack(made.stored, made.layer)
        monkeypatch.undo()
        for name in instruction_sets.available():
            monkeypatch.setattr(library, "load", functools.partial(library.load, name))
            for threads in (1, 3):
                monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
                found = made.layout.pack(made.stored, made.layer)
                assert found.keys() == wanted.keys()
                assert all(torch.equal(found[key], wanted[key]) for key in wanted), (name, threads)
            monkeypatch.undo()


@pytest.mark.parametrize(("kernel", "scheme", "most"), [
    ("int4-c", int_scheme(4, True, 128), 4.13), ("int4-c", int_scheme(3, True, 128), 3.13), ("int4-c", int_scheme(2, True, 128), 2.13),
    ("int8-c", int_scheme(5, True, 128), 5.13), ("int8-c", int_scheme(7, True, 128), 7.13), ("int8-c", int_scheme(8, True, 128), 8.13),
    ("sparse24-c", int_scheme(4, True, 128, "2:4"), 3.26), ("int4-c", int_scheme(4, True, 128, "2:4"), 5.13),
    ("int4-c", int_scheme(4, True, 128, "unstructured"), 5.13), ("int8-c", int_scheme(8, True, 128, "2:4"), 9.13),
])  # fmt: skip
def test_memory_a_weight(kernel, scheme, most):
    layer, _ = linear(scheme, (256, 1024))
    layer.prepare(kernel)
    assert 8 * sum(b.numel() * b.element_size() for b in layer.buffers()) / (256 * 1024) <= most


ALL = [("int4-c", int_scheme(4, False, 32)), ("int8-c", int_scheme(8)), ("sparse24-c", int_scheme(4, True, 32, "2:4"))]


@pytest.mark.parametrize(("kernel", "scheme"), ALL, ids=str)
def test_copies_pickles_and_moves_keep_working(kernel, scheme):
    layer, weight = linear(scheme)
    layer.prepare(kernel)
    x = torch.randn(3, 192).to(torch.bfloat16)
    expected = layer(x)
    twins = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer).to("cpu").share_memory()]
    for buffer in layer.buffers():
        buffer.zero_()
    del layer
    for twin in twins:
        assert torch.equal(twin(x), expected)
        assert twin.kernel_name.startswith(kernel)
        assert torch.equal(twin.dequantize(), weight.dequantize())
        twin.float()
        assert torch.equal(twin.to(torch.bfloat16)(x), expected)
        # buffers replaced behind the layer's back
        for name, buffer in list(twin._buffers.items()):
            twin._buffers[name] = buffer.clone()
        assert torch.equal(twin(x), expected)


def test_inputs_of_any_layout():
    layer, _ = linear(int_scheme(4, True, 64))
    layer.prepare("int4-c")
    x = torch.randn(192, 6, 5).to(torch.bfloat16).permute(1, 2, 0)
    y = layer(x)
    assert y.shape == (6, 5, 40)
    assert torch.equal(y, layer(x.contiguous()))
    assert torch.equal(layer(x[2, 3]), y[2, 3])
    assert layer(x[:0]).shape == (0, 5, 40)


def test_gradients_and_float32_go_through_layers_that_c_computes():
    layer, _ = linear(int_scheme(4, True, 64))
    for kernel in ("int4-c", "int4-c-fast", "dense-tiles"):
        layer.prepare(kernel)
        x = torch.randn(70, 192)
        low = x.to(torch.bfloat16).requires_grad_()
        y = layer(low)
        assert torch.equal(layer(x), y.detach().float()), "float32 is computed in the layer's dtype"
        wanted = torch.randn_like(y)
        y.backward(wanted)
        torch.testing.assert_close(low.grad, wanted @ layer.dequantize())


def test_many_threads_at_once():
    layers = [linear(scheme)[0] for _, scheme in ALL]
    for layer, (kernel, _) in zip(layers, ALL, strict=True):
        layer.prepare(kernel)
    inputs = [torch.randn(rows, 192).to(torch.bfloat16) for rows in (1, 2, 9, 33, 70)]
    expected = [[layer(x) for x in inputs] for layer in layers]

    def work(seed: int) -> bool:
        pairs = list(itertools.product(range(len(layers)), range(len(inputs))))
        return all(torch.equal(layers[i](inputs[j]), expected[i][j]) for i, j in pairs[seed % 7 :] * 8)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(12)))


def test_dense_tiles_agree_with_the_reference():
    for scheme, dtype in itertools.product(
        (scheme for _, scheme in ALL), (torch.bfloat16, torch.float32, torch.float16)
    ):
        layer, _ = linear(scheme, (333, 512), dtype)
        x = torch.randn(80, 512).to(dtype)
        layer.prepare("reference")
        expected = layer(x)
        layer.prepare("dense-tiles")
        assert layer.explain(80).startswith("dequantize tiles")
        error = (layer(x).float() - expected.float()).norm() / expected.float().norm()
        assert error < {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-6}[dtype]
