"""Block floats: nearest values by brute force, the bytes that the compressed-tensors package reads, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from weight_cases import hostile_weights

from compress.quantize import METHODS, resolve_scheme
from runtime import formats
from runtime.errors import CompressError, RequestError
from runtime.formats.block_float import BlockFloat, pack_e2m1, unpack_e2m1
from runtime.formats.presets import PRESETS
from runtime.formats.quantization_config import ModuleEntry, build, parse
from runtime.formats.scheme import CompressedWeight, Scheme

KINDS = {
    "NVFP4A16": (BlockFloat(4, group_size=16, scales="e4m3"), "nvfp4-pack-quantized"),
    "MXFP4A16": (BlockFloat(4), "mxfp4-pack-quantized"),
    "MXFP8A16": (BlockFloat(8), "mxfp8-quantized"),
}
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.mark.parametrize("name", KINDS)
def test_compressed_tensors_decodes_the_same_weights(name: str) -> None:
    kind, storage = KINDS[name]
    weight = hostile_weights(40, 96)
    parameters = kind.fit(weight, torch.bfloat16)
    codes = kind.round(weight, parameters)
    ours = CompressedWeight.of(codes, parameters, None, Scheme(kind), torch.bfloat16)
    tensors = formats.choose(Scheme(kind), (40, 96)).pack(ours)
    assert formats.choose(Scheme(kind), (40, 96)).name == storage
    arguments = QuantizationArgs(**kind.to_config())
    reader: Any = BaseCompressor.get_value_from_registry(storage)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    theirs = reader.decompress(dict(tensors), scheme)["weight"].to(torch.bfloat16)
    assert torch.equal(ours.dequantize(), theirs)
    back = formats.get(storage).unpack(tensors, Scheme(kind), (40, 96), torch.bfloat16)
    assert torch.equal(back.dequantize(), theirs)
    rows = torch.tensor([3, 0, 39])
    chosen = formats.get(storage).select_rows(tensors, Scheme(kind), (40, 96), rows)
    part = formats.get(storage).unpack(chosen, Scheme(kind), (3, 96), torch.bfloat16)
    assert torch.equal(part.dequantize(), theirs[rows])


@pytest.mark.parametrize("name", ["NVFP4A16", "MXFP4A16"])
def test_codes_are_the_nearest_of_all_values(name: str) -> None:
    kind, _ = KINDS[name]
    weight = hostile_weights(24, 64)
    parameters = kind.fit(weight, torch.bfloat16)
    found = kind.dequantize(kind.round(weight, parameters), parameters, torch.float32)
    scale = 2 * kind.steps(parameters).repeat_interleave(kind.width(64), 1)[..., None]
    every = torch.cat([VALUES, -VALUES]) * scale
    nearest = (weight[..., None] - every).abs().amin(-1)
    assert torch.allclose((weight - found).abs(), nearest, rtol=1e-5, atol=0)


def test_every_code_survives_packing() -> None:
    halves = torch.cat([2 * VALUES, -2 * VALUES[1:], torch.zeros(1)]).to(torch.int8)
    codes = torch.stack([halves, halves.flip(0)])
    assert torch.equal(unpack_e2m1(pack_e2m1(codes)), codes)
    assert int(unpack_e2m1(torch.tensor([[0x88]], dtype=torch.uint8)).abs().sum()) == 0  # minus zero


@pytest.mark.parametrize("name", KINDS)
def test_scales_cover_their_blocks_and_are_storable(name: str) -> None:
    kind, _ = KINDS[name]
    weight = hostile_weights(24, 64)[5:]
    own = kind.with_global_scale([weight])
    assert isinstance(own, BlockFloat)
    parameters = kind.fit(weight, torch.bfloat16)
    steps = kind.steps(parameters)
    assert torch.equal(own.storable(steps, torch.bfloat16), steps)
    most = steps * (own.code_range[1] if own.integral else 448)
    slack = 1.0 if kind.scales == "e8m0" else 1 + 2**-3  # a float8 scale may be rounded down
    assert bool((most * slack >= weight.view(19, -1, kind.width(64)).abs().amax(-1)).all())


def test_layers_that_engines_fuse_share_the_global_scale() -> None:
    kind = BlockFloat(4, group_size=16, scales="e4m3")
    small, large = torch.randn(4, 16), 20 * torch.randn(8, 16)
    bound = kind.with_global_scale([small, large])
    assert bound == kind  # no part of the scheme
    assert bound.global_scale == pytest.approx(448 * 4 / float(large.abs().max()))  # type: ignore[attr-defined]
    assert kind.with_global_scale([torch.zeros(2, 16)]).global_scale == 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", KINDS)
def test_config_json_in_the_words_of_compressed_tensors(name: str) -> None:
    kind, storage = KINDS[name]
    config = build({"a": ModuleEntry(Scheme(kind), storage)}, ["a", "b"])
    assert config["quant_method"] == "compressed-tensors"
    assert parse(config, ["a", "b"])["a"] == ModuleEntry(Scheme(kind), storage)
    assert PRESETS[name] == Scheme(kind)


def test_what_is_refused() -> None:
    config = METHODS["rtn"].config
    with pytest.raises(RequestError, match="has a fixed group_size"):
        resolve_scheme(config(scheme="NVFP4A16", group_size=32))
    with pytest.raises(RequestError, match="is weight-only"):
        resolve_scheme(config(scheme="MXFP4A16", activations="fp8"))
    with pytest.raises(RequestError, match="no pruned weights"):
        formats.choose(Scheme(BlockFloat(4), None, "2:4"), (8, 64))
    with pytest.raises(CompressError, match="code that e2m1 does not have"):
        pack_e2m1(torch.tensor([[5, 0]], dtype=torch.int8))
    with pytest.raises(RequestError, match="groups of 16 with e4m3"):
        formats.choose(Scheme(BlockFloat(4, group_size=32, scales="e4m3")), (8, 64))
    with pytest.raises(RequestError, match="not whole groups of 32"):
        formats.choose(Scheme(BlockFloat(4)), (8, 48))
    with pytest.raises(RequestError, match="has fixed activations"):
        resolve_scheme(config(scheme="NVFP4", activation_mode="static"))
