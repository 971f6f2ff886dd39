"""Presets of compressed-tensors with float activations: bytes, weights and layers are those of that package and of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

import compress
import runtime
from compress.core.tensors import relative
from runtime.checkpoint.artifact import Artifact
from runtime.engines.blueprint import Blueprint
from runtime.formats.presets import PRESETS
from runtime.formats.scheme import Scheme
from runtime.layers.compressed_linear import CompressedLinear

#: Preset: its format, and who serves the artifact as it is.
KINDS = {
    "W4AFP8": ("pack-quantized", {"this runtime", "transformers", "vLLM"}),
    "FP8_BLOCK": ("float-quantized", {"this runtime", "transformers", "vLLM"}),
    "MXFP4": ("mxfp4-pack-quantized", {"this runtime", "transformers", "vLLM"}),
    "MXFP8": ("mxfp8-quantized", {"this runtime", "transformers", "vLLM"}),
    "NVFP4": ("nvfp4-pack-quantized", {"this runtime", "transformers", "vLLM"}),
}
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


@pytest.mark.parametrize("name", KINDS)
def test_presets_are_those_of_compressed_tensors(name: str) -> None:
    theirs = preset_name_to_scheme(name, ["Linear"])
    assert theirs.weights is not None
    assert theirs.input_activations is not None
    read = Scheme.from_config(
        {"weights": theirs.weights.model_dump(), "input_activations": theirs.input_activations.model_dump()}
    )
    assert read == PRESETS[name]
    assert Scheme.from_config(PRESETS[name].to_config()) == PRESETS[name]


@pytest.mark.sampled(5, 2)
@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("name", KINDS)
def test_an_artifact_computes_here_what_it_computes_in_transformers(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, name: str, method: str
) -> None:
    from transformers import AutoModelForCausalLM

    storage, readers = KINDS[name]
    request = recipe(make_checkpoint(**SIZES), {"quantize": {"method": method, "scheme": name}})
    path = compress.apply(request, output=tmp_path / "out", quiet=True).path
    manifest = json.loads((path / "compress.json").read_text())
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", storage)
    yes = {reader["name"] for reader in manifest["readable_by"] if reader["how"] == "yes"}
    assert yes == readers

    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    ids = torch.randint(0, 257, (2, 20))
    expected = theirs(ids).logits  # the first call decompresses theirs
    # In other arithmetic of 16 bits, inputs become other codes here and there; in float32 hardly any does.
    assert (
        relative(runtime.load(path, dtype="bfloat16", device="cpu", kernels="reference").logits(ids), expected) < 0.03
    )
    exact = (runtime.load(path, dtype="float32", device="cpu", kernels=kernels) for kernels in ("auto", "reference"))
    assert relative(*(model.logits(ids) for model in exact)) < 0.03
    module = Blueprint(Artifact(path), torch.device("cpu"), "auto", None, False).build_module()
    layers = {n: m for n, m in module.named_modules() if isinstance(m, CompressedLinear)}
    assert len(layers) == 14
    for place, ours in layers.items():
        ours.prepare("reference")
        other = theirs.get_submodule(place)
        assert torch.equal(ours.dequantize(), other.weight)
        x = (
            torch.randn(3, 5, ours.in_features).to(torch.bfloat16)
            * torch.tensor([0.01, 1, 100])[:, None, None].bfloat16()
        )
        assert torch.equal(ours(x), other(x))
        rounded = torch.nn.functional.linear(x, ours.dequantize(), ours.bias)
        assert not torch.equal(ours(x), rounded)
