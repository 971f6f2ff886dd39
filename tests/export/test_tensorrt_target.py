"""TensorRT: the bundle of every kind of artifact, the engine of the stand-in, a bundle finished, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_tensorrt.builder import Builder
from fake_tensorrt.install import install

import export
import runtime
from export.tensorrt import build
from runtime.errors import ArtifactError, CompressError, RequestError

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

Made = Callable[..., Path]
# Symmetric grids of the artifacts hold their extreme value, which makes scales negative; TensorRT wants them positive.
ANEW = {
    "w4_g128",
    "w8a8",
    "w8a8_static",
    "w8_channel",
    "sparse_w4",
    "w4_channel",
    "w3_g64",
    "w4_g32_asymmetric",
    "w4_g48",
}
SMALL: dict[str, Any] = {"dtype": "float32", "max_batch": 3, "max_length": 64, "max_prompt": 7, "optimum_prompt": 5}


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> Any:
    return install(monkeypatch)


def write(made: Made, out: Path, kind: str, **options: Any) -> Any:
    given = {**SMALL, **({"requantize": True} if kind in ANEW else {}), **options}
    return export.export(made(kind), "tensorrt", out, quiet=True, **given)


# ---------------------------------------------------------------- without TensorRT
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["dense", "w4_g128", "w8a8", "fp8_static", "w3_g64", "bitmap", "sparse_w4"])
def test_every_kind_has_a_bundle(made: Made, tmp_path: Path, kind: str) -> None:
    result = write(made, tmp_path / "out", kind)
    assert result.facts["engine"] is False
    found = result.verification.metrics
    assert found["rules"] >= 20
    assert found["kl"] < 1e-5
    assert found["same_tokens"] == found["tokens"] == 128
    # Where nothing is rounded anew and nothing left out, the tokens are the artifact's own.
    assert ("kl_of_change" in found) == (kind in ("w4_g128", "w8a8", "sparse_w4"))
    said = " ".join(result.facts["say"])
    assert "No engine was built" in said
    assert f"compress export {tmp_path / 'out'} --target tensorrt" in said
    assert any("nothing ran on TensorRT" in warning for warning in result.warnings)
    build = json.loads((tmp_path / "out" / "build.json").read_text())
    assert bool(build["sparse"]) == (kind == "sparse_w4")
    assert set(build["files"]) >= {"model.onnx", "probe.safetensors"}
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_half_precision_is_said_and_close(made: Made, tmp_path: Path) -> None:
    result = write(made, tmp_path / "out", "dense", dtype="float16")
    assert any("become float16" in c.what for c in result.conversions)
    assert result.verification.metrics["kl"] < 0.01


def test_a_bundle_is_not_loaded(made: Made, tmp_path: Path) -> None:
    write(made, tmp_path / "out", "dense")
    with pytest.raises(RequestError, match=r"compress export .* --target tensorrt"):
        runtime.load(tmp_path / "out", device="cpu")


def test_require_engine_refuses_and_leaves_nothing(made: Made, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="TensorRT"):
        write(made, tmp_path / "out", "dense", require_engine=True)
    assert list(tmp_path.glob("*out*")) == []


def test_finishing_needs_the_machine(made: Made, tmp_path: Path) -> None:
    write(made, tmp_path / "out", "dense", verify=False)
    with pytest.raises(RequestError, match="TensorRT"):
        export.export(tmp_path / "out", "tensorrt", tmp_path / "engine", quiet=True)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("w4_g32_asymmetric", "zero points"),
        ("w4_g48", "groups of 48"),
        ("w4_g128", "negative scales"),
    ],
)
def test_what_it_cannot_say_is_refused_by_name(made: Made, tmp_path: Path, kind: str, reason: str) -> None:
    with pytest.raises(RequestError, match=rf"model\.layers\.0\.\S+ has .*{reason}.*--requantize"):
        write(made, tmp_path / "out", kind, requantize=False)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    BertModel(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(RequestError, match=r"\bencoder\b"):
        export.export(tmp_path / "bert", "tensorrt", tmp_path / "out", quiet=True)


def test_attention_that_tensorrt_cannot_say_is_listed(tmp_path: Path) -> None:
    """Before anything is traced or written."""
    from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "vocab_size": 64,
    }  # fmt: skip
    Gemma2ForCausalLM(Gemma2Config(**sizes, head_dim=16)).save_pretrained(tmp_path / "capped")
    Gemma2ForCausalLM(Gemma2Config(**sizes, head_dim=16, attn_logit_softcapping=None)).save_pretrained(
        tmp_path / "plain"
    )
    LlamaForCausalLM(LlamaConfig(**sizes, head_dim=512)).save_pretrained(tmp_path / "wide")
    LlamaForCausalLM(LlamaConfig(**sizes, head_dim=256)).save_pretrained(tmp_path / "widest")
    found = {name: export.fitting(tmp_path / name)["tensorrt"] for name in ("capped", "plain", "wide", "widest")}
    assert found["plain"] is found["widest"] is None
    assert all(word in str(found["capped"]) for word in ("model.layers.0.self_attn", "50"))
    assert all(word in str(found["wide"]) for word in ("model.layers.0.self_attn", "512", "256"))
    with pytest.raises(RequestError, match="attn_logit_softcapping"):
        export.export(tmp_path / "capped", "tensorrt", tmp_path / "out", quiet=True)


def test_dropped_activation_grids_are_said(made: Made, tmp_path: Path) -> None:
    result = write(made, tmp_path / "out", "w8a8", verify=False)
    assert any("no longer rounded" in c.what for c in result.conversions)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_length": 4096}, "max_length.*4096.*128"),
        ({"max_prompt": 100}, "max_prompt.*100.*64"),
        ({"optimum_prompt": 9}, "optimum_prompt.*9.*7"),
        ({"optimum_batch": 9}, "optimum_batch.*9.*3"),
    ],
)
def test_limits_that_contradict_are_refused(made: Made, tmp_path: Path, options: dict[str, int], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        write(made, tmp_path / "out", "dense", **options)


# ---------------------------------------------------------------- with the stand-in
@pytest.mark.parametrize("kind", ["dense", "w4_g128", "w8a8_static", "fp8_static"])
def test_engines_compute_the_model(made: Made, tmp_path: Path, trt: Any, kind: str) -> None:
    result = write(made, tmp_path / "out", kind)
    assert result.facts["network"] == "onnx"
    found = result.verification.metrics
    assert found["kl"] < (5e-3 if kind.endswith("static") else 1e-5)
    assert found["tokens"] == 128
    assert found["same_tokens"] == 128 or kind.endswith("static")
    assert ("kl_of_change" in found) == (kind in ANEW)
    assert not list((tmp_path / "out").glob("*.onnx*"))
    assert "ONNX Runtime" not in result.verification.loader


@pytest.mark.parametrize("network", ["onnx", "native"])
def test_the_network_is_always_parsed(made: Made, tmp_path: Path, trt: Any, network: str) -> None:
    """What earlier versions built of TensorRT's own layers is built of the ONNX file too, and said so."""
    result = write(made, tmp_path / "out", "dense", network=network, verify=False)
    assert result.facts["network"] == "onnx"
    assert any("network=native" in warning for warning in result.warnings) == (network == "native")


def test_the_engine_and_the_bundle_say_the_same(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded anew in the same way, so that both are held against the same changed artifact."""
    bundle = write(made, tmp_path / "bundle", "w4_g128").verification.metrics
    install(monkeypatch)
    engine = write(made, tmp_path / "engine", "w4_g128").verification.metrics
    finished = export.export(tmp_path / "bundle", "tensorrt", tmp_path / "finished", quiet=True).verification
    assert finished is not None
    for found in (bundle, engine, finished.metrics):
        assert found["kl"] < 1e-5
        assert found["kl_of_change"] == bundle["kl_of_change"] > 1e-3


def test_a_bundle_is_finished_by_the_same_command(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(made, tmp_path / "bundle", "dense")
    install(monkeypatch)
    result = export.export(tmp_path / "bundle", "tensorrt", tmp_path / "engine", quiet=True, optimization_level=1)
    assert result.facts["engine"] is True
    assert result.facts["limits"]["max_batch"] == 3
    assert result.verification.metrics["same_tokens"] == result.verification.metrics["tokens"] == 128
    assert Builder.last[1].builder_optimization_level == 1
    manifest = json.loads((tmp_path / "engine" / "export.json").read_text())
    assert manifest["artifact"] == json.loads((tmp_path / "bundle" / "build.json").read_text())["artifact"]
    assert manifest["tensorrt"]["gpu"]["name"] == "Stand-in"
    model = runtime.load(tmp_path / "engine", device="cpu")
    assert isinstance(model.generate("line 1", max_new_tokens=4), str)


def test_a_damaged_or_foreign_bundle_is_refused(
    made: Made, tmp_path: Path, trt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "missing", lambda: "not yet")
    write(made, tmp_path / "bundle", "dense", verify=False)
    install(monkeypatch)
    with pytest.raises(RequestError, match=r"dtype.*'float16'.*'float32'"):
        export.export(tmp_path / "bundle", "tensorrt", tmp_path / "engine", quiet=True, dtype="float16")
    with pytest.raises(CompressError, match="--no-verify"):
        export.export(tmp_path / "bundle", "tensorrt", tmp_path / "engine", quiet=True)
    data = tmp_path / "bundle" / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-1] + b"!")
    with pytest.raises(ArtifactError, match=r"model\.onnx\.data"):
        export.export(tmp_path / "bundle", "tensorrt", tmp_path / "engine", quiet=True)
    (tmp_path / "bundle" / "build.json").write_text('{"kind": "tensorrt-bundle", "schema_version": 99}')
    with pytest.raises(ArtifactError, match=r"build\.json.*\b99\b"):
        export.export(tmp_path / "bundle", "tensorrt", tmp_path / "engine", quiet=True)


def test_flags_reach_the_builder(made: Made, tmp_path: Path, trt: Any) -> None:
    cache = tmp_path / "cache" / "timings.bin"
    cache.parent.mkdir()
    cache.write_bytes(b"foreign")
    result = write(
        made, tmp_path / "out", "sparse_w4", weight_streaming=True, refit="refit", version_compatible=True, workspace="1GiB",
        hardware_compatibility="ampere_plus", timing_cache=str(cache), optimization_level=5,
    )  # fmt: skip
    config = Builder.last[1]
    assert config._flags == {"SPARSE_WEIGHTS", "WEIGHT_STREAMING", "REFIT", "VERSION_COMPATIBLE"}
    assert config._pools == {"WORKSPACE": 1 << 30}
    assert config.hardware_compatibility_level.name == "AMPERE_PLUS"
    assert config.builder_optimization_level == 5
    assert any("another GPU or TensorRT version" in warning for warning in result.warnings)
    assert cache.read_bytes() == b"timings"


def test_a_stripped_plan_gets_its_weights_when_it_is_loaded(made: Made, tmp_path: Path, trt: Any) -> None:
    result = write(made, tmp_path / "out", "dense", refit="stripped")
    assert Builder.last[1]._flags == {"STRIP_PLAN", "REFIT_IDENTICAL"}
    assert result.verification.metrics["same_tokens"] == 128
    kept = tmp_path / "out" / result.facts["constants"]
    assert kept.is_file()
    shutil.move(kept, kept.with_suffix(".gone"))
    with pytest.raises(ArtifactError, match=r"model\.onnx"):
        runtime.load(tmp_path / "out", device="cpu", verify=False)


def test_a_parser_that_refuses_says_what(made: Made, tmp_path: Path, trt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx
    from fake_tensorrt.parser import OnnxParser

    real = onnx.load

    def load(path: Any, **options: Any) -> Any:
        model = real(path, **options)
        model.graph.node[0].domain = "com.example"
        return model

    monkeypatch.setattr(OnnxParser, "do_parse_from_file", _with(OnnxParser.do_parse_from_file, onnx, load))
    with pytest.raises(CompressError, match=r"model\.onnx: .*No importer"):
        write(made, tmp_path / "out", "dense", verify=False)
    assert list(tmp_path.iterdir()) == []


def _with(function: Any, onnx: Any, load: Any) -> Any:
    def call(self: Any, model: str) -> bool:
        real, onnx.load = onnx.load, load
        try:
            return bool(function(self, model))
        finally:
            onnx.load = real

    return call
