"""Sliding windows in ONNX: every token is kept, the window is in the mask, and the numbers are the artifact's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import export
import runtime

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

SETTINGS: dict[str, Any] = {
    "vocab_size": 257, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 16, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": 256, "pad_token_id": None,
}  # fmt: skip
# Windows shorter than the texts of the proof (3, also shorter than the example's past; 16), than those below (16), and than none.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral-3": ("Mistral", {"sliding_window": 3}),
    "mistral-16": ("Mistral", {"sliding_window": 16}),
    "mistral-64": ("Mistral", {"sliding_window": 64}),
    "mistral-4096": ("Mistral", {"sliding_window": 4096}),
    "gemma2-16": ("Gemma2", {"sliding_window": 16, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}),
    "qwen2-16": ("Qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}),
}
LAYERS = {  # the windows of the layers
    "mistral-3": [3, 3], "mistral-16": [16, 16], "mistral-64": [64, 64], "mistral-4096": [4096, 4096],
    "gemma2-16": [16, 0], "qwen2-16": [0, 16],
}  # fmt: skip
KINDS = [(name, ort) for name in MODELS for ort in (False, True)]


def save(folder: Path, family: str, **changes: Any) -> Path:
    """A random model whose attention tells tokens apart, so that a wrong window shows."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SETTINGS, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 1.5 / parameter.shape[1] ** 0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=KINDS, ids=[f"{name}-{'ort' if ort else 'standard'}" for name, ort in KINDS])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bool, Path, Path]:
    """Name, dialect, model and its export."""
    name, ort = request.param
    family, changes = MODELS[name]
    folder = tmp_path_factory.mktemp(name)
    model = save(folder / "model", family, **changes)
    export.export(model, "onnx", folder / "out", ort=ort, quiet=True)
    return name, ort, model, folder / "out"


@pytest.mark.sampled(2, 5)
def test_windows_give_the_artifacts_numbers(pair: tuple[str, bool, Path, Path]) -> None:
    """Prefill in one piece and in pieces, alone and in a batch with padding, past the window; the same tokens."""
    name, ort, model, exported = pair
    assert windows(exported) == (LAYERS[name] if ort else None)
    artifact, onnx = runtime.load(model, dtype="float32"), runtime.load(exported)
    ids = torch.randint(0, 256, (2, 80), generator=torch.Generator().manual_seed(1))
    wanted = artifact.logits(ids)
    assert torch.allclose(onnx.logits(ids), wanted, atol=2e-4)
    engine, start, found = onnx.engine, 0, []
    cache, mask = engine.new_cache(), torch.ones(2, 80, dtype=torch.int64)
    mask[1, :9] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for length in [7, 1, 30, 1, 1, 40]:
        part = slice(start, start + length)
        found.append(engine.forward(ids[:, part], cache, mask[:, : start + length], positions[:, part]))
        start += length
    pieces = torch.cat(found, 1)
    assert torch.allclose(pieces[0], wanted[0], atol=2e-4)
    assert torch.allclose(pieces[1, 9:], artifact.logits(ids[1:, 9:])[0], atol=2e-4)
    prompts = [ids[0, :30].tolist(), ids[1, :21].tolist(), ids[1, :2].tolist()]
    options: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
    assert onnx.generate(prompts, **options) == artifact.generate(prompts, **options)


def test_a_window_matters(tmp_path: Path) -> None:
    """The comparison above can fail: another window gives other numbers."""
    ids = torch.arange(40)[None]
    found = [
        runtime.load(save(tmp_path / str(window), "Mistral", sliding_window=window), dtype="float32").logits(ids)
        for window in (16, 15)
    ]
    assert torch.allclose(found[0][:, :15], found[1][:, :15], atol=1e-5)
    assert not torch.allclose(found[0][:, 15:], found[1][:, 15:], atol=1e-2)


@pytest.mark.slow
def test_a_mask_that_the_attributes_do_not_tell_keeps_standard_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PhiMoE makes a mask with a window and passes attention none: GroupQueryAttention would see all tokens. So does this Mistral."""
    from transformers.models.mistral import modeling_mistral

    ours = modeling_mistral.MistralAttention.forward

    def without(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        self.config = copy.copy(config)
        self.config.sliding_window = None  # what the mark reads; the mask was made before
        try:
            return ours(self, *args, **kwargs)
        finally:
            self.config = config

    monkeypatch.setattr(modeling_mistral.MistralAttention, "forward", without)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # graphs are kept by model, and this one is another
    model = save(tmp_path / "model", "Mistral", sliding_window=64)
    export.export(model, "onnx", tmp_path / "out", ort=True, quiet=True)
    assert windows(tmp_path / "out") is None
    ids = torch.randint(0, 256, (1, 100), generator=torch.Generator().manual_seed(1))
    wanted = runtime.load(model, dtype="float32").logits(ids)
    assert torch.allclose(runtime.load(tmp_path / "out").logits(ids), wanted, atol=2e-4)


@pytest.mark.slow
def test_a_window_in_a_bundle_for_tensorrt(tmp_path: Path) -> None:
    """The same trace; its proof runs the graph on texts longer than the window."""
    model = save(tmp_path / "model", "Mistral", sliding_window=16)
    result = export.export(model, "tensorrt", tmp_path / "out", bundle=True, quiet=True)
    assert result.verification is not None
    assert result.verification.metrics["kl"] < 1e-5
    assert result.verification.metrics["same_tokens"] == result.verification.metrics["tokens"]


def windows(exported: Path) -> list[int] | None:
    """`local_window_size` of each GroupQueryAttention, 0 for none; None without that operator."""
    import onnx

    graph = onnx.load(str(exported / "model.onnx"), load_external_data=False).graph
    nodes = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    given = [{attribute.name: attribute.i for attribute in node.attribute} for node in nodes]
    return [attributes.get("local_window_size", 0) for attributes in given] or None
