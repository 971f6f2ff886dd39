"""`runtime.load(scheme=...)`: a plain checkpoint rounded as it is read is what `compress apply` makes of it, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_models import bert, save, t5
from mixture_models import model_of
from safetensors.torch import load_file, save_file

import compress
import runtime
from compress.cli import main
from runtime.api.model import Model
from runtime.checkpoint.artifact import Artifact
from runtime.drafting.config.artifact_draft import choice_content
from runtime.engines.streaming import cache
from runtime.errors import ArtifactError, RequestError
from runtime.formats.presets import PRESETS
from runtime.layers.compressed_module import CompressedModule
from runtime.layers.rounding import read_scheme, round_artifact

IDS = torch.arange(3, 40)[None]
ALLOWED = [
    name
    for name, scheme in PRESETS.items()
    if scheme.grid is not None and scheme.grid.type == "int" and scheme.transform is None
]
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


def tensors(model: Any) -> dict[str, torch.Tensor]:
    module = model.engine.module
    return {
        f"{name}.{leaf}": tensor
        for name, layer in module.named_modules()
        if isinstance(layer, CompressedModule)
        for leaf, tensor in layer._buffers.items()
        if tensor is not None
    }


def applied(recipe: Any, source: Path, output: Path, scheme: str) -> Path:
    stage = {"quantize": {"method": "rtn", "scheme": scheme, "scales": "minmax"}}
    return compress.apply(recipe(source, stage), output=output, quiet=True).path


def compare(source: Path, artifact: Path, scheme: str, **options: Any) -> None:
    found = runtime.load(source, scheme=scheme, kernels="reference", **options)
    expected = runtime.load(artifact, kernels="reference", **options)
    mine, theirs = tensors(found), tensors(expected)
    assert mine.keys() == theirs.keys() != set()
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype
        assert torch.equal(mine[name], tensor), name
    if isinstance(found, Model):
        assert torch.equal(found.logits(IDS), expected.logits(IDS))
        found, expected = runtime.load(source, scheme=scheme, **options), runtime.load(artifact, **options)
        assert found.explain() == expected.explain()
        assert torch.equal(found.logits(IDS), expected.logits(IDS))


@pytest.mark.parametrize("scheme", ALLOWED)
def test_the_weights_are_those_of_apply(make_checkpoint: Any, recipe: Any, tmp_path: Path, scheme: str) -> None:
    source = make_checkpoint(**WIDE)
    compare(source, applied(recipe, source, tmp_path / "out", scheme), scheme)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_in_other_dtypes(make_checkpoint: Any, recipe: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    source = make_checkpoint(dtype=dtype, shards="60KB")
    # Rows of zeros, and of numbers whose scales are none of the dtype.
    for number, row in enumerate((0.0, 1e-30, 1e-7)):
        for file in source.glob("*.safetensors"):
            stored = load_file(file)
            for name, tensor in stored.items():
                if name.endswith("up_proj.weight"):
                    tensor[number] = row
            save_file(stored, file, {"format": "pt"})
    artifact = applied(recipe, source, tmp_path / "out", "LLM.int8")
    compare(source, artifact, "LLM.int8")
    compare(source, artifact, "llm.int8", dtype="bfloat16")


def test_weights_that_are_stored_wider_than_the_model_computes(
    make_checkpoint: Any, recipe: Any, tmp_path: Path
) -> None:
    source = make_checkpoint(dtype=torch.float32)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    (source / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    compare(source, applied(recipe, source, tmp_path / "out", "W8A16"), "W8A16")


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mixtral", "opt"])
def test_other_families(make_checkpoint: Any, recipe: Any, tmp_path: Path, family: str) -> None:
    source = make_checkpoint(family)
    compare(source, applied(recipe, source, tmp_path / "out", "W8A8-INT8"), "W8A8-INT8")


@pytest.mark.parametrize("make", [bert, t5], ids=lambda make: make.__name__)
def test_encoders(recipe: Any, tmp_path: Path, make: Callable[[], Any]) -> None:
    source = save(make(), tmp_path / "model")
    compare(source, applied(recipe, source, tmp_path / "out", "W8A8-INT8"), "W8A8-INT8")


def test_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    model_of("GptOss").save_pretrained(tmp_path / "model")
    with pytest.raises(RequestError, match="stores its experts in one tensor"):
        runtime.load(tmp_path / "model", scheme="LLM.int8")


def test_prepared_weights_of_two_schemes_are_apart(
    make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("runtime.engines.choose.SMALLEST", 1)
    source = make_checkpoint(num_hidden_layers=2)
    expected = {}
    for scheme in ("W8A8-INT8", "LLM.int8", "W8A16"):
        model = runtime.load(source, scheme=scheme)
        expected[scheme] = model.logits(IDS)
        assert torch.equal(runtime.load(source, scheme=scheme, verify=False).logits(IDS), expected[scheme])
    assert len(cache.contents()) == 3
    plain = runtime.load(source).logits(IDS)
    assert not any(torch.equal(plain, logits) for logits in expected.values())
    bounded = runtime.load(source, scheme="W8A16", max_memory="2GB")
    assert torch.equal(bounded.logits(IDS), expected["W8A16"])


@pytest.mark.parametrize("scheme", [name for name in PRESETS if name not in ALLOWED])
def test_other_schemes_are_refused(scheme: str) -> None:
    with pytest.raises(RequestError, match=r"only integer schemes without calibration can \(W2A16, .*LLM\.int8.*\)"):
        read_scheme(scheme)


@pytest.mark.parametrize("name", ["LLM.int8()", "llm_int8", "llm-int8"])
def test_other_spellings(name: str) -> None:
    assert read_scheme(name) is PRESETS["LLM.int8"]


@pytest.mark.parametrize("value", [8, True, ["W8A16"]])
def test_a_scheme_is_a_name(value: Any) -> None:
    with pytest.raises(RequestError, match="scheme must be the name of a preset, such as 'W8A16'"):
        runtime.load("no-such/model", scheme=value)  # before anything is downloaded


def test_a_choice_of_drafter_is_for_one_scheme(make_checkpoint: Any) -> None:
    source = Artifact(make_checkpoint())
    device = torch.device("cpu")
    versions = [source, *(round_artifact(source, name, False) for name in ("W8A16", "LLM.int8"))]
    choices = [choice_content("lookup", one, device) for one in versions]
    assert len({one["fingerprint"] for one in choices}) == 3


@pytest.mark.parametrize("options", [{"drafter": "lookup"}, {"kv_cache": "kivi"}, {"max_memory": "1GB"}], ids=str)
def test_with_other_options(make_checkpoint: Any, recipe: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    source = make_checkpoint("mixtral")
    artifact = applied(recipe, source, tmp_path / "out", "LLM.int8")
    found, expected = runtime.load(source, scheme="LLM.int8", **options), runtime.load(artifact, **options)
    assert found.generate([5, 6, 7, 5, 6], max_new_tokens=12) == expected.generate([5, 6, 7, 5, 6], max_new_tokens=12)


def test_what_is_refused(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    source = make_checkpoint()
    with pytest.raises(RequestError, match=r"scheme 'LLM\.int9' is unknown .*did you mean 'LLM\.int8'"):
        runtime.load(source, scheme="LLM.int9")
    with pytest.raises(RequestError, match=r"W4A16' does not fit model\.layers\.0\..*larger than the row of 64"):
        runtime.load(source, scheme="W4A16")
    with pytest.raises(RequestError, match="so its weights are quantized already"):
        runtime.load(applied(recipe, source, tmp_path / "out", "W8A16"), scheme="LLM.int8")
    broken = next(source.glob("*.safetensors"))
    stored = load_file(broken)
    stored["model.layers.0.mlp.up_proj.weight"][1, 2] = float("nan")
    save_file(stored, broken, {"format": "pt"})
    with pytest.raises(ArtifactError, match=r"up_proj\.weight holds NaN or Inf"):
        runtime.load(source, scheme="LLM.int8")


def test_the_command_line_takes_it(make_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    source = make_checkpoint()
    options = ["generate", str(source), "a", "--max-new-tokens", "2", "--scheme"]
    assert main([*options, "LLM.int8"]) == 0
    capsys.readouterr()
    assert (
        main(["eval", str(source), "--scheme", "LLM.int8", "--reference", str(source), "--samples", "2", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["kl"] > 0
    assert main([*options, "FP8"]) == 2
    assert "only integer schemes without calibration can" in capsys.readouterr().err
