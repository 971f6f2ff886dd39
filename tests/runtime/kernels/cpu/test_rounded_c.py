"""Products with activations that a scheme rounds: codes are the reference's, whatever the weights, the instruction set or the batch."""

from __future__ import annotations

import itertools
import math

import products
import pytest
import torch
from weight_cases import random_weight

from runtime import formats
from runtime.errors import CompressError
from runtime.formats.block_float import BlockFloat
from runtime.formats.float8_block import Float8Block
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import ActivationScheme, CompressedWeight, GridScheme, Scheme
from runtime.kernels.activations import outliers, quantize_input
from runtime.kernels.cpu import library
from runtime.layers.compressed_linear import CompressedLinear
from runtime.system import instruction_sets

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")

STATIC = {"dynamic": False, "strategy": "tensor"}
ACTIVATIONS = {
    "a8": ActivationScheme(),
    "a4": ActivationScheme(4),
    "a2": ActivationScheme(2),
    "a8 asymmetric": ActivationScheme(symmetric=False),
    "a5 asymmetric": ActivationScheme(5, symmetric=False),
    "a8 static": ActivationScheme(**STATIC),
    "a8 static asymmetric": ActivationScheme(symmetric=False, **STATIC),
    "a8 groups": ActivationScheme(strategy="group", group_size=32),
    "a8 asymmetric groups": ActivationScheme(symmetric=False, strategy="group", group_size=96),
    "a8 outliers": ActivationScheme(outliers=3.0),
    "a4 int8 tail": ActivationScheme(4, strategy="group", group_size=32, int8_tail=64),
    "float8": ActivationScheme(8, "float"),
    "float8 static": ActivationScheme(8, "float", **STATIC),
    "float8 groups": ActivationScheme(8, "float", strategy="group", group_size=96),
    "mxfp8": ActivationScheme(8, "float", strategy="group", group_size=32, scales="e8m0"),
    "mxfp4": ActivationScheme(4, "float", strategy="group", group_size=32, scales="e8m0"),
    "nvfp4": ActivationScheme(4, "float", dynamic="local", strategy="tensor_group", group_size=16, scales="e4m3"),
}
WEIGHTS = {
    "w8": Scheme(GridScheme(8, "int", True, "channel")),
    "w8 tensor asymmetric": Scheme(GridScheme(8, "int", False, "tensor")),
    "w4 groups": Scheme(GridScheme(4, "int", True, "group", 64)),
    "w3 asymmetric": Scheme(GridScheme(3, "int", False, "group", 32)),
    "w4 2:4": Scheme(GridScheme(4, "int", True, "channel"), sparsity="2:4"),
    "float8": Scheme(GridScheme(8, "float", True, "channel")),
    "float8 blocks": Scheme(Float8Block()),
    "mxfp8": Scheme(BlockFloat(8)),
    "mxfp4": Scheme(BlockFloat(4)),
    "nvfp4": Scheme(BlockFloat(4, group_size=16, scales="e4m3")),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 96), (33, 384), (70, 192))
WHOLE_BLOCKS = [shape for shape in SHAPES if shape[1] % 128 == 0]


PAIRS = [  # no format stores float8 weights beside other activations than float ones
    (weights, activations)
    for weights, activations in itertools.product(WEIGHTS, ACTIVATIONS)
    if weights != "float8" or ACTIVATIONS[activations].type == "float"
]


def layer_of(weights: str, activations: str, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> CompressedLinear:
    scheme = Scheme(WEIGHTS[weights].weights, ACTIVATIONS[activations], WEIGHTS[weights].sparsity)
    storage = formats.choose(scheme, shape)
    tensors = dict(storage.pack(random_weight(scheme, shape, dtype, seed)))
    given = {"input_scale": 0.02, "input_zero_point": -7, "input_global_scale": 300.0}
    for name, spec in scheme.activations.tensors(dtype).items():
        tensors[name] = torch.full(spec.shape, given[name], dtype=spec.dtype)
    bias = torch.randn(shape[0]).to(dtype) if seed % 2 else None
    return CompressedLinear.from_tensors(ModuleEntry(scheme, storage.name), shape, tensors, bias, dtype)


def inputs(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows by turns: plain, one large, of one sign, tiny, zeros, of very different sizes."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    for row in range(rows):
        kind = row % 6
        if kind == 1:
            x[row, row % columns] = -40.0
        elif kind == 2:
            x[row] = x[row].abs()
        elif kind == 3:
            x[row] *= 1e-6
        elif kind == 4:
            x[row] = 0.0
        elif kind == 5:
            x[row] *= torch.logspace(-5, 2, columns)
    return x.to(dtype)


def rounded(x: torch.Tensor, layer: CompressedLinear) -> torch.Tensor:
    """What the reference's codes are worth, float64: products of codes and scales that nothing rounds."""
    scheme, size = layer.layer.activations, layer.layer.activations.group_size
    if scheme.int8_tail:
        parts = x[:, : -scheme.int8_tail], x[:, -scheme.int8_tail :]
        return torch.cat([_in_groups(part, bits, size) for part, bits in zip(parts, (scheme.bits, 8), strict=True)], 1)
    codes, scale, zero = quantize_input(x if size is None else x.unflatten(-1, (-1, size)), scheme, layer._tensors())
    values = (codes.double() - (0 if zero is None else zero.double())) * scale.double()
    values = values if size is None else values.flatten(-2)
    return values if scheme.outliers is None else torch.where(outliers(x, scheme), x.double(), values)


def _in_groups(x: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    codes, scale, _ = quantize_input(
        x.unflatten(-1, (-1, size)), ActivationScheme(bits, strategy="group", group_size=size), {}
    )
    return (codes.double() * scale.double()).flatten(-2)


def exact_weight(weight: CompressedWeight) -> torch.Tensor:
    assert weight.scheme.weights is not None
    return weight.scheme.weights.dequantize(weight.values, weight.parameters, torch.float32).double()


@pytest.mark.sampled(80, 20)
@pytest.mark.parametrize(("weights", "activations"), PAIRS)
def test_codes_are_those_of_the_reference(weights: str, activations: str) -> None:
    """An activation that is one code off differs by far more than sums in float32 may."""
    shapes = WHOLE_BLOCKS if weights == "float8 blocks" else SHAPES
    for seed, (shape, dtype) in enumerate(itertools.product(shapes, DTYPES)):
        layer = layer_of(weights, activations, shape, dtype, seed)
        weight = exact_weight(layer.compressed_weight())
        layer.prepare()
        assert layer.kernel is not None
        assert layer.kernel.name == "float8-c" or layer.kernel.name.endswith("-c-rounded")
        for rows in (0, 1, 6, 40):
            x = inputs(rows, shape[1], dtype, seed + rows)
            y, values = layer(x).double(), rounded(x, layer)
            exact = values @ weight.t() + (0.0 if layer.bias is None else layer.bias.double())
            bound = 2.0**-20 * (values.abs() @ weight.abs().t() + 1e-4) + products.UNIT[dtype] * exact.abs()
            bound += 2.0**-25 * (dtype == torch.float16)  # half the distance of subnormal ones
            assert bool(((y - exact).abs() <= bound).all()), (
                shape,
                dtype,
                rows,
                float(((y - exact).abs() / bound).max()),
            )


SOME = (
    {"w8", "w3 asymmetric", "w4 2:4", "float8", "mxfp4"},
    {"a8", "a5 asymmetric", "a8 outliers", "a4 int8 tail", "float8", "nvfp4"},
)


@pytest.mark.parametrize(("weights", "activations"), [x for x in PAIRS if x[0] in SOME[0] and x[1] in SOME[1]])
def test_the_batch_the_threads_and_the_instruction_set_do_not_matter(
    weights: str, activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = {name: library.load(name) for name in instruction_sets.available()}
    libraries["emulated"] = products.emulated("avx512")
    assert "portable" in libraries
    for seed, shape in enumerate(SHAPES):
        layer = layer_of(weights, activations, shape, torch.bfloat16, seed)
        layer.prepare()
        x = inputs(40, shape[1], torch.bfloat16, seed)
        together = layer(x)
        for number, (name, native) in enumerate(libraries.items()):
            monkeypatch.setattr(library, "load", lambda native=native: native)
            monkeypatch.setattr("runtime.kernels.cpu.integer.threads_for", lambda count, threads=1 + number: threads)
            assert torch.equal(layer(x), together), name
            order = torch.randperm(40)
            assert torch.equal(layer(x[order]), together[order]), name
            for row in range(6):
                assert torch.equal(layer(x[row : row + 1])[0], together[row]), (name, row)
        monkeypatch.undo()


@pytest.mark.parametrize(("weights", "activations"), [x for x in PAIRS if x[0] in SOME[0]])
def test_a_token_that_holds_no_numbers_spoils_only_itself(weights: str, activations: str) -> None:
    layer = layer_of(weights, activations, (33, 384), torch.float32, 0)
    layer.prepare()
    x = inputs(9, 384, torch.float32)
    expected = layer(x)
    x[2, 5], x[4, 7] = math.nan, math.inf
    y, others = layer(x), [0, 1, 3, 5, 6, 7, 8]
    assert bool(y[2].isnan().all())
    assert torch.equal(y[others], expected[others])
    if layer.layer.activations.dynamic is False:  # the largest code
        x[4, 7] = 1e30
        assert torch.equal(layer(x)[4], y[4])
    else:
        assert not bool(y[4].isfinite().any())


@pytest.mark.parametrize("activations", ["a8", "a8 asymmetric", "a8 outliers", "float8"])
def test_groups_of_zeros_that_are_left_out(activations: str) -> None:
    scheme = Scheme(GridScheme(4, "int", True, "group", 32), ACTIVATIONS[activations], "unstructured")
    weight = random_weight(scheme, (70, 384), torch.float32, 0)
    assert weight.mask is not None
    for codes in (weight.values, weight.mask):
        codes[:32, 64:192], codes[32:64, 320:] = 0, 0
    storage = formats.choose(scheme, (70, 384))
    entry = ModuleEntry(scheme, storage.name, storage.stored_count(storage.pack(weight)))
    layer = CompressedLinear.from_tensors(entry, (70, 384), storage.pack(weight), None, torch.float32)
    layer.prepare()
    assert layer.kernel_name == "int4-c-rounded, groups of zeros left out"
    x = inputs(40, 384, torch.float32)
    values, weights = rounded(x, layer), exact_weight(weight)
    bound = 2.0**-20 * (values.abs() @ weights.abs().t() + 1e-4)
    assert bool(((layer(x).double() - values @ weights.t()).abs() <= bound).all())
    x[1, 70], x[2, 330], x[3, 0] = math.inf, math.nan, -math.inf
    assert layer(x)[1:4].isnan().all(1).tolist() == [True] * 3


def test_one_scale_for_all_tokens_is_refused_by_name() -> None:
    layer = layer_of("w8", "a8", (8, 32), torch.float32, 0)
    entry = ModuleEntry(Scheme(WEIGHTS["w8"].weights, ActivationScheme(strategy="tensor")), layer.entry.format)
    other = CompressedLinear.from_tensors(entry, (8, 32), layer.stored(), None, torch.float32)
    with pytest.raises(CompressError, match="makes a token's result depend on the others"):
        other.prepare("int8-c-rounded")
