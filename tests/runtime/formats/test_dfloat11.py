"""DFloat11: every bfloat16 number comes back, sizes, lookups by row, damaged tensors by name, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from compress.quantize import METHODS, candidate_schemes, resolve_scheme
from runtime import formats
from runtime.errors import ArtifactError, CompressError, RequestError
from runtime.formats.dfloat11 import DFloat11
from runtime.formats.presets import PRESETS
from runtime.formats.quantization_config import ModuleEntry, build, parse
from runtime.formats.representation import Tensors
from runtime.formats.scheme import CompressedWeight, Scheme

STORAGE = formats.get("dfloat11")
EVERY = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def stored(weight: torch.Tensor, form: DFloat11 | None = None) -> tuple[DFloat11, Tensors]:
    form = form or DFloat11().for_weight(weight)
    parameters = form.fit(weight, torch.bfloat16)
    codes = form.round(weight, parameters)
    return form, STORAGE.pack(CompressedWeight.of(codes, parameters, None, Scheme(form), torch.bfloat16))


def back(form: DFloat11, tensors: Tensors, shape: Any) -> torch.Tensor:
    return STORAGE.unpack(tensors, Scheme(form), tuple(shape), torch.bfloat16, "layer").dequantize()


def bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int16)


def size(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("shape", [(256, 256), (1, 65536), (4096, 16)])
def test_every_bfloat16_number_comes_back(shape: tuple[int, int], width: int) -> None:
    weight = EVERY.view(shape)
    form, tensors = stored(weight, DFloat11(width))
    assert torch.equal(bits(back(form, tensors, shape)), bits(weight))
    wide = form.round(weight.float(), {})  # as solvers have them
    assert torch.equal(wide, bits(weight))


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 8), (2, 257), (33, 1001), (16, 64)])
def test_ragged_and_hostile_matrices_come_back(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(shape[1])
    normal = (torch.randn(shape, generator=generator) * 0.02).bfloat16()
    uniform = EVERY[torch.randint(0, 2**16, shape, generator=generator)]
    for weight in (normal, uniform, torch.zeros(shape, dtype=torch.bfloat16), torch.full(shape, -1.5).bfloat16()):
        for form, tensors in (stored(weight), *(stored(weight, DFloat11(width)) for width in (2, 3, 4))):
            assert torch.equal(bits(back(form, tensors, shape)), bits(weight))
            assert tensors["weight_exponents"].numel() == 2**form.code_bits - 1
            rows = torch.arange(shape[0]).flip(0)[: max(1, shape[0] // 2)]
            chosen = STORAGE.select_rows(tensors, Scheme(form), shape, rows)
            assert torch.equal(bits(back(form, chosen, (len(rows), shape[1]))), bits(weight[rows]))


def test_the_width_of_codes_is_the_one_of_fewest_bytes() -> None:
    normal, exponents = torch.randn(64, 512), torch.arange(14) - 7
    cases = {2: torch.ones(64, 512), 3: normal, 4: 2.0 ** exponents[torch.randint(0, 14, (64, 512))]}
    for width, weight in cases.items():
        form, tensors = stored(weight.bfloat16())
        assert form.code_bits == width
        assert size(tensors) == min(size(stored(weight.bfloat16(), DFloat11(other))[1]) for other in (2, 3, 4))


def test_normally_distributed_weights_take_30_percent_less() -> None:
    for scale in (0.02, 0.025, 0.03):
        weight = (torch.randn(256, 2048) * scale).bfloat16()
        form, tensors = stored(weight)
        shape, scheme = (256, 2048), Scheme(form)
        assert form.code_bits == 3
        assert 11.1 < 8 * size(tensors) / weight.numel() < 11.3
        estimate = STORAGE.bytes_estimate(scheme, shape, torch.bfloat16)
        assert estimate == pytest.approx(size(tensors), rel=0.01)
        count = STORAGE.stored_count(tensors)
        specs = STORAGE.tensors(scheme, shape, torch.bfloat16, count)
        assert sum(spec.bytes for spec in specs.values()) == size(tensors)
        assert math.isclose(form.bits, 8 * size(tensors) / weight.numel(), rel_tol=0.01)


def test_float32_weights_are_not_rounded_in_silence() -> None:
    with pytest.raises(CompressError, match="what bfloat16 holds exactly"):
        DFloat11().round(torch.tensor([[1 + 2**-10]]), {})
    assert "float16" in str(DFloat11().why_not_dtype(torch.float16))
    assert DFloat11().why_not_dtype(torch.bfloat16) is None


def damaged(tensors: Tensors, name: str, change: Any) -> Tensors:
    tensor = tensors[name].clone()
    change(tensor)
    return tensors | {name: tensor}


@pytest.mark.parametrize("name", ["exponents", "codes", "codes beyond", "row_offsets", "escapes", "few escapes"])
def test_damaged_tensors_are_named(name: str) -> None:
    weight = (torch.randn(16, 60) * 0.02).bfloat16()
    form, good = stored(weight, DFloat11(3))
    key = f"weight_{name.split()[0]}"
    if name == "exponents":
        bad = damaged(good, key, lambda t: t.copy_(torch.full_like(t, 7)))
    elif name == "codes":
        key, bad = "weight_row_offsets", damaged(good, key, lambda t: t[3, :, 2].fill_(255))
    elif name == "codes beyond":
        bad = damaged(good, key, lambda t: t[5, 1, -1].fill_(255))
    elif name == "row_offsets":
        bad = damaged(good, key, lambda t: t[4].add_(1))
    elif name == "escapes":
        bad = damaged(good, key, lambda t: t[0].copy_(good["weight_exponents"][0]))
    else:
        key, bad = "weight_row_offsets", good | {"weight_escapes": good["weight_escapes"][:-1]}
    with pytest.raises(ArtifactError, match=rf"layer\.{key}"):
        back(form, bad, (16, 60))


def test_config_json_says_the_width_and_the_count() -> None:
    entries = {f"layer{i}": ModuleEntry(Scheme(DFloat11(i + 2)), "dfloat11", 100 + i) for i in range(3)}
    config = build(entries, [*entries, "head"])
    assert config["quant_method"] == "compress"
    assert config["config_groups"]["group_1"]["weights"] == {"representation": "dfloat11", "code_bits": 3}
    assert parse(config, [*entries, "head"]) == entries
    del config["value_counts"]["layer1"]
    with pytest.raises(ArtifactError, match="no count for layer1, stored as dfloat11"):
        parse(config, [*entries, "head"])
    config["config_groups"]["group_0"]["weights"]["code_bits"] = 7
    with pytest.raises(ArtifactError, match="code_bits"):
        parse(config, [*entries, "head"])


def quantize(method: str = "rtn", **fields: Any) -> Any:
    return METHODS[method].config(**{"scheme": "DF11", **fields})


def test_what_a_recipe_may_say() -> None:
    assert resolve_scheme(quantize()) == PRESETS["DF11"] == Scheme(DFloat11())
    represented = {"representation": "dfloat11"}
    assert resolve_scheme(quantize(scheme=represented)) == Scheme(DFloat11())
    for config, said in (
        (quantize("gptq"), "method must be rtn, not gptq"),
        (quantize("awq"), "method must be rtn, not awq"),
        (quantize("gptq", scheme=represented), "scheme dfloat11 stores weights without loss"),
        (quantize(objective="propagated"), "objective must be layer, not propagated"),
        (quantize(quality="best"), "objective must be layer, not propagated"),
        (quantize(scales="minmax"), "scales must be mse, not minmax"),
        (quantize(bits=4), "has a fixed bits"),
        (quantize(activations="int8"), "weight-only"),
        (quantize(scheme=represented, activations="int8"), "weight-only"),
    ):
        with pytest.raises(RequestError, match=said):
            resolve_scheme(config)
    with pytest.raises(RequestError, match="prunes them"):
        resolve_scheme(quantize(), "2:4")
    with pytest.raises(RequestError, match="depends on the weights"):
        candidate_schemes(quantize(scheme=None, bits=4.5, candidates=[4, "DF11"]))
