"""The network of native layers, recorded: counts, names, shapes and types beside the model's; wrong names fail offline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_tensorrt import module
from fake_tensorrt.builder import Builder
from fake_tensorrt.compute import RefusedError
from fake_tensorrt.install import install

import export

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

LAYERS, HIDDEN, INNER, HEADS, KV, VOCABULARY = 2, 128, 256, 4, 2, 257
SIZE = HIDDEN // HEADS
LENGTH = 64


@pytest.fixture
def network(made: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    install(monkeypatch)

    def build(kind: str, **options: Any) -> Any:
        given = {"dtype": "float16", "max_length": LENGTH, "max_prompt": 16, "requantize": kind != "dense", **options}
        export.export(made(kind), "tensorrt", tmp_path / "out", quiet=True, verify=False, network="native", **given)
        return Builder.last[0]

    return build


def test_layers_of_a_dense_model(network: Callable[..., Any]) -> None:
    found = network("dense")
    kinds = Counter(layer._kind for layer in found._layers)
    assert kinds["attention_v2"] == LAYERS
    assert kinds["kv_cache_update"] == 2 * LAYERS
    assert kinds["rotary_embedding"] == 2 * LAYERS
    assert kinds["matrix_multiply"] == 7 * LAYERS + 1
    assert kinds["reduce"] == 2 * LAYERS + 1  # one a norm
    assert kinds["activation"] == LAYERS
    assert kinds["gather"] == 2  # the embedding, and the rows whose logits are wanted
    assert kinds["dequantize"] == kinds["quantize"] == 0
    # A matrix a layer of the model but the output layer, which is the embedding; norms; rotation, scale and epsilon.
    assert kinds["constant"] == 1 + 7 * LAYERS + 2 * LAYERS + 1 + 4


@pytest.mark.parametrize(
    ("kind", "codes", "quantizers"), [("w4_g128", "INT4", 0), ("w8a8_static", "INT8", 1), ("fp8_static", "FP8", 1)]
)
def test_quantized_layers(network: Callable[..., Any], kind: str, codes: str, quantizers: int) -> None:
    found = network(kind)
    kinds = Counter(layer._kind for layer in found._layers)
    matrices = 7 * LAYERS
    assert kinds["quantize"] == quantizers * matrices
    assert kinds["dequantize"] == (1 + quantizers) * matrices
    weights = [layer for layer in found._layers if layer._kind == "constant" and layer.name.endswith(".weight_codes")]
    assert len(weights) == matrices
    assert {layer._output.dtype.name for layer in weights} == {codes}
    down = next(layer for layer in weights if layer.name == "model.layers.0.mlp.down_proj.weight_codes")
    assert down._output.shape == (INNER, HIDDEN)
    scale = next(layer for layer in found._layers if layer.name == "model.layers.0.mlp.down_proj.weight_scale")
    per_tensor = {"fp8_static": ()}
    assert scale._output.shape == ((INNER // 128, HIDDEN) if codes == "INT4" else per_tensor.get(kind, (HIDDEN,)))
    assert scale._output.dtype.name == "HALF"


def test_shapes_and_types(network: Callable[..., Any]) -> None:
    found = network("dense")
    tensors = {layer.name: (layer._output.shape, layer._output.dtype.name) for layer in found._layers}
    assert tensors["model.embed_tokens/Gather"] == ((-1, -1, HIDDEN), "HALF")
    block = "model.layers.1"
    assert tensors[f"{block}.self_attn.q_proj/rotated"] == ((-1, HEADS, -1, SIZE), "HALF")
    assert tensors[f"{block}.self_attn.k_proj/rotated"] == ((-1, KV, -1, SIZE), "HALF")
    assert tensors[f"{block}.self_attn"] == ((-1, HEADS, -1, SIZE), "HALF")
    assert tensors[f"{block}.self_attn/merged"] == ((-1, -1, HEADS * SIZE), "HALF")
    assert tensors[f"{block}.mlp.gate_proj/MatMul"] == ((-1, -1, INNER), "HALF")
    assert tensors[f"{block}.input_layernorm/mean"] == ((-1, -1, 1), "FLOAT")
    assert tensors[block] == ((-1, -1, HIDDEN), "HALF")
    assert tensors["computed.rotation.cosine"] == ((LENGTH, SIZE // 2), "HALF")
    inputs = {tensor.name: (tensor.shape, tensor.dtype.name) for tensor in found._inputs}
    assert inputs["input_ids"] == ((-1, -1), "INT64")
    assert inputs["write_indices"] == inputs["key_value_lengths"] == ((-1,), "INT32")
    assert inputs["cache.1.value"] == ((-1, KV, LENGTH, SIZE), "HALF")
    assert len(inputs) == 5 + 2 * LAYERS
    outputs = {tensor.name: tensor.shape for tensor in found._outputs}
    assert outputs["logits"] == (-1, -1, VOCABULARY)
    assert outputs["cache_out.0.key"] == (-1, KV, LENGTH, SIZE)
    assert len(outputs) == 1 + 2 * LAYERS


def test_every_constant_has_its_name(network: Callable[..., Any]) -> None:
    """Names are what refitting goes by."""
    found = network("w4_g128")
    constants = [layer for layer in found._layers if layer._kind == "constant"]
    assert sorted(found._names) == sorted(layer.name for layer in constants)
    assert all(layer.name for layer in found._layers)


def test_a_model_with_biases_and_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys are normalized, projections have biases, the head is no table; tokens are checked, too."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    install(monkeypatch)
    torch.manual_seed(1)
    config = Qwen3Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        vocab_size=97, max_position_embeddings=64, tie_word_embeddings=False, attention_bias=True, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    model.save_pretrained(tmp_path / "qwen3")
    options = {"network": "native", "dtype": "float32", "max_prompt": 8}
    result = export.export(tmp_path / "qwen3", "tensorrt", tmp_path / "out", quiet=True, **options)
    assert result.verification is not None
    assert result.verification.metrics["same_tokens"] == result.verification.metrics["tokens"]
    layers = Builder.last[0]._layers
    assert sum(layer._kind == "reduce" for layer in layers) == 2 + 2 + 1
    assert sum(layer.name.endswith(".bias") for layer in layers) == 4
    assert sum(layer._kind == "matrix_multiply" for layer in layers) == 8


# ---------------------------------------------------------------- the stand-in itself refuses
def test_a_wrong_name_or_argument_fails() -> None:
    trt: Any = module()
    network = trt.Builder(None).create_network(0)
    x = network.add_input("x", trt.float32, (-1, 4))
    with pytest.raises(TypeError):
        network.add_cast(x, dtype=trt.float16)
    with pytest.raises(TypeError):
        network.add_cast(x)
    with pytest.raises(AttributeError, match="no add_rope"):
        network.add_rope(x)
    with pytest.raises(AttributeError, match="no property scale"):
        network.add_cast(x, trt.float16).scale = 1
    with pytest.raises(AttributeError):
        trt.CausalMaskKind.LOWER_LEFT  # noqa: B018
    with pytest.raises(AttributeError, match="no finish"):
        trt.IBuilderConfig._make().finish()


def test_what_is_not_of_one_type_is_refused() -> None:
    trt: Any = module()
    builder = trt.Builder(None)
    network, config = builder.create_network(0), builder.create_builder_config()
    x = network.add_input("x", trt.float32, (-1, 4))
    half = network.add_cast(x, trt.float16).get_output(0)
    network.add_elementwise(x, half, trt.ElementWiseOperation.SUM)
    profile = builder.create_optimization_profile()
    profile.set_shape("x", (1, 4), (2, 4), (3, 4))
    config.add_optimization_profile(profile)
    with pytest.raises(RefusedError, match="joins"):
        builder.build_serialized_network(network, config)
