"""LLM.int8(): inputs above a threshold stay as they are, token by token."""

from __future__ import annotations

import math
from dataclasses import replace

import products
import pytest
import torch
from weight_cases import random_weight

from runtime import formats, kernels
from runtime.errors import ArtifactError
from runtime.formats.quantization_config import OWN_METHOD, SHARED_METHOD, ModuleEntry, build, parse
from runtime.formats.scheme import ActivationScheme, CompressedWeight, GridScheme, Scheme
from runtime.kernels.activations import fake_quantize
from runtime.kernels.cpu import library
from runtime.kernels.triton.linear import W8A8Triton
from runtime.layers.compressed_linear import CompressedLinear

needs_c = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")
KEPT = ActivationScheme(outliers=6.0)
SCHEME = Scheme(GridScheme(8, "int", True, "channel"), KEPT)
SCHEMES = [
    Scheme(GridScheme(8, "int", symmetric, strategy), KEPT)
    for symmetric in (True, False)
    for strategy in ("channel", "tensor")
]
SHAPES = [(1, 1), (7, 172), (33, 257), (64, 384), (95, 31)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layer_of(
    scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, bias: bool = True, seed: int = 0
) -> tuple[CompressedLinear, CompressedWeight]:
    weight, storage = random_weight(scheme, shape, dtype, seed), formats.choose(scheme, shape)
    offset = torch.randn(shape[0]).to(dtype) if bias else None
    entry = ModuleEntry(scheme, storage.name)
    return CompressedLinear.from_tensors(entry, shape, storage.pack(weight), offset, dtype), weight


def inputs(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows by turns: no outlier, some, all, exactly at the threshold, huge ones, zeros and one outlier."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator).clamp(-5, 5)
    for row in range(rows):
        kind, where = row % 6, torch.rand(columns, generator=generator) < 0.05
        if kind == 1:
            x[row, where] *= 40
        elif kind == 2:
            x[row] = x[row].sign() * (x[row].abs() + 6.1)
        elif kind == 3:
            x[row, where] = 6.0
        elif kind == 4:
            x[row, where] = 6e4 if dtype == torch.float16 else 1e30
        elif kind == 5:
            x[row] = 0
            x[row, -1] = -77.0
    return x.to(dtype)


def plain(x: torch.Tensor, limit: float) -> torch.Tensor:
    """What the inputs become, one number after another."""
    out = x.clone()
    for row in out:
        rest = [i for i, value in enumerate(row.tolist()) if abs(value) <= limit]
        scale = row[rest].abs().max() / 127.5 if rest else row.new_tensor(0)
        scale = scale if scale > 0 else scale + torch.finfo(x.dtype).eps
        for i in rest:
            row[i] = (row[i] / scale).clamp(-128, 127).round() * scale
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_are_rounded_one_token_at_a_time(dtype: torch.dtype) -> None:
    for columns in (1, 31, 172):
        x = inputs(12, columns, dtype)
        found = fake_quantize(x, KEPT, {})
        assert torch.equal(found, plain(x, 6.0))
        assert torch.equal(found[x.abs() > 6], x[x.abs() > 6])
        assert torch.equal(fake_quantize(x.view(3, 4, columns), KEPT, {}).view(12, columns), found)
    small = torch.randn(5, 64).clamp(-5, 5).to(dtype)
    assert torch.equal(fake_quantize(small, KEPT, {}), fake_quantize(small, ActivationScheme(), {}))


@needs_c
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_threshold_that_the_dtype_does_not_have(dtype: torch.dtype) -> None:
    scheme = replace(SCHEME, activations=ActivationScheme(outliers=6.11))
    layer, _ = layer_of(scheme, (33, 64), dtype, bias=False)
    x = torch.randn(4, 64).clamp(-5, 5).to(dtype)
    x[0, 3], x[1, 4] = 6.125, 6.0938
    assert fake_quantize(x, scheme.activations, {})[0, 3] == x[0, 3]
    expected = layer(x)
    layer.prepare()
    assert layer.kernel_name == "int8-c-rounded"
    assert (layer(x) - expected).norm() <= 0.01 * expected.norm()


def test_what_is_at_the_threshold_is_rounded() -> None:
    x = torch.tensor([[6.0, -6.0, 6.0001, 0.03]])
    found = fake_quantize(x, KEPT, {})
    assert found[0, 2] == x[0, 2]
    assert found[0, 0] == 127 * (6 / 127.5)
    assert found[0, 1] == -128 * (6 / 127.5)


@needs_c
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.grid.strategy} {s.grid.symmetric}")
def test_the_kernel_computes_what_the_reference_does(scheme: Scheme) -> None:
    for seed, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            layer, weight = layer_of(scheme, shape, dtype, bias=seed % 2 == 0, seed=seed)
            assert [k.name for k in kernels.candidates(layer.layer)] == ["int8-c-rounded", "reference"]
            layer.prepare()
            assert layer.kernel_name == "int8-c-rounded"
            assert torch.equal(layer.dequantize(), weight.dequantize())
            for rows in (0, 1, 3, 17, 70):
                x = inputs(rows, shape[1], dtype, seed)
                wide = weight.scheme.weights.dequantize(weight.values, weight.parameters, torch.float32).double()
                terms = fake_quantize(x, KEPT, {}).double(), wide
                exact, reach = terms[0] @ terms[1].t(), terms[0].abs() @ terms[1].abs().t()
                if layer.bias is not None:
                    exact = exact + layer.bias.double()
                unit = 2.0**-15 if dtype == torch.float32 else 2 * products.UNIT[dtype]
                bound = unit * reach + products.UNIT[dtype] * exact.abs() + 1e-6
                y = layer(x)
                assert y.dtype == dtype
                largest = torch.finfo(dtype).max
                fits = exact.abs() + bound < largest
                assert bool(((y.double() - exact).abs() <= bound)[fits].all()), (shape, dtype, rows)


@needs_c
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_batch_gives_each_row_what_it_gives_alone(dtype: torch.dtype) -> None:
    for seed, shape in enumerate(SHAPES):
        layer, _ = layer_of(SCHEMES[seed % 4], shape, dtype, seed=seed)
        layer.prepare()
        for rows in (2, 13, 70):
            x = inputs(rows, shape[1], dtype, seed + rows)
            together = layer(x)
            order = torch.randperm(rows)
            assert torch.equal(layer(x[order]), together[order])
            for row in range(rows):
                assert torch.equal(layer(x[row : row + 1])[0], together[row])


@needs_c
def test_a_token_that_holds_no_numbers_spoils_only_itself() -> None:
    layer, _ = layer_of(SCHEME, (33, 257), torch.float32)
    layer.prepare()
    x = inputs(9, 257, torch.float32)
    expected = layer(x)
    x[2, 5], x[4, 7] = math.nan, math.inf
    y = layer(x)
    assert bool(y[2].isnan().all())
    assert not bool(y[4].isfinite().any())
    others = [0, 1, 3, 5, 6, 7, 8]
    assert torch.equal(y[others], expected[others])


@needs_c
def test_planted_outliers_cost_far_less_than_without_the_threshold() -> None:
    shape = (256, 512)
    kept, weight = layer_of(SCHEME, shape, torch.float32, bias=False)
    rounded, _ = layer_of(replace(SCHEME, activations=ActivationScheme()), shape, torch.float32, bias=False)
    x = torch.randn(20, 512)
    x[:, [3, 77, 400]] *= 60
    exact = x @ weight.dequantize().t()
    errors = []
    for layer in (kept, rounded):
        layer.prepare()
        errors.append(float((layer(x) - exact).norm()))
    assert errors[0] < errors[1] / 10


def test_without_a_compiler_the_reference_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _ = layer_of(SCHEME, (8, 16), torch.float32)
    monkeypatch.setattr(library, "load", lambda: None)
    assert [k.name for k in kernels.candidates(layer.layer)] == ["reference"]


def test_gpu_kernels_say_why_they_do_not_fit() -> None:
    layer, _ = layer_of(SCHEME, (32, 64))
    reason = W8A8Triton().why_not_scheme(layer.layer)
    assert reason == "outliers of its inputs are not rounded, and this kernel multiplies codes only"


def test_the_configuration_is_ours_and_comes_back() -> None:
    layer, _ = layer_of(SCHEME, (32, 64))
    assert layer.entry.format == "int-quantized"
    config = build({"a": layer.entry}, ["a", "b"])
    assert config["quant_method"] == OWN_METHOD
    assert config["config_groups"]["group_0"]["input_activations"]["outliers"] == 6.0
    assert parse(config, ["a", "b"]) == {"a": layer.entry}
    without = replace(layer.entry, scheme=replace(SCHEME, activations=ActivationScheme()))
    config = build({"a": without}, ["a", "b"])
    assert config["quant_method"] == SHARED_METHOD
    assert "outliers" not in config["config_groups"]["group_0"]["input_activations"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outliers": 0}, "a positive number, not 0"),
        ({"outliers": -6.0}, "a positive number, not -6"),
        ({"outliers": math.inf}, "a positive number, not inf"),
        ({"outliers": math.nan}, "a positive number, not nan"),
        ({"outliers": "6"}, "outliers is '6', expected a positive number"),
        ({"outliers": True}, "outliers is True"),
        ({"symmetric": False}, "symmetric integers with one dynamic scale per token"),
        ({"dynamic": False, "strategy": "tensor"}, "symmetric integers with one dynamic scale per token"),
        ({"strategy": "tensor"}, "symmetric integers with one dynamic scale per token"),
        ({"strategy": "group", "group_size": 32}, "symmetric integers with one dynamic scale per token"),
        ({"type": "float"}, "symmetric integers with one dynamic scale per token"),
    ],
)
def test_configurations_that_mean_nothing(change: dict, message: str) -> None:
    layer, _ = layer_of(SCHEME, (32, 64))
    config = build({"a": layer.entry}, ["a"])
    config["config_groups"]["group_0"]["input_activations"] |= change
    with pytest.raises(ArtifactError, match=message):
        parse(config, ["a"])
