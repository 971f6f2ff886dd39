"""Encoders and encoder-decoders as ONNX: compressed, loaded back, equal to the artifact, alone and padded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from encoder_models import bert, byte_tokenizer, t5
from seq2seq_export import check_writes_what_the_artifact_writes, compressed

import export
import runtime
from export.source import Source

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
TEXTS = ["one", "two words", "a much longer line of words that needs more room", "x"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory, tiny_text: Path) -> Path:
    import compress

    source = tmp_path_factory.mktemp("bert")
    bert().save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    recipe = {
        "name": "bert", "model": str(source), "stages": [{"quantize": {"method": "rtn", "scheme": "W8A8-INT8"}}],
        "calibration": {"data": str(tiny_text), "samples": 4, "sequence_length": 32},
        "evaluate": {"data": str(tiny_text), "sequence_length": 32, "samples": 2},
    }  # fmt: skip
    return compress.apply(recipe, output=source.parent / "bert-w8a8", quiet=True).path


@pytest.mark.slow
@pytest.mark.parametrize("ort", [False, True], ids=["standard", "ort"])
def test_an_encoder_embeds_as_the_artifact_does(encoder: Path, tmp_path: Path, ort: bool) -> None:
    result = export.export(encoder, "onnx", tmp_path / "out", ort=ort, quiet=True)
    assert result.verification is not None
    assert result.verification.metrics["fused"] == "12 MatMulInteger"
    model, artifact = runtime.load(tmp_path / "out"), runtime.load(encoder, dtype="float32")
    together = model.embed(TEXTS)
    assert torch.nn.functional.cosine_similarity(together, artifact.embed(TEXTS)).min() > 0.999
    for row, text in enumerate(TEXTS):
        assert torch.allclose(model.embed(text), together[row], atol=2e-2)
    assert model.stats["engine"].startswith("ONNX Runtime")


@pytest.mark.slow
@pytest.mark.parametrize("ort", [False, True], ids=["standard", "ort"])
def test_an_encoder_decoder_writes_what_the_artifact_writes(tmp_path: Path, tiny_text: Path, ort: bool) -> None:
    t5().save_pretrained(tmp_path / "t5")
    byte_tokenizer(False).save_pretrained(tmp_path / "t5")
    artifact = compressed(tmp_path / "t5", tiny_text, 32)
    check_writes_what_the_artifact_writes(artifact, tmp_path / "out", ort, max_new_tokens=12)
    # The file of weights holds the shared table once.
    stored = (tmp_path / "out" / "model.onnx.data").stat().st_size
    assert stored < 1.3 * Source(artifact).bytes


@pytest.mark.slow
@pytest.mark.parametrize("ort", [False, True], ids=["standard", "ort"])
def test_a_layer_that_is_called_again_is_stored_once(tmp_path: Path, ort: bool) -> None:
    """ALBERT: every block is the same one."""
    from transformers import AlbertConfig, AlbertModel

    torch.manual_seed(0)
    config = AlbertConfig(
        vocab_size=260, embedding_size=32, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=64,
    )  # fmt: skip
    AlbertModel(config).save_pretrained(tmp_path / "albert")
    result = export.export(tmp_path / "albert", "onnx", tmp_path / "out", ort=ort, quiet=True)
    assert result.verification is not None
    assert result.verification.metrics["cosine_worst"] > 1 - 1e-6
    assert result.verification.metrics["size"] < 1.05
