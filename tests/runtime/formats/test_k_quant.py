"""K-quants: the gguf package reads the same weights out of any bytes, codes are the nearest of all, what is refused."""

from __future__ import annotations

import numpy
import pytest
import torch
from weight_cases import hostile_weights

from compress.quantize import METHODS, resolve_scheme
from runtime import formats
from runtime.errors import ArtifactError, CompressError, RequestError
from runtime.formats.k_quant import IQ4_VALUES, KINDS, KQuant
from runtime.formats.presets import PRESETS
from runtime.formats.quantization_config import ModuleEntry, build, parse
from runtime.formats.scheme import CompressedWeight, Scheme

BITS = {"Q2_K": 2.625, "Q3_K": 3.4375, "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.25}


@pytest.mark.parametrize("kind", KINDS)
def test_the_gguf_package_reads_the_same_weights(kind: str) -> None:
    """Any bytes: every number that a block can hold, not only those that we write."""
    gguf = pytest.importorskip("gguf")
    form = KQuant(kind)
    shape = (33, 768)
    stored = torch.randint(0, 256, form.tensors(shape, torch.bfloat16)["weight_blocks"].shape, dtype=torch.uint8)
    codes, parameters = form.decode({"weight_blocks": stored}, shape)
    assert torch.equal(form.encode(codes, parameters)["weight_blocks"], stored)
    with numpy.errstate(all="ignore"):  # the fp16 factors may be NaN or infinite
        theirs = torch.from_numpy(gguf.quants.dequantize(stored.numpy(), gguf.GGMLQuantizationType[kind]))
    ours = form.dequantize(codes, parameters, torch.float32)
    same = (ours.view(torch.int32) == theirs.view(torch.int32)) | (ours.isnan() & theirs.isnan())
    assert bool(same.all())


@pytest.mark.parametrize("kind", KINDS)
def test_stored_weights_come_back(kind: str) -> None:
    form = KQuant(kind)
    weight = hostile_weights(20, 512)
    parameters = form.fit(weight, torch.bfloat16)
    ours = CompressedWeight.of(form.round(weight, parameters), parameters, None, Scheme(form), torch.bfloat16)
    storage = formats.choose(Scheme(form), (20, 512))
    tensors = storage.pack(ours)
    assert storage.name == "k_quant"
    assert 8 * tensors["weight_blocks"].numel() / weight.numel() == BITS[kind]
    assert storage.bytes_estimate(Scheme(form), (20, 512), torch.bfloat16) == tensors["weight_blocks"].numel()
    back = storage.unpack(tensors, Scheme(form), (20, 512), torch.bfloat16)
    assert torch.equal(back.dequantize(), ours.dequantize())
    chosen = storage.select_rows(tensors, Scheme(form), (20, 512), torch.tensor([3, 0, 19]))
    part = storage.unpack(chosen, Scheme(form), (3, 512), torch.bfloat16)
    assert torch.equal(part.dequantize(), ours.dequantize()[[3, 0, 19]])
    with pytest.raises(ArtifactError, match="weight_blocks"):
        storage.unpack(
            {"weight_blocks": tensors["weight_blocks"][:, :-1]}, Scheme(form), (20, 512), torch.bfloat16, "layer"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_the_nearest_of_all_values(kind: str) -> None:
    form = KQuant(kind)
    weight = hostile_weights(24, 256)
    parameters = form.fit(weight, torch.bfloat16)
    found = form.dequantize(form.round(weight, parameters), parameters, torch.float32)
    every = torch.tensor(IQ4_VALUES) if form.table else torch.arange(form.code_range[0], form.code_range[1] + 1)
    width = form.width(256)
    scale = (parameters["d"].float().repeat_interleave(form.unit(256) // width, 1) * parameters["scale"]).double()
    values = scale.repeat_interleave(width, 1)[..., None] * every
    if "dmin" in parameters:
        minimum = parameters["dmin"].double().repeat_interleave(form.unit(256) // width, 1) * parameters["minimum"]
        values = values - minimum.repeat_interleave(width, 1)[..., None]
    nearest = (weight[..., None] - values).abs().amin(-1)
    slack = 1e-6 * weight.abs().amax(1, keepdim=True) + 1e-12  # of float32
    assert bool(((weight - found).abs() <= nearest * (1 + 1e-6) + slack).all())
    assert float(nearest[7:].square().sum() / weight[7:].square().sum()) < 0.3**2 * 4.0 ** (2 - form.bits) * 4


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_taken_apart_again(kind: str) -> None:
    """Whatever fp16 factor and integers made a scale, factor and integers are found that make the same."""
    form, rows = KQuant(kind), 400
    own = form.facts
    factor = (torch.randn(rows, 2) * torch.logspace(-6, 2, rows)[:, None]).half().float()
    factor = factor.abs() if own.low >= 0 else factor
    levels = torch.randint(own.low, own.high + 1, (rows, 2 * own.block // own.width)).float()
    products = levels * factor.repeat_interleave(own.block // own.width, 1)
    d, integers = form.levels(products)
    assert torch.equal(d.half().float(), d)
    assert torch.equal(integers * d.repeat_interleave(own.block // own.width, 1), products)
    assert own.low <= int(integers.min()) or bool((products == 0).any())
    assert int(integers.max()) <= own.high
    with pytest.raises(CompressError, match="no integers times an fp16 number"):
        form.levels(torch.full_like(products, 1.0001))


@pytest.mark.parametrize("kind", KINDS)
def test_config_json_says_the_kind(kind: str) -> None:
    entry = ModuleEntry(Scheme(KQuant(kind)), "k_quant")
    config = build({"a": entry}, ["a", "b"])
    assert config["quant_method"] == "compress"
    assert config["config_groups"]["group_0"]["weights"] == {"representation": "k_quant", "kind": kind}
    assert parse(config, ["a", "b"])["a"] == entry
    assert PRESETS[kind] == Scheme(KQuant(kind))
    assert resolve_scheme(METHODS["rtn"].config(scheme=kind.lower())) == Scheme(KQuant(kind))


def test_what_is_refused() -> None:
    config = METHODS["gptq"].config
    with pytest.raises(RequestError, match="has a fixed group_size"):
        resolve_scheme(config(scheme="Q4_K", group_size=32))
    with pytest.raises(RequestError, match="is weight-only"):
        resolve_scheme(config(scheme="Q4_K", activations="int8"))
    with pytest.raises(RequestError, match="rows of 384 weights are not whole blocks of 256"):
        formats.choose(Scheme(KQuant("Q4_K")), (8, 384))
    with pytest.raises(RequestError, match="dense weights only"):
        formats.choose(Scheme(KQuant("Q4_K"), None, "2:4"), (8, 256))
    with pytest.raises(RequestError, match="no kind 'Q7_K'"):
        resolve_scheme(config(scheme={"representation": "k_quant", "kind": "Q7_K"}))
    with pytest.raises(RequestError, match="not bits"):
        resolve_scheme(config(scheme={"representation": "k_quant", "kind": "Q4_K", "bits": 4}))
