"""runtime.load of compressed artifacts: the model computes with exactly the stored weights, and holds them packed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import gpt2, llama, save

import runtime
from runtime import formats
from runtime.errors import ArtifactError, RequestError
from runtime.formats.quantization_config import ModuleEntry, build
from runtime.formats.scheme import ActivationScheme, CompressedWeight, Scheme, WeightScheme
from runtime.modeling.skeleton import linear_shapes

BATCH = torch.randint(2, 400, (2, 9), generator=torch.Generator().manual_seed(1))

SCHEMES = {
    "pack-quantized": Scheme(WeightScheme(4, group_size=32)),
    "int-quantized": Scheme(WeightScheme(8, strategy="channel"), ActivationScheme()),
    "float-quantized": Scheme(WeightScheme(8, "float", strategy="channel"), ActivationScheme(8, "float")),
    "packed": Scheme(WeightScheme(3, symmetric=False, group_size=40)),
    "sparse24": Scheme(WeightScheme(4, group_size=32), sparsity="2:4"),
    "bitmap": Scheme(None, sparsity="unstructured"),
}


def nearest(weight: torch.Tensor, scheme: Scheme) -> CompressedWeight:
    """Round to nearest; zeros where the pattern wants them."""
    dtype, mask = weight.dtype, None
    if scheme.sparsity == "2:4":
        order = weight.abs().reshape(weight.shape[0], -1, 4).argsort(-1, descending=True)
        mask = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order[..., :2], True).reshape(weight.shape)
    elif scheme.sparsity == "unstructured":
        mask = weight.abs() > weight.abs().median()
    if mask is not None:
        weight = weight * mask
    grid = scheme.weights
    if grid is None:
        return CompressedWeight(weight, None, None, mask, scheme, dtype)
    size = grid.group_size or weight.shape[1]
    chunks = weight.float().split(size, dim=1)
    low = torch.stack([c.amin(1).clamp(max=0) for c in chunks], 1)
    high = torch.stack([c.amax(1).clamp(min=0) for c in chunks], 1)
    index = torch.arange(weight.shape[1]) // size
    if grid.type == "float":
        scale = (torch.maximum(-low, high) / 448).to(dtype)
        values = (weight.float() / scale.float()[:, index]).clamp(-448, 448).to(torch.float8_e4m3fn)
        return CompressedWeight(values, scale, None, mask, scheme, dtype)
    smallest, largest = grid.code_range
    zero = None
    if grid.symmetric:
        scale = (torch.maximum(-low, high) / largest).to(dtype)
        codes = weight.float() / scale.float()[:, index]
    else:
        scale = ((high - low) / (largest - smallest)).to(dtype)
        zero = (smallest - low / scale.float()).round().clamp(smallest, largest).to(torch.int8)
        codes = weight.float() / scale.float()[:, index] + zero.float()[:, index]
    return CompressedWeight(codes.round().clamp(smallest, largest).to(torch.int8), scale, zero, mask, scheme, dtype)


def compress(model: Any, path: Path, choose: Any) -> dict[str, CompressedWeight]:
    """Write `model` as an artifact; `choose(name)` gives (format, scheme) or None. Returns the compressed weights."""
    save(model, path)
    tensors = load_file(path / "model.safetensors")
    entries, weights = {}, {}
    for name, module in model.named_modules():
        chosen = choose(name)
        if chosen is None:
            continue
        storage, scheme = formats.get(chosen[0]), chosen[1]
        transposed = type(module).__name__ == "Conv1D"
        dense = module.weight.data
        weight = nearest(dense.T.contiguous() if transposed else dense, scheme)
        tensors.pop(f"{name}.weight", None)
        tensors |= {f"{name}.{key}": value for key, value in storage.pack(weight).items()}
        entries[name] = ModuleEntry(scheme, chosen[0], storage.count(weight))
        weights[name] = weight
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = build(entries, list(linear_shapes(model)))
    (path / "config.json").write_text(json.dumps(config))
    return weights


def dense_twin(model: Any, weights: dict[str, CompressedWeight], dtype: torch.dtype | None = None) -> Any:
    """`model` with its weights replaced by what the compressed ones stand for, in `dtype`."""
    for name, weight in weights.items():
        module = model.get_submodule(name)
        dense = replace(weight, dtype=dtype or weight.dtype).dequantize()
        module.weight = torch.nn.Parameter(dense.T.contiguous() if type(module).__name__ == "Conv1D" else dense)
    return model


def inside_blocks(storage: str) -> Any:
    return lambda name: (storage, SCHEMES[storage]) if name.endswith("_proj") else None


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    return float((a - b).norm() / b.norm()) <= tolerance


@pytest.mark.parametrize("storage", ["pack-quantized", "packed", "sparse24", "bitmap"])
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
    assert set(model.explain()) == set(weights) | {"lm_head"}
    if kernels == "reference":
        assert {model.explain()[name] for name in weights} == {"reference"}
    assert len(model.generate("cat", max_new_tokens=5)) > 0


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
