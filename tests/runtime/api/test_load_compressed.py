"""runtime.load of compressed artifacts: the model computes with exactly the stored weights, and holds them packed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_models import BATCH, SCHEMES, compress, inside_blocks
from safetensors.torch import load_file, save_file
from tiny_models import gpt2, llama, save
from transformers import LlamaForCausalLM

import runtime
from runtime.engines.native.engine import NativeEngine
from runtime.errors import ArtifactError, RequestError
from runtime.formats.k_quant import KQuant
from runtime.formats.scheme import CompressedWeight, Scheme
from runtime.kernels.cpu import library

BUNDLED = Path(__file__).parents[3] / "recipes" / "checkpoints" / "stdlib-4m"


def dense_twin(model: Any, weights: dict[str, CompressedWeight], dtype: torch.dtype | None = None) -> Any:
    """`model` with its weights replaced by what the compressed ones stand for, in `dtype`."""
    for name, weight in weights.items():
        module = model.get_submodule(name)
        dense = replace(weight, dtype=dtype or weight.dtype).dequantize()
        module.weight = torch.nn.Parameter(dense.T.contiguous() if type(module).__name__ == "Conv1D" else dense)
    return model


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    return float((a - b).norm() / b.norm()) <= tolerance


OWN_KERNELS = {
    "mxfp4-pack-quantized": "fp4-c",
    "nvfp4-pack-quantized": "fp4-c",
    "mxfp8-quantized": "float8-c",
    "k_quant": "k-quant-c",
    "trellis": "trellis-c",
    "row_codebook": "row-codebook-c",
    "dfloat11": "dfloat11-c",
    "ternary_dictionary": "ternary-c",
}


@pytest.mark.parametrize("storage", [name for name, scheme in SCHEMES.items() if scheme.activations is None])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@torch.inference_mode()
def test_weight_only_formats_compute_with_the_stored_weights(tmp_path: Path, storage: str, kernels: str) -> None:
    original = llama()
    weights = compress(original, tmp_path / "m", inside_blocks(storage))
    assert len(weights) == 14
    model = runtime.load(tmp_path / "m", kernels=kernels)
    expected = dense_twin(llama(), weights)(BATCH).logits
    assert close(model.logits(BATCH), expected, 1e-5)
    assert not close(llama()(BATCH).logits, expected, 1e-3)  # compression did change something
    assert set(model.explain()) - {"model"} == set(weights) | {"lm_head"}
    if kernels == "reference":
        assert {model.explain()[name] for name in weights} == {"reference"}
    elif storage in OWN_KERNELS and library.load() is not None:
        assert {model.explain()[name] for name in weights} == {OWN_KERNELS[storage]}
        assert type(model.engine) is NativeEngine
    assert len(model.generate("cat", max_new_tokens=5)) > 0


@pytest.mark.skipif(library.load() is None, reason="needs a C compiler")
@pytest.mark.parametrize("kind", ["Q2_K", "Q4_K", "Q6_K"])
@torch.inference_mode()
def test_the_bundled_checkpoint_in_k_quants(tmp_path: Path, kind: str) -> None:
    bundled = LlamaForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    scheme = Scheme(KQuant(kind))
    compress(bundled, tmp_path / "m", lambda name: ("k_quant", scheme) if name.endswith("_proj") else None)
    model, plain = (runtime.load(tmp_path / "m", kernels=kernels) for kernels in ("auto", "reference"))
    assert type(model.engine) is NativeEngine
    assert set(model.explain().values()) >= {"k-quant-c"}
    assert "reference" not in model.explain().values()
    assert close(model.logits(BATCH), plain.logits(BATCH), 1e-5)
    assert not close(bundled(BATCH).logits, plain.logits(BATCH), 1e-3)


@pytest.mark.parametrize("storage", ["int-quantized", "float-quantized"])
@torch.inference_mode()
def test_quantized_activations(tmp_path: Path, storage: str) -> None:
    weights = compress(llama(), tmp_path / "m", inside_blocks(storage))
    expected = dense_twin(llama(), weights)(BATCH).logits
    logits = runtime.load(tmp_path / "m").logits(BATCH)
    assert close(logits, expected, 0.3)  # e4m3 has 3 bits of mantissa
    assert not torch.equal(logits, expected)
    assert close(logits, runtime.load(tmp_path / "m", kernels="reference").logits(BATCH), 1e-3)


@torch.inference_mode()
def test_heads_and_embeddings_compress_when_they_are_not_tied(tmp_path: Path) -> None:
    scheme = ("pack-quantized", SCHEMES["pack-quantized"])
    for names in ({"lm_head"}, {"lm_head", "model.embed_tokens"}):
        path = tmp_path / str(len(names))
        twin = llama(tie_word_embeddings=False)
        weights = compress(twin, path, lambda name, names=names: scheme if name in names else None)
        assert close(runtime.load(path).logits(BATCH), dense_twin(twin, weights)(BATCH).logits, 1e-5)
    compress(llama(), tmp_path / "tied", lambda name: scheme if name == "lm_head" else None)
    with pytest.raises(ArtifactError, match=r"ties lm_head\.weight"):
        runtime.load(tmp_path / "tied")


@torch.inference_mode()
def test_conv1d_layers(tmp_path: Path) -> None:
    scheme = ("packed", SCHEMES["packed"])
    weights = compress(
        gpt2(), tmp_path / "m", lambda name: scheme if name.rpartition(".")[2].startswith("c_") else None
    )
    assert len(weights) == 8
    assert close(runtime.load(tmp_path / "m").logits(BATCH), dense_twin(gpt2(), weights)(BATCH).logits, 1e-5)


def test_weights_stay_packed_in_memory(tmp_path: Path) -> None:
    compress(llama(hidden_size=128, intermediate_size=512).bfloat16(), tmp_path / "m", inside_blocks("sparse24"))
    save(llama(hidden_size=128, intermediate_size=512).bfloat16(), tmp_path / "dense")
    model, dense = runtime.load(tmp_path / "m", kernels="reference"), runtime.load(tmp_path / "dense")
    outside = 400 * 128 * 2
    packed = model.stats["weight_bytes"] - outside
    assert packed < (dense.stats["weight_bytes"] - outside) * 3.7 / 16
    model.generate([5, 6, 7], max_new_tokens=4)
    assert model.stats["weight_bytes"] - outside == packed


@torch.inference_mode()
def test_another_compute_dtype_keeps_the_stored_weights(tmp_path: Path) -> None:
    for storage in ("pack-quantized", "bitmap"):
        path = tmp_path / storage
        weights = compress(llama().bfloat16(), path, inside_blocks(storage))
        model = runtime.load(path, dtype="float32", kernels="reference")
        assert {p.dtype for p in model.engine.module.parameters()} == {torch.float32}
        twin = llama()  # not made by .float(): a bfloat16 module has rounded rotary frequencies
        twin.load_state_dict(llama().bfloat16().state_dict())
        twin = dense_twin(twin, weights, torch.float32).float()
        assert close(model.logits(BATCH), twin(BATCH).logits, 1e-5)


def test_kernels_that_do_not_exist(tmp_path: Path) -> None:
    compress(llama(), tmp_path / "m", inside_blocks("pack-quantized"))
    with pytest.raises(RequestError, match="referense"):
        runtime.load(tmp_path / "m", kernels="referense")


NAME = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{NAME}.weight_packed"), f"tensor {NAME}.weight_packed is missing"),
        (lambda t: t.pop(f"{NAME}.weight_scale"), f"tensor {NAME}.weight_scale is missing"),
        (lambda t: t.update({f"{NAME}.weight_scale": torch.ones(96, 3)}), r"weight_scale has shape \[96, 3\]"),
        (lambda t: t.update({f"{NAME}.weight_packed": t[f"{NAME}.weight_packed"].float()}), "weight_packed is float32"),
        (lambda t: t.update({f"{NAME}.weight": torch.ones(96, 64)}), f"no place for tensor {NAME}.weight"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, change: Any, message: str) -> None:
    compress(llama(), tmp_path / "m", inside_blocks("pack-quantized"))
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(ArtifactError, match=message):
        runtime.load(tmp_path / "m")
