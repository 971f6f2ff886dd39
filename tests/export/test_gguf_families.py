"""Which models `--target gguf` takes: read back exactly, same tokens in llama.cpp; what llama.cpp would compute otherwise is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import export_gguf, read_gguf, save_model

import export
from runtime.errors import RequestError

gguf = pytest.importorskip("gguf")
LLAMA_CPP = importlib.util.find_spec("llama_cpp") is not None


_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, biases everywhere": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama with wide heads": (
        "llama",
        {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
    ),
    "llama 3": ("llama", {"rope_parameters": _LLAMA3, "head_dim": 32}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}}),
    "llama yarn": ("llama", {"rope_parameters": _YARN, "head_dim": 32}),
    "mistral": ("mistral", {"head_dim": 16, "num_key_value_heads": 4}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": {**_YARN, "attention_factor": 1.3}}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


@pytest.mark.parametrize("name", _FAMILIES)
def test_families(tmp_path: Path, name: str) -> None:
    """Read back exactly; and where llama.cpp is there, the same logits and tokens with matrices of float32."""
    family, changes = _FAMILIES[name]
    save_model(family, tmp_path / "model", **changes)
    result = export_gguf(tmp_path / "model", tmp_path / "out", dense="f32")
    keys, tensors = read_gguf(result.path)
    arch = keys["general.architecture"]
    assert arch == {"llama": "llama", "mistral": "llama"}.get(family, family)
    assert keys[f"{arch}.block_count"] == 2
    assert keys[f"{arch}.context_length"] == 128
    assert keys[f"{arch}.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-4)
    assert ("output.weight" in tensors) != changes.get("tie_word_embeddings", False)
    assert ("rope_freqs.weight" in tensors) == (name == "llama 3")
    assert len(tensors) == result.verification.metrics["read_tensors"] + (name == "llama 3")
    if LLAMA_CPP:
        assert result.verification.metrics["kl"] < 1e-6
        assert result.verification.metrics["same_tokens"] == result.verification.metrics["tokens"]
        assert result.verification.metrics["same_token_ids"] is True
    else:
        assert any("llama-cpp-python is not installed" in note for note in result.verification.notes)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gpt2", {}, "model type 'gpt2' is none that this target knows"),
        ("llama", {"hidden_act": "gelu"}, "its activation is gelu"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "scaled by 'dynamic'",
        ),
        ("llama", {"rope_parameters": {**_YARN, "beta_fast": 16}}, "beta_fast"),
        ("qwen2", {"rope_parameters": _LLAMA3}, "reads no rotary factors"),
        ("qwen2", {"head_dim": 32}, "4 heads of 32 are not the hidden size 64"),
        ("qwen3", {"attention_bias": True}, r"o_proj\.bias is a bias that llama\.cpp does not add"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], reason: str
) -> None:
    save_model(family, tmp_path / "model", **changes)
    with pytest.raises(RequestError, match=reason):
        export_gguf(tmp_path / "model", tmp_path / "out")
    assert export.fitting(tmp_path / "model")["gguf"] is not None
    assert not (tmp_path / "out").exists()


def test_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_model("llama", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.layers.0.extra.weight": torch.zeros(2, 2)}, file, metadata={"format": "pt"})
    with pytest.raises(RequestError, match=r"model\.layers\.0\.extra\.weight"):
        export_gguf(tmp_path / "model", tmp_path / "out")
    computed = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
    save_file({**tensors, **computed}, file, metadata={"format": "pt"})
    result = export_gguf(tmp_path / "model", tmp_path / "out", verify=False)
    assert any(set(c.modules) == set(computed) and "left out" in c.what for c in result.conversions)
    save_file({k: v for k, v in tensors.items() if "up_proj" not in k}, file, metadata={"format": "pt"})
    with pytest.raises(RequestError, match=r"up_proj\.weight"):
        export_gguf(tmp_path / "model", tmp_path / "out2")


def test_a_sliding_window_bounds_the_context(tmp_path: Path) -> None:
    save_model("mistral", tmp_path / "model", sliding_window=48)
    result = export_gguf(tmp_path / "model", tmp_path / "out", verify=False)
    keys, _ = read_gguf(result.path)
    assert keys["llama.context_length"] == 48
    assert any("context 128 becomes 48" in c.what for c in result.conversions)


def test_tied_matrices_that_differ_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_model("llama", tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(RequestError, match=r"lm_head\.weight.*model\.embed_tokens\.weight"):
        export_gguf(tmp_path / "model", tmp_path / "out")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    result = export_gguf(tmp_path / "model", tmp_path / "out", verify=False)
    assert "output.weight" not in read_gguf(result.path)[1]
