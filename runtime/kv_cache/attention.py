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
_ARGUMENTS, _SDPA, _VALID = "_compress_mask_arguments", "_compress_sdpa_mask", "_compress_padding"


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
        attention_mask = _sdpa_mask(attention_mask)
        if kwargs.get("softcap"):  # sliding layers of models whose scores are capped, which sdpa cannot do (Gemma 2)
            return _capped(query, key, value, attention_mask, scaling, float(kwargs["softcap"])), None
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
    if attention_mask is not None and not attention_mask.numel():
        attention_mask = None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap = kwargs.get("softcap") or 0.0
    valid = None if attention_mask is None else _padding(attention_mask, query.shape[2])
    return layer.attend(query, key, value, valid, float(scale), float(softcap)).transpose(1, 2), None


def _padding(mask: torch.Tensor, count: int) -> torch.Tensor | None:
    """bool `[batch, count]`, False at padding among the newest tokens; None: there is none. Asked once a forward, not once a layer."""
    if not hasattr(mask, _VALID):
        valid = mask[:, -count:].bool()
        setattr(mask, _VALID, None if bool(valid.all()) else valid)
    found: torch.Tensor | None = getattr(mask, _VALID)
    return found


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """Attention with capped scores over a plain cache; `mask` is sdpa's, None: causal."""
    from runtime.kv_cache.prompt import slice_of
    from runtime.kv_cache.reference import ragged_attention

    count, held = query.shape[2], key.shape[2]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    step = slice_of(query.shape[0] * query.shape[1] * held)
    columns = torch.arange(held, device=query.device)
    result = query.new_empty(*query.shape[:3], value.shape[-1])
    for start in range(0, count, step):
        part = query[:, :, start : start + step]
        if mask is None:
            place = torch.arange(start, start + part.shape[2], device=query.device) + held - count
            seen = (columns <= place[:, None])[None, None]
        else:
            seen = mask[:, :, start : start + step]
        result[:, :, start : start + step] = ragged_attention(part, key, value, seen, scale, softcap)
    return result.transpose(1, 2)


def masks(**arguments: Any) -> torch.Tensor | None:
    """The mask of padding `[batch, tokens]` for plain causal layers (`[batch, 0]` without padding), transformers' own mask for others.

    Which cache a layer has is not known here; what sdpa's mask would be made of is handed on for those that are not compressed.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if arguments.get("mask_function", causal_mask_function) is not causal_mask_function:
        found: torch.Tensor | None = sdpa_mask(**arguments)
        return found
    given = arguments.get("attention_mask")
    mask = torch.empty(int(arguments["batch_size"]), 0, dtype=torch.bool) if given is None else given.view(given.shape)
    setattr(mask, _ARGUMENTS, arguments)
    return mask


def _sdpa_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask that sdpa takes where `masks` put it off; made once a forward."""
    from transformers.masking_utils import sdpa_mask

    arguments = getattr(mask, _ARGUMENTS, None)
    if arguments is None:
        return mask
    if not hasattr(mask, _SDPA):
        setattr(mask, _SDPA, sdpa_mask(**arguments))
    found: torch.Tensor | None = getattr(mask, _SDPA)
    return found


def register() -> None:
    """Make "compress_kv" known to transformers; done once, when the first compressed cache is made."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, masks)
