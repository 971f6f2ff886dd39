"""BART and its like as ONNX: a decoder that makes its own mask, positions with an offset, attention with biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_models import byte_tokenizer
from seq2seq_export import check_writes_what_the_artifact_writes, compressed

import export
from runtime.errors import RequestError

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def bart(folder: Path) -> Path:
    """A random BART (width 64, 2 + 2 layers)."""
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=260, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=64, decoder_start_token_id=256, pad_token_id=256,
        eos_token_id=259, bos_token_id=257, forced_eos_token_id=None,
    )  # fmt: skip
    model = BartForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15) if parameter.ndim == 2 else parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    byte_tokenizer(False).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("ort", [False, True], ids=["standard", "ort"])
def test_bart_writes_what_the_artifact_writes(tmp_path: Path, tiny_text: Path, ort: bool) -> None:
    artifact = compressed(bart(tmp_path / "bart"), tiny_text, 64)
    check_writes_what_the_artifact_writes(artifact, tmp_path / "out", ort, max_new_tokens=24, ignore_eos=True)


def test_a_decoder_that_looks_at_values_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.bart import modeling_bart

    ours = modeling_bart.BartDecoderLayer.forward

    def looks(self: Any, states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if states.sum().item() > 1e9:
            return states
        return ours(self, states, *args, **kwargs)

    monkeypatch.setattr(modeling_bart.BartDecoderLayer, "forward", looks)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(RequestError, match=r"BartForConditionalGeneration.*meta"):
        export.export(bart(tmp_path / "bart"), "onnx", tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()
