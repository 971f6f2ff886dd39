"""Every kernel against the reference, the reference against dense arithmetic and against compressed-tensors."""

import itertools

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize as their_fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from weight_cases import int_scheme, random_weight

from runtime import formats, kernels
from runtime.errors import RequestError
from runtime.formats.float8 import widen
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import ActivationScheme, GridScheme, Scheme
from runtime.kernels.activations import fake_quantize
from runtime.kernels.cpu import int4, w8a8
from runtime.kernels.cuda.fp8 import Float8Cuda
from runtime.layers.compressed_linear import CompressedLinear

SHAPES = [(7, 172), (80, 128), (33, 257), (64, 384)]
ROWS = [0, 1, 3, 17, 70]  # the last on the other side of every threshold
# Relative error (Frobenius) against the reference. Both round to bfloat16 on the way: 2^-9 a rounding, more where
# large terms
# cancel (zero points).
TOLERANCE = 2e-2


def weight_only():
    grids = (("group", 32), ("group", 128), ("group", 96), ("channel", None), ("tensor", None))
    for bits, symmetric, (strategy, group), sparsity in itertools.product(
        (2, 3, 4, 5, 8), (True, False), grids, (None, "2:4", "unstructured")
    ):
        yield Scheme(GridScheme(bits, "int", symmetric, strategy, group), None, sparsity)


def with_activations():
    for (strategy, dynamic), symmetric, weight_symmetric, weight_strategy in itertools.product(
        (("token", True), ("tensor", True), ("tensor", False)), (True, False), (True, False), ("channel", "tensor")
    ):
        activations = ActivationScheme(8, "int", symmetric, dynamic, strategy)
        yield Scheme(GridScheme(8, "int", weight_symmetric, weight_strategy), activations)


def layer_of(scheme, shape, dtype=torch.bfloat16, bias=True, seed=0):
    weight = random_weight(scheme, shape, dtype, seed)
    storage = formats.choose(scheme, shape)
    tensors = storage.pack(weight)
    if scheme.activations is not None and not scheme.activations.dynamic:
        tensors["input_scale"] = torch.tensor([0.03], dtype=dtype)
        if not scheme.activations.symmetric:
            tensors["input_zero_point"] = torch.tensor([5], dtype=torch.int8)
    entry = ModuleEntry(scheme, storage.name, storage.stored_count(tensors))
    offset = torch.randn(shape[0]).to(dtype) if bias else None
    return CompressedLinear.from_tensors(entry, shape, tensors, offset, dtype), weight


def run_cases(schemes, name):
    done = 0
    for seed, (scheme, shape) in enumerate(itertools.product(schemes, SHAPES)):
        if (scheme.sparsity == "2:4" and shape[1] % 4) or (scheme.weights.group_size or 1) > shape[1]:
            continue
        layer, weight = layer_of(scheme, shape, bias=seed % 2 == 0, seed=seed)
        if name not in [k.name for k in kernels.candidates(layer.layer)]:
            continue
        inputs = {rows: torch.randn(rows, shape[1]).to(torch.bfloat16) for rows in ROWS}
        layer.prepare("reference")
        expected = {rows: layer(x) for rows, x in inputs.items()}
        layer.prepare(name)
        assert layer.kernel_name == name
        assert torch.equal(layer.dequantize(), weight.dequantize())
        for rows, x in inputs.items():
            y = layer(x)
            assert y.shape == (rows, shape[0])
            assert y.dtype == x.dtype
            if rows:
                error = (y.float() - expected[rows].float()).norm() / expected[rows].float().norm()
                assert error < TOLERANCE, (scheme, shape, rows, float(error))
        done += 1
    return done


def test_int4_cpu():
    assert run_cases(weight_only(), "int4-cpu") > 100


def test_int8_cpu():
    assert run_cases(weight_only(), "int8-cpu") > 20


def test_w8a8_cpu():
    assert run_cases(with_activations(), "w8a8-cpu") == 4 * 24


def test_int4_many_rows_round_like_the_reference():
    """The dense path of the int4 kernel dequantizes to the very same bfloat16 numbers."""
    for symmetric in (True, False):
        layer, weight = layer_of(int_scheme(4, symmetric, 64), (128, 256), bias=False)
        identity = torch.eye(256, dtype=torch.bfloat16)
        layer.prepare("int4-cpu")
        assert int4.FEW_ROWS < 256
        assert torch.equal(layer(identity).t(), weight.dequantize())


def test_int4_keeps_about_four_bits_a_weight_in_memory():
    layer, _ = layer_of(int_scheme(4, group=128), (256, 1024), bias=False)
    layer.prepare("int4-cpu")
    bits = 8 * sum(b.numel() * b.element_size() for b in layer.buffers()) / (256 * 1024)
    assert bits <= 4.26


def test_w8a8_sums_are_exact():
    """Against float64: only the last multiplication by the scales rounds."""
    for scheme in with_activations():
        layer, weight = layer_of(scheme, (33, 257), torch.float32, bias=False)
        layer.prepare("w8a8-cpu")
        x = torch.randn(9, 257)
        exact = fake_quantize(x, scheme.activations, layer._buffers).double() @ weight.dequantize().double().t()
        # float32 codes of the reference: (q - z) * s rounds each input once
        torch.testing.assert_close(layer(x).double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_is_a_dense_layer(shape):
    for scheme in [
        *weight_only(),
        Scheme(None, None, "unstructured"),
        Scheme(GridScheme(8, "float", True, "channel")),
    ]:
        if (scheme.sparsity == "2:4" and shape[1] % 4) or (
            scheme.weights and (scheme.weights.group_size or 1) > shape[1]
        ):
            continue
        layer, weight = layer_of(scheme, shape)
        x = torch.randn(2, 3, shape[1]).to(torch.bfloat16)
        assert torch.equal(layer(x), torch.nn.functional.linear(x, weight.dequantize(), layer.bias))


ACTIVATIONS = [
    ActivationScheme(bits, type_, symmetric, dynamic, strategy)
    for (bits, type_), symmetric, (strategy, dynamic) in itertools.product(
        ((8, "int"), (4, "int"), (8, "float")), (True, False), (("token", True), ("tensor", True), ("tensor", False))
    )
    if symmetric or type_ == "int"
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", ACTIVATIONS, ids=str)
def test_activations_round_as_in_compressed_tensors(scheme, dtype):
    args = QuantizationArgs(**Scheme(None, scheme).to_config()["input_activations"])
    x = (torch.randn(2, 5, 48) * 3).to(dtype)
    x[0, 1], x[1, 2], x[1, 3] = 0, x[1, 2].abs(), -x[1, 3].abs()
    tensors = {}
    if scheme.dynamic:
        their_scale, their_zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity())
    else:
        tensors["input_scale"] = their_scale = torch.tensor([0.05], dtype=dtype)
        their_zero = None
        if not scheme.symmetric:
            tensors["input_zero_point"] = their_zero = torch.tensor([3], dtype=torch.int8)
    theirs = their_fake_quantize(x.clone(), their_scale, their_zero, args)
    assert torch.equal(fake_quantize(x, scheme, tensors), theirs)


def test_float8_activations():
    scheme = Scheme(GridScheme(8, "float", True, "channel"), ActivationScheme(8, "float"))
    layer, weight = layer_of(scheme, (32, 64), torch.float32, bias=False)
    x = torch.randn(5, 64)
    scale = x.abs().amax(-1, keepdim=True) / 448
    rounded = (x / scale).to(torch.float8_e4m3fn).float() * scale
    torch.testing.assert_close(layer(x), rounded @ weight.dequantize().t())
    assert not torch.equal(layer(x), x @ weight.dequantize().t())


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize(("activations", "dynamic"), [("token", True), ("tensor", True), ("tensor", False)])
def test_fp8_cuda_arithmetic(strategy, activations, dynamic):
    """torch computes `_scaled_mm` on a CPU too, slowly, so the arithmetic can be held against the reference anywhere."""
    scheme = Scheme(GridScheme(8, "float", True, strategy), ActivationScheme(8, "float", True, dynamic, activations))
    layer, _ = layer_of(scheme, (48, 96))
    kernel = Float8Cuda()
    for rows in (0, 1, 19):
        x = torch.randn(rows, 96).to(torch.bfloat16)
        expected = layer(x)
        y = kernel.run(x, layer.stored(), layer.layer, layer.bias)
        assert y.shape == expected.shape
        assert y.dtype == x.dtype
        assert (y.float() - expected.float()).norm() <= TOLERANCE * expected.float().norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_fp8_cuda():
    scheme = Scheme(GridScheme(8, "float", True, "channel"), ActivationScheme(8, "float"))
    layer, _ = layer_of(scheme, (256, 512))
    layer.cuda()
    for rows in (1, 7, 300):
        x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
        layer.prepare("reference")
        expected = layer(x)
        layer.prepare("fp8-cuda")
        assert (layer(x).float() - expected.float()).norm() <= TOLERANCE * expected.float().norm()


def test_fp8_cuda_says_why_not():
    scheme = Scheme(GridScheme(8, "float", True, "channel"), ActivationScheme(8, "float"))
    entry = ModuleEntry(scheme, "float-quantized")
    device = torch.device("cuda")
    assert "16" in Float8Cuda().why_not(kernels.Layer(entry, (48, 90), torch.bfloat16, device))
    assert "bfloat16" in Float8Cuda().why_not(kernels.Layer(entry, (48, 96), torch.float32, device))
    weight_only = ModuleEntry(Scheme(scheme.weights), "float-quantized")
    assert "activations" in Float8Cuda().why_not(kernels.Layer(weight_only, (48, 96), torch.bfloat16, device))
    layer, _ = layer_of(scheme, (48, 96))
    with pytest.raises(RequestError, match="runs on cuda"):
        layer.prepare("fp8-cuda")


def test_wide_float8_is_exact():
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn)
    finite = every[~every.to(torch.float32).isnan()]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.equal(widen(finite, dtype), finite.to(dtype))
        assert torch.equal(widen(every, dtype).isnan(), every.to(dtype).isnan())


def test_w8a8_is_exact_for_every_number_of_rows():
    """torch's integer product refuses or reorders small shapes on some devices; here every row count gives the same sums."""
    for shape in ((1, 1), (7, 5), (33, 257), (64, 64)):
        weights = torch.randint(-128, 128, shape, dtype=torch.int8)
        codes = torch.randint(-128, 128, (40, shape[1]), dtype=torch.int8)
        exact = codes.long() @ weights.long().t()
        for rows in range(1, 41):
            assert torch.equal(torch._int_mm(codes[:rows], weights.t()).long(), exact[:rows]), (shape, rows)


@pytest.mark.parametrize("columns", [1, 1024, 2500])
def test_products_of_int8_are_exact_with_and_without_int8_instructions(monkeypatch, columns):
    generator = torch.Generator().manual_seed(columns)
    extreme = torch.full((3, columns), -128, dtype=torch.int8)  # the largest sums there are
    codes = torch.cat([extreme, torch.randint(-128, 128, (4, columns), generator=generator, dtype=torch.int8)])
    weight = torch.cat([extreme, -extreme - 1, codes[3:]])
    exact = codes.long() @ weight.long().t()
    for has in (True, False):
        monkeypatch.setattr(w8a8.processes, "multiplies", lambda dtype, has=has: has)
        assert torch.equal(w8a8.integer_product(codes, weight).long(), exact)
