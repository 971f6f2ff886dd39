"""Parts of a transformers model that the native engine runs, found by structure and checked: an unknown part is a reason, not a guess."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime.engines import llama_structure
from runtime.kernels.cpu import library
from runtime.kernels.cpu.decoder import Block, Decoder
from runtime.kernels.cpu.integer import IntegerKernel
from runtime.kernels.cpu.library import TYPES, Linear
from runtime.layers.compressed_linear import CompressedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# {field of a C structure: module}
PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
HEAD_NORMS = {"query_norm": "q_norm", "key_norm": "k_norm"}


@dataclass
class Parts:
    """A decoder in C structures; `keep` holds the tensors that they point to. `final_norm` is float32 `[hidden]`."""

    blocks: list[Block]
    decoder: Decoder
    rotation: llama_structure.Rotation
    kv_heads: int
    head_dim: int
    vocabulary: int
    cache_dtype: torch.dtype
    final_norm: torch.Tensor
    keep: list[Any]


def read_parts(model: PreTrainedModel, device: torch.device) -> Parts | str:
    """The parts, or the reason why this model is not for the native engine."""
    reason = llama_structure.why_not(model)
    if reason is not None:
        return reason
    if device.type != "cpu" or library.load() is None:
        return "it runs on CPUs" if device.type != "cpu" else "there is no C compiler"
    config: Any = model.config
    keep: list[Any] = []
    digits: set[int] = set()
    try:
        blocks = [_block(layer, config, keep, digits) for layer in model.model.layers]
        head = _linear(model.get_output_embeddings(), keep, digits)
    except UnknownPartError as error:
        return str(error)
    if len(digits) > 1:
        return "its layers round their inputs in different ways"
    attention: Any = model.model.layers[0].self_attn
    dtype = model.dtype if model.dtype in TYPES else torch.float32
    decoder = Decoder()
    decoder.layers, decoder.hidden = len(blocks), config.hidden_size
    decoder.intermediate = max(block.gate.rows for block in blocks)
    decoder.heads, decoder.kv_heads = config.num_attention_heads, config.num_key_value_heads
    decoder.head_dim = attention.head_dim
    decoder.cache_type = TYPES[dtype]
    decoder.digits = digits.pop() if digits else 1
    decoder.eps, decoder.scale = config.rms_norm_eps, attention.scaling
    final_norm = model.model.norm.weight.detach().float().contiguous()
    decoder.final_norm = final_norm.data_ptr()
    decoder.head = head
    rotation = llama_structure.rotation(model.model.rotary_emb)
    decoder.rotary = 2 * rotation(1)[0].shape[1]
    return Parts(blocks, decoder, rotation, decoder.kv_heads, decoder.head_dim, int(head.rows), dtype, final_norm, keep)


class UnknownPartError(Exception):
    """A module that decoder.h cannot compute."""


def _block(layer: Any, config: Any, keep: list[Any], digits: set[int]) -> Block:
    block = Block()
    for field, module in PROJECTIONS.items():
        setattr(block, field, _linear(getattr(layer.self_attn, module), keep, digits))
    for field, module in MLP.items():
        setattr(block, field, _linear(getattr(layer.mlp, module), keep, digits))
    block.input_norm = _vector(layer.input_layernorm.weight, keep)
    block.mlp_norm = _vector(layer.post_attention_layernorm.weight, keep)
    for field, name in HEAD_NORMS.items():
        norm = getattr(layer.self_attn, name, None)
        if norm is not None:
            setattr(block, field, _vector(norm.weight, keep))
    block.window = llama_structure.window(layer, config)
    return block


def _vector(weight: torch.Tensor, keep: list[Any]) -> int:
    vector = weight.detach().float().contiguous()
    keep.append(vector)
    return vector.data_ptr()


def _linear(module: nn.Module, keep: list[Any], digits: set[int]) -> Linear:
    """The layer as C reads it; a dense one as it lies in memory."""
    if isinstance(module, CompressedLinear):
        kernel = module.kernel
        if not isinstance(kernel, IntegerKernel):
            raise UnknownPartError(f"kernel {module.kernel_name} of one of its layers is not in C")
        digits.add(kernel.digits(module.layer))
        bias = None if module.bias is None else module.bias.detach().float()
        tensors = module._tensors()
        keep.append((tensors, bias))
        return kernel.panels.linear(tensors, module.layer, bias)
    if type(module) is not nn.Linear or module.weight.dtype not in TYPES or not module.weight.is_contiguous():
        raise UnknownPartError(f"one of its layers is a {type(module).__name__}")
    linear = dense_linear(module.weight)
    keep.append(module.weight)
    if module.bias is not None:
        linear.bias = _vector(module.bias, keep)
    return linear


def dense_linear(weight: torch.Tensor) -> Linear:
    """A dense layer `[rows, columns]` without a bias; whoever asks keeps the weight alive."""
    linear = Linear()
    linear.kind, linear.scale_type = library.KINDS["dense"], TYPES[weight.dtype]
    linear.rows, linear.columns = weight.shape
    linear.weight = weight.data_ptr()
    return linear
