"""Parts of a transformers model that the CUDA engine runs, found by structure and checked: an unknown part is a reason, not a guess."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from runtime.engines import llama_structure
from runtime.engines.llama_structure import Joined

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")


@dataclass(frozen=True)
class Block:
    """One layer. `norms`: of the query and key heads, where the family has them. `window`: 0 for all positions."""

    qkv: Joined
    output: nn.Module
    gate_up: Joined
    down: nn.Module
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None
    window: int


@dataclass(frozen=True)
class Parts:
    """The modules of a Llama-like decoder and its sizes.

    Attributes:
        rotation: for a number of positions, cosines and sines float32 `[positions, rotary / 2]`.
        scale: of the attention scores.
        vocabulary: width of the logits.
    """

    embedding: nn.Module
    blocks: list[Block]
    final_norm: torch.Tensor
    head: nn.Module
    rotation: llama_structure.Rotation
    eps: float
    scale: float
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    dtype: torch.dtype


def why_not(model: PreTrainedModel) -> str | None:
    """The reason why the engine cannot run this model; None when it can. Changes nothing."""
    reason = llama_structure.why_not(model)
    if reason is not None:
        return reason
    dtype = cast(Any, model.model).norm.weight.dtype
    return None if dtype in DTYPES else f"its dtype is {dtype}"


def read_parts(model: PreTrainedModel, fuse: bool = True) -> Parts | str:
    """The parts, or the reason why this model is not for the engine.

    Args:
        fuse: join q/k/v and gate/up (`runtime.engines.llama_structure`); the model's modules then share or hand over their weights.
    """
    reason = why_not(model)
    if reason is not None:
        return reason
    config: Any = model.config
    body: Any = model.model
    head: Any = model.get_output_embeddings()
    attention, dtype = body.layers[0].self_attn, body.norm.weight.dtype
    return Parts(
        model.get_input_embeddings(), [_block(layer, config, fuse) for layer in body.layers], _vector(body.norm, dtype),
        head, llama_structure.rotation(body.rotary_emb), config.rms_norm_eps, attention.scaling, config.num_attention_heads,
        config.num_key_value_heads, attention.head_dim, int(head.out_features), dtype,
    )  # fmt: skip


def _block(layer: Any, config: Any, fuse: bool) -> Block:
    attention, mlp = layer.self_attn, layer.mlp
    dtype = layer.input_layernorm.weight.dtype

    def join(parent: nn.Module, names: tuple[str, ...], name: str) -> Joined:
        return Joined.of(parent, names, name) if fuse else Joined([getattr(parent, each) for each in names])

    norms = None
    if getattr(attention, "q_norm", None) is not None:
        norms = _vector(attention.q_norm, dtype), _vector(attention.k_norm, dtype)
    return Block(
        join(attention, _QKV, "qkv_proj"), attention.o_proj, join(mlp, _GATE_UP, "gate_up_proj"), mlp.down_proj,
        _vector(layer.input_layernorm, dtype), _vector(layer.post_attention_layernorm, dtype), norms,
        llama_structure.window(layer, config),
    )  # fmt: skip


def _vector(norm: Any, dtype: torch.dtype) -> torch.Tensor:
    return norm.weight.detach().to(dtype).contiguous()
