"""Program of a Llama-like decoder, read off a transformers model: what fused engines run, with linear layers of one input joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime import formats
from runtime import kernels as kernel_table
from runtime.engines.base import Engine
from runtime.layers.compressed_linear import CompressedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from runtime.engines.torch.engine import TorchEngine


class Part(nn.Module):
    """Some rows of a joined layer, in the place of the layer that they were: the model's own forward pass goes on working.

    It computes the whole product and cuts its rows out; whoever wants speed calls the joined layer.
    """

    def __init__(self, whole: nn.Module, start: int, stop: int, columns: int) -> None:
        super().__init__()
        self._whole = (whole,)  # not as a submodule: the parent has it under a name of its own
        self.start, self.stop = start, stop
        self.in_features, self.out_features = columns, stop - start

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This part's columns of the joint layer's output."""
        return self._whole[0](x)[..., self.start : self.stop]


class Joined:
    """Layers of one input: called, the results of all, in few products.

    Attributes:
        layers: what is called: one layer, or the given ones where they cannot be joined.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = list(layers)
        self._sizes = [int(layer.out_features) for layer in layers]  # type: ignore[arg-type]

    def whole(self, x: torch.Tensor) -> list[torch.Tensor]:
        """One tensor with all results side by side, or one a layer."""
        return [layer(x) for layer in self.layers]

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        found = self.whole(x)
        return found[0].split(self._sizes, dim=-1) if len(found) == 1 else found

    @classmethod
    def of(cls, parent: nn.Module, names: Sequence[str], name: str) -> Joined:
        """Join layers of `parent` as far as possible; a compressed joined layer becomes `parent.name`.

        Memory of weights is not doubled for longer than one such group: dense weights become views of the joined one,
        compressed layers are replaced (see `Part`).
        """
        layers: list[nn.Module] = [getattr(parent, each) for each in names]
        joined = cls(layers)
        if isinstance(layers[0], Part):  # done by an engine before this one
            joined.layers = [layers[0]._whole[0]]
        elif (dense := join_dense(layers)) is not None:
            joined.layers = [dense]
        elif (whole := _join_compressed(layers)) is not None:
            joined.layers = [whole]
            parent.add_module(name, whole)
            start = 0
            for each, size in zip(names, joined._sizes, strict=True):
                setattr(parent, each, Part(whole, start, start + size, whole.in_features))
                start += size
        return joined


def join_dense(layers: Sequence[nn.Module]) -> nn.Linear | None:
    """Plain layers as one, whose rows their weights become views of; None where they differ."""
    linear = [layer for layer in layers if type(layer) is nn.Linear and not layer._forward_hooks]
    if len(linear) < len(layers) or len({(x.weight.dtype, x.weight.device, x.in_features) for x in linear}) > 1:
        return None
    whole = nn.Linear(linear[0].in_features, sum(x.out_features for x in linear), bias=False, device="meta")
    whole.weight = nn.Parameter(torch.cat([x.weight.detach() for x in linear]), requires_grad=False)
    bias = _bias(linear, whole.weight.dtype)
    if bias is not None:
        whole.bias = nn.Parameter(bias, requires_grad=False)
    start = 0
    for x in linear:
        x.weight = nn.Parameter(whole.weight.detach()[start : start + x.out_features], requires_grad=False)
        start += x.out_features
    return whole


def _bias(layers: Sequence[nn.Linear | CompressedLinear], dtype: torch.dtype) -> torch.Tensor | None:
    if all(x.bias is None for x in layers):
        return None
    device = next(x.bias.device for x in layers if x.bias is not None)
    none = torch.zeros(0, dtype=dtype, device=device)
    return torch.cat([none.new_zeros(x.out_features) if x.bias is None else x.bias.detach() for x in layers])


def _join_compressed(layers: Sequence[nn.Module]) -> CompressedLinear | None:
    """The layers as one, laid out anew for their kernels; None where they are not `alike`, or other kernels would fit the whole."""
    linear = alike(layers)
    if linear is None:
        return None
    first = linear[0]
    assert first.choice is not None
    shape = (sum(x.out_features for x in linear), first.in_features)
    choice = kernel_table.find(kernel_table.Layer(first.entry, shape, first.dtype, first.device), first._wanted)
    if choice.decode.layout != first.choice.decode.layout:
        return None
    weights = [x.compressed_weight() for x in linear]
    rows: dict[str, Any] = {}
    for name in ("values", "scale", "zero_point", "mask"):
        if getattr(weights[0], name) is not None:
            rows[name] = torch.cat([getattr(weight, name) for weight in weights])
    tensors = formats.get(first.entry.format).pack(replace(weights[0], **rows))
    whole = CompressedLinear.from_tensors(first.entry, shape, tensors, _bias(linear, first.dtype), first.stored_dtype)
    whole.dtype = first.dtype
    whole.prepare(first._wanted, choice)
    return whole


def alike(layers: Sequence[nn.Module]) -> list[CompressedLinear] | None:
    """The layers, if they are compressed alike, row by row, and have kernels, so that they may be joined; None otherwise."""
    linear = [layer for layer in layers if type(layer) is CompressedLinear and not layer._forward_hooks]
    first = linear[0] if linear else None
    if first is None or len(linear) < len(layers) or first.choice is None or first.entry.count is not None:
        return None
    same = {(x.entry, x.in_features, x.dtype, x.stored_dtype, x.device, x.choice, x._wanted) for x in linear}
    if len(same) > 1 or any(name.startswith("input_") for name in first._specs):
        return None
    weights, grid = first.entry.scheme.weights, first.entry.scheme.grid
    by_row = grid is not None and all(grid.parameter_shape(x.shape)[0] == x.out_features for x in linear)
    return linear if weights is None or by_row else None


#: Model classes whose forward pass is a Llama-like one; what varies among them is read from the modules.
FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STATIC_ROTATIONS = ("default", "linear", "llama3", "yarn")
_PARTS = {
    "": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm"},
    "mlp": {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn"},
}

Rotation = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Block:
    """One layer. `norms`: weights of the norms of query and key heads, where the family has them. `window`: 0 for all positions."""

    qkv: Joined
    output: nn.Module
    gate_up: Joined
    down: nn.Module
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None
    window: int


@dataclass(frozen=True)
class Program:
    """A Llama-like decoder: the modules and weights of its operations in their order, and its sizes.

    Attributes:
        rotation: for a number of positions, cosines and sines float32 `[positions, rotary / 2]`.
        scale: of the attention scores.
        vocabulary: width of the logits.
        dtype: of the norms, in which the modules compute.
    """

    embedding: nn.Module
    blocks: list[Block]
    final_norm: torch.Tensor
    head: nn.Module
    rotation: Rotation
    eps: float
    scale: float
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    dtype: torch.dtype


def read_program(model: PreTrainedModel, fuse: bool = False) -> Program | str:
    """What fused engines run of a model, or the reason why they do not know it.

    Args:
        model: of transformers, its weights in place.
        fuse: join q/k/v and gate/up (see `Joined.of`); the model's modules then share or hand over their weights.
    """
    reason = why_not(model)
    if reason is not None:
        return reason
    config: Any = model.config
    body: Any = model.model
    head: Any = model.get_output_embeddings()
    attention, dtype = body.layers[0].self_attn, body.norm.weight.dtype
    blocks = [read_block(layer, config, fuse) for layer in body.layers]
    return Program(
        model.get_input_embeddings(), blocks, _vector(body.norm, dtype), head, _rotation(body.rotary_emb), config.rms_norm_eps,
        attention.scaling, config.num_attention_heads, config.num_key_value_heads, attention.head_dim, int(head.out_features), dtype,
    )  # fmt: skip


def read_block(layer: Any, config: Any, fuse: bool = False) -> Block:
    """One layer of a model with this config; arguments as of `read_program`."""
    attention, mlp, dtype = layer.self_attn, layer.mlp, layer.input_layernorm.weight.dtype

    def join(parent: nn.Module, name: str, *names: str) -> Joined:
        return Joined.of(parent, names, name) if fuse else Joined([getattr(parent, each) for each in names])

    has_norms = getattr(attention, "q_norm", None) is not None
    return Block(
        join(attention, "qkv_proj", "q_proj", "k_proj", "v_proj"),
        attention.o_proj,
        join(mlp, "gate_up_proj", "gate_proj", "up_proj"),
        mlp.down_proj,
        _vector(layer.input_layernorm, dtype),
        _vector(layer.post_attention_layernorm, dtype),
        (_vector(attention.q_norm, dtype), _vector(attention.k_norm, dtype)) if has_norms else None,
        _window(layer, config),
    )


def _vector(norm: Any, dtype: torch.dtype) -> torch.Tensor:
    return norm.weight.detach().to(dtype).contiguous()


class FusedEngine(Engine):
    """Base class: an engine that has taken over the modules of a torch engine. `parts`: their program, as it reads it."""

    def __init__(self, torch_engine: TorchEngine, parts: Any) -> None:
        self.torch_engine = torch_engine
        self.module = torch_engine.module
        self.device = torch_engine.device
        self.vocab_size = torch_engine.vocab_size
        self.context_length = torch_engine.context_length
        self.weight_bytes = torch_engine.weight_bytes
        self.parts = parts

    @property
    def logits_width(self) -> int:
        """Rows of the head."""
        return self.parts.vocabulary

    def explain(self) -> dict[str, str]:
        return self.torch_engine.explain()


def why_not(model: PreTrainedModel) -> str | None:
    """The reason why this is not a decoder that the fused engines know; None when it is."""
    name = type(model).__name__
    config: Any = model.config
    if name not in FAMILIES or not type(model).__module__.startswith("transformers.models."):
        return f"{name} is not one of {', '.join(FAMILIES)} of transformers"
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}, not silu"
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in _STATIC_ROTATIONS:
        return f"its rotary embedding is of type {kind}, which changes with the length"
    if config.num_attention_heads % config.num_key_value_heads:
        return "its heads do not divide among those of the cache"
    body: Any = model.model
    for layer in body.layers:
        for part, known in _PARTS.items():
            odd = _unknown(layer.get_submodule(part), known)
            if odd is not None:
                return odd
        if hasattr(layer.self_attn, "q_norm") != hasattr(layer.self_attn, "k_norm"):
            return "only one of its queries and keys is normalized"
    if body.norm.weight.dtype not in DTYPES:
        return f"its dtype is {body.norm.weight.dtype}"
    if 2 * _rotation(body.rotary_emb)(1)[0].shape[1] > body.layers[0].self_attn.head_dim:
        return "its rotation is wider than its heads"
    return None


def _window(layer: Any, config: Any) -> int:
    """Positions that a layer's attention sees; 0: all. Layers say so themselves, but Mistral has one for all in its config."""
    found = getattr(layer.self_attn, "sliding_window", None)
    if found is None and type(layer).__name__.startswith("Mistral"):
        found = getattr(config, "sliding_window", None)
    return found or 0


def _rotation(rotary: Any) -> Rotation:
    """For a number of positions, cosines and sines `[positions, rotary / 2]`, float32, of a model's own rotary module."""

    def table(positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        device = rotary.inv_freq.device
        with torch.inference_mode():
            like = torch.empty(0, dtype=torch.float32, device=device)
            cosine, sine = rotary(like, torch.arange(positions, device=device)[None])
        half = cosine.shape[-1] // 2
        # transformers repeats the half: the second copy rotates the second half of the head.
        return cosine[0, :, :half].contiguous(), sine[0, :, :half].contiguous()

    return table


def _unknown(module: nn.Module, known: set[str]) -> str | None:
    """What is in it besides the parts known, if that has weights."""
    for name, child in module.named_children():
        if name not in known and any(True for _ in (*child.parameters(), *child.buffers())):
            return f"it has {name}, a {type(child).__name__}"
    return None
