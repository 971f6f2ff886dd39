"""Float8 weights in blocks: nearest values by brute force, the bytes that the compressed-tensors package reads, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from compress.core.method import Problem
from compress.core.tensors import relative
from compress.model.input_statistics import StatisticsCollector
from compress.quantize import METHODS, resolve_scheme
from compress.quantize.objective import row_errors
from compress.weights.solver.group import solve_group
from runtime import formats
from runtime.errors import CompressError, RequestError
from runtime.formats.float8_block import Float8Block
from runtime.formats.quantization_config import ModuleEntry, build, parse
from runtime.formats.scheme import CompressedWeight, Scheme

SHAPES = [(256, 384), (200, 128), (1, 128), (300, 130), (129, 1)]  # whole blocks, and ragged ones


def hostile(shape: tuple[int, int]) -> torch.Tensor:
    weight = torch.randn(shape) * torch.logspace(-3, 1, shape[0])[:, None]
    weight[: min(128, shape[0]), :64] = 0
    weight[-1] *= 1e-30
    return weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compressed_tensors_has_the_same_scales_codes_and_weights(shape: tuple[int, int], dtype: torch.dtype) -> None:
    kind, weight = Float8Block(), hostile(shape).to(dtype)
    parameters = kind.fit(weight.float(), dtype)
    codes = kind.round(weight.float(), parameters)
    ours = CompressedWeight.of(codes, parameters, None, Scheme(kind), dtype)
    storage = formats.choose(Scheme(kind), shape)
    assert storage.name == "float-quantized"
    tensors = storage.pack(ours)
    arguments = QuantizationArgs(**kind.to_config())
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    reader: Any = BaseCompressor.get_value_from_registry(storage.name)
    theirs = reader.decompress(dict(tensors), scheme)["weight"]
    assert torch.equal(ours.dequantize(), theirs)
    back = storage.unpack(tensors, Scheme(kind), shape, dtype)
    assert torch.equal(back.dequantize(), theirs)
    # what they would have made of the weight
    rows, columns = (-(-side // 128) for side in shape)
    padded = torch.nn.functional.pad(weight, (0, columns * 128 - shape[1], 0, rows * 128 - shape[0]))
    blocks = padded.view(rows, 128, columns, 128)
    scale, _ = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), arguments)
    used = blocks.abs().amax((1, 3)) > 0
    assert torch.equal(tensors["weight_scale"][used], scale[used])
    written = reader.compress({"weight": weight.float(), "weight_scale": tensors["weight_scale"].float()}, scheme)
    assert torch.equal(written["weight"].float(), tensors["weight"].float())


def test_codes_are_the_nearest_of_all_values() -> None:
    kind, weight = Float8Block(8, 16, 8), hostile((40, 20))
    parameters = kind.fit(weight, torch.bfloat16)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    spread = parameters["scale"].float().repeat_interleave(16, 0)[:40].repeat_interleave(8, 1)[:, :20]
    nearest = (weight[..., None] - every[every.isfinite()] * spread[..., None]).abs().amin(-1)
    found = kind.dequantize(kind.round(weight, parameters), parameters, torch.float32)
    assert torch.allclose((weight - found).abs(), nearest, rtol=1e-4, atol=1e-9)
    for column in range(20):  # as the column loop rounds
        values, codes = kind.nearest(weight.T[column : column + 1].contiguous(), parameters, column)
        assert torch.equal(values[0], found[:, column])
        assert torch.equal(codes.float(), kind.round(weight, parameters)[:, column].float())


@pytest.mark.parametrize("rows", [128, 200])
def test_no_row_is_worse_than_rounded_to_nearest_and_most_are_better(rows: int) -> None:
    collector = StatisticsCollector(256)
    collector.add(torch.randn(600, 256) @ (torch.randn(256, 256) / 16 + 0.2 * torch.eye(256)))
    statistics, weights = collector.finish(), [torch.randn(rows, 256), 0.01 * torch.randn(64, 256)]
    found = []
    for method in ("rtn", "gptq"):
        config = METHODS[method].config(scheme="FP8_BLOCK")
        found.append(solve_group(Problem(weights, statistics, None, config, resolve_scheme(config), torch.bfloat16)))
    for weight, plain, solved in zip(weights, *found, strict=True):
        before, after = (
            row_errors(weight - f.weight.dequantize().float(), statistics.hessian) for f in (plain, solved)
        )
        assert bool((after <= before * (1 + 1e-4)).all())
        assert float(after.sum()) < 0.8 * float(before.sum())
        assert torch.equal(plain.weight.parameters["scale"], solved.weight.parameters["scale"])


def test_config_json_in_the_words_of_compressed_tensors() -> None:
    entry = ModuleEntry(resolve_scheme(METHODS["rtn"].config(scheme="FP8_BLOCK")), "float-quantized")
    config = build({"a": entry}, ["a", "b"])
    assert config["quant_method"] == "compressed-tensors"
    assert config["config_groups"]["group_0"]["weights"]["block_structure"] == [128, 128]
    assert parse(config, ["a", "b"])["a"] == entry
    config["config_groups"]["group_0"]["format"] = "naive-quantized"
    assert parse(config, ["a", "b"])["a"] == entry


def test_what_is_refused() -> None:
    kind = Float8Block()
    with pytest.raises(RequestError, match="dense weights only"):
        formats.choose(Scheme(kind, None, "2:4"), (128, 128))
    with pytest.raises(RequestError, match="not whole groups of 128"):
        formats.choose(resolve_scheme(METHODS["rtn"].config(scheme="FP8_BLOCK")), (128, 192))
    with pytest.raises(RequestError, match="has a fixed bits"):
        resolve_scheme(METHODS["rtn"].config(scheme="FP8_BLOCK", bits=8))
    with pytest.raises(CompressError, match="share their scales"):
        kind.rows(kind.fit(torch.randn(4, 4), torch.float32), torch.tensor([1]))
    with pytest.raises(ValueError, match="block_structure"):
        Float8Block.from_arguments({"strategy": "block", "block_structure": "128x128"})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_small_blocks_are_not_wiped(dtype: torch.dtype) -> None:
    weight = torch.randn(128, 128).clamp(-2, 2) * 6e-6
    scheme = Float8Block()
    parameters = scheme.fit(weight, dtype)
    assert bool((parameters["scale"] > 0).all())
    found = scheme.dequantize(scheme.round(weight, parameters), parameters, torch.float32)
    assert relative(found, weight) < 0.1
    assert torch.equal(scheme.fit(torch.zeros(128, 128), dtype)["scale"], torch.ones(1, 1, dtype=dtype))
