"""A Llama-like decoder of TensorRT's own layers: grouped-query attention over a cache that is updated in place.

Rows of a batch are padded on the right; each says where its tokens go (`write_indices`) and how much of its cache then counts
(`key_value_lengths` = `write_indices` + sequence). Attention is causal from the lower right corner, so that token i of a step sees
the cache up to `write_indices + i`. What padding wrote is overwritten by the next step before anything can see it.

Semantics of the layers: documentation of TensorRT 11 (operators KVCacheUpdate, Attention, RotaryEmbedding) and the docstrings of
the Python bindings. One thing they leave open: that the lower right corner is the one of `key_value_lengths`, not of the whole
cache. It is taken so here; where it were not so, the tokens of the verification would differ, and the network of the ONNX parser
(option network) depends on nothing of this.
"""

from __future__ import annotations

from typing import Any

import torch

from export.tensorrt.layers import Layers
from export.tensorrt.model import DecoderModel
from export.tensorrt.profiles import Limits
from export.tensorrt.weights import OnnxWeights
from runtime.errors import CompressError

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"


def why_not(model: DecoderModel, weights: OnnxWeights | None = None) -> str | None:
    """Why this network cannot be made of TensorRT's own layers; None when it can. `weights` are looked at where they are there."""
    if model.unknown is not None:
        return model.unknown
    if weights is None:
        return None
    lacking = [name for name in (f"{EMBEDDING}.weight", *norm_names(model)) if name not in weights]
    return f"{weights.path.name} has no {lacking[0]}" if lacking else None


def norm_names(model: DecoderModel) -> list[str]:
    """Weights of all norms."""
    parts = ["input_layernorm", "post_attention_layernorm"]
    if model.norms:
        parts += ["self_attn.q_norm", "self_attn.k_norm"]
    names = [f"model.layers.{layer}.{part}.weight" for layer in range(model.layers) for part in parts]
    return [*names, "model.norm.weight"]


def build_native(trt: Any, network: Any, weights: OnnxWeights, model: DecoderModel, size: Limits, dtype: str) -> Layers:
    """Fill `network`.

    Inputs: `input_ids`, `position_ids` int64 `[batch, sequence]`; `logits_indices` int64 `[batch, wanted]`, the positions of the
    step whose logits are wanted; `write_indices`, `key_value_lengths` int32 `[batch]`; `cache.{layer}.key/value`
    `[batch, kv_heads, max_length, head_dim]`. Outputs: `logits` `[batch, wanted, vocabulary]`; `cache_out.{layer}.key/value`, at
    the addresses of their inputs.

    Args:
        dtype: `DataType` member of floats, the cache included.

    Returns:
        What holds the constants; keep it until the network is built.

    Raises:
        CompressError: TensorRT refused a layer, or an initializer is missing.
    """
    return _Builder(trt, network, weights, model, size, dtype).build()


class _Builder:
    def __init__(
        self, trt: Any, network: Any, weights: OnnxWeights, model: DecoderModel, size: Limits, dtype: str
    ) -> None:
        self.trt, self.network, self.model, self.size = trt, network, model, size
        self.layers = Layers(trt, network, weights, dtype)
        self.weights, self.dtype = weights, dtype

    def build(self) -> Layers:
        add, model = self.layers, self.model
        ids = self._input("input_ids", "INT64", ("batch", "sequence"))
        self.positions = self._input("position_ids", "INT64", ("batch", "sequence"))
        self.writes = self._input("write_indices", "INT32", ("batch",))
        self.lengths = self._input("key_value_lengths", "INT32", ("batch",))
        wanted = self._input("logits_indices", "INT64", ("batch", "wanted"))
        self.cosine, self.sine = self._rotation()
        table = add.constant(f"{EMBEDDING}.weight")
        x = add.output(self.network.add_gather(table, ids, 0), f"{EMBEDDING}/Gather")
        for layer in range(model.layers):
            x = self._block(x, layer)
        rows = self.network.add_gather(x, wanted, 1)
        if rows is not None:
            rows.num_elementwise_dims = 1
        x = add.norm(add.output(rows, "wanted"), "model.norm", model.eps)
        logits = self._head(x)
        logits.name = "logits"
        self.network.mark_output(logits)
        return add

    def _input(self, name: str, dtype: str, dimensions: tuple[str | int, ...]) -> Any:
        """A network input; dimensions that have a name are free, and equal where the name is."""
        shape = tuple(d if isinstance(d, int) else -1 for d in dimensions)
        tensor = self.network.add_input(name, self.layers.type(dtype), shape)
        if tensor is None:
            raise CompressError(f"TensorRT refused input {name} of shape {list(shape)}")
        for index, dimension in enumerate(dimensions):
            if isinstance(dimension, str):
                tensor.set_dimension_name(index, dimension)
        return tensor

    def _rotation(self) -> tuple[Any, Any]:
        """Tables `[max_length, rotated / 2]` of cosines and sines, made in float32 as transformers makes them."""
        frequencies = torch.tensor(self.model.rotation, dtype=torch.float32)
        angles = torch.arange(self.size.max_length, dtype=torch.float32)[:, None] * frequencies[None]
        factor = self.model.rotation_scale
        cosine = self.layers.computed("computed.rotation.cosine", angles.cos() * factor)
        return cosine, self.layers.computed("computed.rotation.sine", angles.sin() * factor)

    def _block(self, x: Any, layer: int) -> Any:
        add, model, name = self.layers, self.model, f"model.layers.{layer}"
        normed = add.norm(x, f"{name}.input_layernorm", model.eps)
        attended = add.linear(self._attention(normed, layer), f"{name}.self_attn.o_proj")
        x = add.elementwise(x, attended, "SUM", f"{name}/attended")
        normed = add.norm(x, f"{name}.post_attention_layernorm", model.eps)
        gate = add.linear(normed, f"{name}.mlp.gate_proj")
        kind = self.trt.ActivationType.SIGMOID
        sigmoid = add.output(self.network.add_activation(gate, kind), f"{name}.mlp/sigmoid")
        silu = add.elementwise(gate, sigmoid, "PROD", f"{name}.mlp/silu")
        up = add.linear(normed, f"{name}.mlp.up_proj")
        down = add.linear(add.elementwise(silu, up, "PROD", f"{name}.mlp/gated"), f"{name}.mlp.down_proj")
        return add.elementwise(x, down, "SUM", name)

    def _attention(self, x: Any, layer: int) -> Any:
        """`[batch, sequence, hidden] -> [batch, sequence, heads * head_dim]`."""
        add, model, name = self.layers, self.model, f"model.layers.{layer}.self_attn"
        query = self._heads(x, f"{name}.q_proj", model.heads, f"{name}.q_norm")
        key = self._heads(x, f"{name}.k_proj", model.kv_heads, f"{name}.k_norm")
        value = self._split(add.linear(x, f"{name}.v_proj"), f"{name}.v_proj", model.kv_heads)
        # TensorRT wants the scale in the query ("Fused Attention" of its documentation).
        scale = add.computed("computed.scale", torch.full((1, 1, 1, 1), model.scale))
        query = add.elementwise(query, scale, "PROD", f"{name}/scaled")
        keys = self._cache(key, layer, "key")
        values = self._cache(value, layer, "value")
        softmax, corner = self.trt.AttentionNormalizationOp.SOFTMAX, self.trt.CausalMaskKind.LOWER_RIGHT
        attention = self.network.add_attention_v2(query, keys, values, softmax, corner)
        if attention is not None:
            attention.key_value_lengths = self.lengths
            attention.decomposable = True  # several kernels where no fused one fits
        mixed = add.output(attention, name)
        return add.reshape(mixed, (0, 0, model.heads * model.head_dim), f"{name}/merged", first=(0, 2, 1, 3))

    def _heads(self, x: Any, module: str, count: int, norm: str) -> Any:
        """Queries or keys `[batch, count, sequence, head_dim]`, normalized where the model does it, rotated."""
        add, model = self.layers, self.model
        heads = self._split(add.linear(x, module), module, count)
        if model.norms:
            heads = add.norm(heads, norm, model.eps, rank=4)
        layer = self.network.add_rotary_embedding(heads, self.cosine, self.sine, False, 2 * len(model.rotation))
        if layer is not None:
            layer.set_input(3, self.positions)
        return add.output(layer, f"{module}/rotated")

    def _split(self, x: Any, module: str, count: int) -> Any:
        return self.layers.reshape(x, (0, 0, count, self.model.head_dim), f"{module}/heads", second=(0, 2, 1, 3))

    def _cache(self, update: Any, layer: int, kind: str) -> Any:
        """Write a step's keys or values into the cache, which is a network input and, at the same address, an output."""
        shape = ("batch", self.model.kv_heads, self.size.max_length, self.model.head_dim)
        cache = self._input(f"cache.{layer}.{kind}", self.dtype, shape)
        linear = self.trt.KVCacheMode.LINEAR
        written = self.network.add_kv_cache_update(cache, update, self.writes, linear)
        tensor = self.layers.output(written, f"cache_out.{layer}.{kind}")
        self.network.mark_output(tensor)
        return tensor

    def _head(self, x: Any) -> Any:
        """Logits; the output layer may be the embedding itself."""
        if not (
            self.model.tied and f"{HEAD}.weight" not in self.weights and f"{HEAD}.weight_codes" not in self.weights
        ):
            return self.layers.linear(x, HEAD)
        name = f"{EMBEDDING}.weight"
        matrix = self.layers.reshape(self.layers.constant(name), (1, *self.weights.shape(name)), f"{HEAD}/matrix")
        operations = self.trt.MatrixOperation
        layer = self.network.add_matrix_multiply(x, operations.NONE, matrix, operations.TRANSPOSE)
        return self.layers.output(layer, f"{HEAD}/MatMul")
