"""The attention function of compressed caches, registered with transformers as "compress_kv".

Layers whose cache is compressed hand their new keys and values on with a mark; attention then asks the cache layer itself, which
reads what it stores. Other layers (sliding windows, no cache at all) get transformers' sdpa attention and its masks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from runtime.kv_cache.layer import CompressedLayer

NAME = "compress_kv"
_MARK = "_compress_layer"


def mark(tensor: torch.Tensor, layer: CompressedLayer) -> torch.Tensor:
    """`tensor`, new each time, with the layer that its attention is to ask."""
    view = tensor.view(tensor.shape)
    setattr(view, _MARK, layer)
    return view


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' attention functions: `[batch, heads, q, size]` in, `[batch, q, heads, size]` out.

    Raises:
        ValueError: an argument that changes attention in a way compressed caches do not know.
    """
    layer: CompressedLayer | None = getattr(key, _MARK, None)
    if layer is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output
    unknown = sorted(name for name in ("s_aux", "position_bias", "head_mask") if kwargs.get(name) is not None)
    if unknown:
        raise ValueError(f"{type(module).__name__}: attention has {unknown[0]}, which compressed caches do not know")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError("compressed caches take attention masks of shape [batch, tokens] only")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap = kwargs.get("softcap") or 0.0
    valid = None if attention_mask is None else attention_mask[:, -query.shape[2] :].bool()
    return layer.attend(query, key, value, valid, float(scale), float(softcap)).transpose(1, 2), None


def masks(**arguments: Any) -> torch.Tensor | None:
    """The mask of padding `[batch, tokens]` for plain causal layers, transformers' own mask for all others."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if arguments.get("mask_function", causal_mask_function) is causal_mask_function:
        mask: torch.Tensor | None = arguments.get("attention_mask")
        return mask
    found: torch.Tensor | None = sdpa_mask(**arguments)
    return found


def register() -> None:
    """Make "compress_kv" known to transformers; done once, when the first compressed cache is made."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, masks)
