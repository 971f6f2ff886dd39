"""Which decoders the lean engines know, found by structure and checked: a part they do not know is a reason, not a guess."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Model classes whose forward pass is a Llama-like one; what varies among them is read from the modules.
FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_STATIC_ROTATIONS = ("default", "linear", "llama3", "yarn")
_PARTS = {
    "": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm"},
    "mlp": {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn"},
}

Rotation = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


def why_not(model: PreTrainedModel) -> str | None:
    """The reason why this is not a decoder that the lean engines know; None when it is."""
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
    if 2 * rotation(body.rotary_emb)(1)[0].shape[1] > body.layers[0].self_attn.head_dim:
        return "its rotation is wider than its heads"
    return None


def window(layer: Any, config: Any) -> int:
    """Positions that a layer's attention sees; 0: all. Layers say so themselves, but Mistral has one for all in its config."""
    found = getattr(layer.self_attn, "sliding_window", None)
    if found is None and type(layer).__name__.startswith("Mistral"):
        found = getattr(config, "sliding_window", None)
    return found or 0


def rotation(rotary: Any) -> Rotation:
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
