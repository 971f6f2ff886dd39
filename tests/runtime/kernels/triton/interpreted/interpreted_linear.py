"""The classes of the dispatch table, on CPU tensors, against the reference kernel."""

import itertools

import pytest
import torch
from weight_cases import random_weight

from runtime import formats
from runtime.formats.block_float import BlockFloat
from runtime.formats.float8_block import Float8Block
from runtime.formats.presets import preset
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import ActivationScheme, GridScheme, Scheme
from runtime.kernels.base import Layer
from runtime.kernels.reference import Reference
from runtime.kernels.triton import gpu
from runtime.kernels.triton.linear import (
    BlockFloatTriton,
    Float8BlockTriton,
    RoundedTriton,
    Sparse24Triton,
    W4A16Triton,
    W8A8Triton,
    W8A16Triton,
)

GRIDS = [("group", 16), ("group", 64), ("channel", None), ("tensor", None)]


def _bytes(tensor):
    return tensor.contiguous().view(torch.uint8)  # float8 has no comparison


def check(kernel, scheme, shape, storage, dtype=torch.bfloat16, seed=0, rows=(0, 1)):
    weight = random_weight(scheme, shape, dtype, seed)
    stored = formats.get(storage)
    tensors = stored.pack(weight)
    if scheme.activations is not None and scheme.activations.dynamic == "local":
        tensors["input_global_scale"] = torch.tensor([900.0])
    elif scheme.activations is not None and not scheme.activations.dynamic:
        tensors["input_scale"] = torch.tensor([0.03], dtype=dtype)
        if not scheme.activations.symmetric:
            tensors["input_zero_point"] = torch.tensor([5], dtype=torch.int8)
    entry = ModuleEntry(scheme, storage, stored.stored_count(tensors))
    layer = Layer(entry, shape, dtype, torch.device("cpu"))
    assert storage in kernel.formats
    assert kernel.why_not(layer) is None
    bias = torch.randn(shape[0]).to(dtype) if seed % 2 else None
    kept = {name: tensor for name, tensor in tensors.items() if name.startswith("input_")}  # as modules keep them
    prepared = kept | kernel.prepare(tensors, layer)
    restored, exact = kernel.restore(prepared, layer), Reference().restore(tensors, layer)
    assert torch.equal(restored.values.view(torch.uint8), exact.values.view(torch.uint8))
    assert restored.parameters.keys() == exact.parameters.keys()
    assert all(torch.equal(_bytes(each), _bytes(exact.parameters[name])) for name, each in restored.parameters.items())
    assert (restored.zero_point is None) == (exact.zero_point is None)
    assert exact.zero_point is None or torch.equal(restored.zero_point, exact.zero_point)
    assert torch.equal(restored.dequantize(), weight.dequantize())
    if storage != "sparse24" or isinstance(
        kernel, Sparse24Triton
    ):  # held dense, zeros that were kept are no longer known
        assert all(torch.equal(_bytes(again), _bytes(tensors[name])) for name, again in stored.pack(restored).items())
    torch.manual_seed(seed)
    size = weight.dequantize().float().abs().t()
    for count in rows:
        x = torch.randn(count, shape[1]).to(dtype)
        y, expected = kernel.run(x, prepared, layer, bias), Reference().run(x, tensors, layer, bias)
        assert y.shape == expected.shape
        assert y.dtype == dtype
        if count:
            # Both round to 8 bits of mantissa on the way, terms that cancel in the sum included.
            assert (y.float() - expected.float()).norm() <= 2**-8 * (x.float().abs() @ size).norm()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_w4a16(grid):
    kernel = W4A16Triton("cpu")
    for seed, (bits, symmetric) in enumerate(((2, True), (3, False), (4, True), (4, False))):
        scheme = Scheme(GridScheme(bits, "int", symmetric, *grid))
        check(kernel, scheme, (7, 192), "pack-quantized", (torch.bfloat16, torch.float16)[seed % 2], seed, (1, 5))
    check(kernel, Scheme(GridScheme(4, "int", False, *grid)), (5, 100), "packed")
    for storage, sparsity in (("bitmap", "unstructured"), ("sparse24", "2:4")):
        check(kernel, Scheme(GridScheme(4, "int", False, *grid), None, sparsity), (6, 128), storage, rows=(1,))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_w8a16(grid):
    for seed, (bits, symmetric) in enumerate(itertools.product((5, 8), (True, False))):
        check(
            W8A16Triton("cpu"),
            Scheme(GridScheme(bits, "int", symmetric, *grid)),
            (7, 192),
            "pack-quantized",
            seed=seed,
        )


BLOCK_FLOATS = {"NVFP4": "nvfp4-pack-quantized", "MXFP4": "mxfp4-pack-quantized", "MXFP8": "mxfp8-quantized"}


@pytest.mark.parametrize("name", BLOCK_FLOATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs", ["A16", ""], ids=["as given", "rounded"])
def test_block_floats(name, dtype, inputs):
    for seed, shape in enumerate(((7, 192), (70, 160), (1, 32))):
        scheme = preset(f"{name}{inputs}")
        rows = (0, 1, 2, 5, 70) if shape == (7, 192) else (1, 5)
        check(BlockFloatTriton("cpu"), scheme, shape, BLOCK_FLOATS[name], dtype, seed, rows)
    with gpu.assuming(100):
        check(BlockFloatTriton("cpu"), scheme, (70, 160), BLOCK_FLOATS[name], dtype, 1, (64, 65))


@pytest.mark.parametrize("name", BLOCK_FLOATS)
def test_a_token_with_a_nan_spoils_only_itself(name):
    scheme, dtype, kernel, shape = preset(name), torch.bfloat16, BlockFloatTriton("cpu"), (7, 64)
    tensors = formats.get(BLOCK_FLOATS[name]).pack(random_weight(scheme, shape, dtype, 0))
    layer = _layer(scheme, BLOCK_FLOATS[name], shape, dtype)
    also = {"input_global_scale": torch.tensor([900.0])} if name == "NVFP4" else {}
    prepared = also | kernel.prepare(tensors, layer)
    for count, capability in ((5, 90), (70, 90), (70, 100)):
        x = torch.randn(count, 64).to(dtype)
        with gpu.assuming(capability):
            expected = kernel.run(x, prepared, layer, None)
            x[1, 5] = float("nan")
            y = kernel.run(x, prepared, layer, None)
        assert bool(y[1].isnan().all())
        assert torch.equal(y[2:], expected[2:])
        assert torch.equal(y[0], expected[0])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", BLOCK_FLOATS)
def test_extreme_block_floats(name):
    """Every stored scale and code, NaN and minus zero among them: rows are not finite where the reference's are not."""
    scheme, dtype, (n, k) = preset(f"{name}A16"), torch.bfloat16, (256, 64)
    generator, groups = torch.Generator().manual_seed(0), k // (16 if name == "NVFP4" else 32)
    every = torch.arange(n, dtype=torch.uint8)[:, None].repeat(1, groups)
    codes = torch.randint(0, 256, (n, k // (1 if name == "MXFP8" else 2)), dtype=torch.uint8, generator=generator)
    tensors = {"weight_scale": every, "weight_packed": codes}
    if name == "NVFP4":
        unsigned = (every & 127).view(torch.float8_e4m3fn)
        tensors |= {"weight_scale": unsigned, "weight_global_scale": torch.tensor([3e-3])}
    if name == "MXFP8":
        tensors = {"weight_scale": every, "weight": codes.view(torch.float8_e4m3fn)}
    kernel, layer = BlockFloatTriton("cpu"), _layer(scheme, BLOCK_FLOATS[name], (n, k), dtype)
    prepared = kernel.prepare(tensors, layer)
    weight = Reference().restore(tensors, layer)
    restored = kernel.restore(prepared, layer)
    assert torch.equal(_bytes(restored.values), _bytes(weight.values))
    assert all(torch.equal(_bytes(p), _bytes(weight.parameters[key])) for key, p in restored.parameters.items())
    dense = weight.scheme.weights.dequantize(weight.values, weight.parameters, torch.float64)
    for count in (1, 3, 70):
        x = torch.randn(count, k, generator=generator).to(dtype)
        y, expected = kernel.run(x, prepared, layer, None), x.double() @ dense.t()
        finite = dense.isfinite().all(1) & (dense.abs().amax(1) < 1e36)
        assert bool(finite.any())
        assert not bool(y[:, ~dense.isfinite().all(1)].isfinite().any())
        size = (x.double().abs() @ dense.abs().t())[:, finite]
        assert bool(((y.double() - expected)[:, finite].abs() <= 2**-7 * size + 2e-38).all())


@pytest.mark.parametrize("grid", GRIDS[1:], ids=str)
def test_sparse24(grid):
    for seed, (bits, symmetric, sparsity) in enumerate(((3, True, "2:4"), (4, False, "2:4"), (4, True, "1:4"))):
        check(
            Sparse24Triton("cpu"),
            Scheme(GridScheme(bits, "int", symmetric, *grid), None, sparsity),
            (7, 132),
            "sparse24",
            seed=seed,
        )


def test_w8a8():
    kinds = (("token", True), ("tensor", True), ("tensor", False))
    for seed, ((strategy, dynamic), symmetric, weight_symmetric, of) in enumerate(
        itertools.product(kinds, (True, False), (True, False), ("channel", "tensor"))
    ):
        activations = ActivationScheme(8, "int", symmetric, dynamic, strategy)
        scheme = Scheme(GridScheme(8, "int", weight_symmetric, of), activations)
        check(W8A8Triton("cpu"), scheme, (7, 100), "int-quantized", seed=seed, rows=(0, 1, 3))
    for (strategy, dynamic), of in itertools.product(kinds, ("channel", "tensor")):
        scheme = Scheme(GridScheme(8, "float", True, of), ActivationScheme(8, "float", True, dynamic, strategy))
        check(W8A8Triton("cpu"), scheme, (7, 100), "float-quantized", rows=(0, 1, 3))


@pytest.mark.parametrize("grid", GRIDS[1:], ids=str)
def test_rounded_inputs(grid):
    kinds = (
        ActivationScheme(),
        ActivationScheme(4),
        ActivationScheme(8, "int", True, False, "tensor"),
        ActivationScheme(4, strategy="group", group_size=32),
        ActivationScheme(4, strategy="group", group_size=64, int8_tail=64),
        ActivationScheme(8, "float"),
        ActivationScheme(8, "float", True, False, "tensor"),
    )
    for seed, activations in enumerate(kinds):
        symmetric = seed % 2 == 0
        scheme = Scheme(GridScheme(4 if symmetric else 3, "int", symmetric, *grid), activations)
        storage = "pack-quantized" if symmetric else "packed"
        storage = "int-quantized" if (activations.bits, activations.type) == (8, "int") else storage
        check(
            RoundedTriton("cpu"), scheme, (7, 192), storage, (torch.bfloat16, torch.float16)[seed % 2], seed, (0, 1, 5)
        )


@pytest.mark.parametrize("kind", ["int", "float"])
def test_a_token_with_a_nan_is_nan_under_a_static_scale(kind):
    activations = ActivationScheme(8, kind, True, False, "tensor")
    for kernel, weights in (
        (RoundedTriton("cpu"), GridScheme(4, "int", True, "group", 32)),
        (W8A8Triton("cpu"), GridScheme(8, kind, True, "channel")),
    ):
        scheme, dtype = Scheme(weights, activations), torch.bfloat16
        stored = formats.choose(scheme, (7, 64))
        tensors = stored.pack(random_weight(scheme, (7, 64), dtype, 0)) | {
            "input_scale": torch.tensor([0.03], dtype=dtype)
        }
        layer = Layer(ModuleEntry(scheme, stored.name), (7, 64), dtype, torch.device("cpu"))
        prepared = {"input_scale": tensors["input_scale"]} | kernel.prepare(tensors, layer)
        x = torch.randn(3, 64).to(dtype)
        expected = kernel.run(x, prepared, layer, None)
        x[1, 5] = float("nan")
        y = kernel.run(x, prepared, layer, None)
        assert bool(y[1].isnan().all())
        assert torch.equal(y[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("height", [32, 128])
@pytest.mark.parametrize(
    "activations", [ActivationScheme(8, "float"), ActivationScheme(8, "float", strategy="group", group_size=128)]
)
def test_float8_blocks(height, activations):
    scheme = Scheme(Float8Block(height=height), activations)
    check(Float8BlockTriton("cpu"), scheme, (70, 256), "float-quantized", rows=(0, 1, 5))


def _layer(scheme, storage, shape, dtype):
    return Layer(ModuleEntry(scheme, storage), shape, dtype, torch.device("cpu"))


def test_why_not():
    def reason(kernel, scheme, dtype=torch.bfloat16):
        return kernel.why_not(Layer(ModuleEntry(scheme, "packed"), (64, 64), dtype, torch.device("cpu")))

    int4 = Scheme(GridScheme(4, "int", True, "group", 32))
    assert "float32" in reason(W4A16Triton(), int4, torch.float32)
    assert "multiple of 16" in reason(W4A16Triton(), Scheme(GridScheme(4, "int", True, "group", 24)))
    assert "multiple of 64" in reason(Sparse24Triton(), int4)
    assert "5 to 8 bits" in reason(W8A16Triton(), int4)
    assert "integer activations" in reason(W8A8Triton(), int4)
    assert "block floats" in reason(BlockFloatTriton(), int4)
    for given in (ActivationScheme(), ActivationScheme(8, "float", strategy="group", group_size=32)):
        assert "whose group size is a power of two" in reason(BlockFloatTriton(), Scheme(BlockFloat(4), given))
    odd = ActivationScheme(4, "float", True, "local", "tensor_group", 48, "e4m3")
    assert "a power of two" in reason(BlockFloatTriton(), Scheme(BlockFloat(4), odd))
    blocks = Float8Block()
    assert "blocks of 128 columns" in reason(Float8BlockTriton(), int4)
    assert "blocks of 128 columns" in reason(
        Float8BlockTriton(), Scheme(Float8Block(width=64), ActivationScheme(8, "float"))
    )
    assert "float8 activations" in reason(Float8BlockTriton(), Scheme(blocks))
    assert "float8 activations" in reason(Float8BlockTriton(), Scheme(blocks, ActivationScheme()))
    groups = ActivationScheme(8, "float", strategy="group", group_size=64)
    assert "one scale a token or 128 features" in reason(Float8BlockTriton(), Scheme(blocks, groups))
    assert "quantized activations" in reason(RoundedTriton(), int4)
    for given, said in (
        (ActivationScheme(8, "float", symmetric=False), "symmetric activations"),
        (ActivationScheme(symmetric=False), "symmetric activations"),
        (ActivationScheme(outliers=6.0), "symmetric activations"),
        (ActivationScheme(8, "float", strategy="group", group_size=128), "groups of integers"),
        (ActivationScheme(strategy="tensor"), "depend on the others"),
        (ActivationScheme(strategy="group", group_size=16), "a power of two from 32 on, not 16"),
        (ActivationScheme(strategy="group", group_size=96), "a power of two from 32 on, not 96"),
    ):
        assert said in reason(RoundedTriton(), Scheme(int4.weights, given))
    assert "multiple of 32" in reason(
        RoundedTriton(), Scheme(GridScheme(4, "int", True, "group", 48), ActivationScheme())
    )
