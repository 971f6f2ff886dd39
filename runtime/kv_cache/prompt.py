"""Attention of a prompt, or a piece of one, over what is stored and itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from runtime.kv_cache.reference import ragged_attention

if TYPE_CHECKING:
    from runtime.kv_cache.layer import CompressedLayer

#: Bytes of the mask or the scores of a slice of queries.
_SLICE_BYTES = 32 << 20


def prompt_attention(
    layer: CompressedLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor | None,
    before: torch.Tensor,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Outputs `[batch, heads, q, size]`, zeros at padding; the new tokens are in the layer's store already.

    Older tokens are opened for it once (one layer at a time): a matrix product over all queries is what prompts are fast with.

    Args:
        layer: whose tokens are attended to.
        query: `[batch, heads, q, size]`.
        key: of the new tokens `[batch, kv_heads, q, size]`.
        value: likewise.
        valid: bool `[batch, q]`, False at padding on the left; None: none.
        before: int64 `[batch, kv_heads]`, tokens held before these came.
        scale: of the scores.
        softcap: 0: none.
    """
    count = query.shape[2]
    alone = not int(before.max())
    if alone and valid is None and not softcap:
        if layer.storage.floats is not None:
            # As they are held: a result must not depend on whether padding, or an earlier piece, had them read back from the store.
            key, value = (states.to(layer.storage.floats).to(query.dtype) for states in (key, value))
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    assert layer.store is not None
    keys, values, used, bias = layer.store.everything()
    batch, heads = layer.shape
    shape = (batch, heads, keys.shape[1])
    keys, values, used = keys.view(*shape, -1), values.view(*shape, -1), used.view(shape)
    new = used.sum(-1) - before
    columns = torch.arange(shape[2], device=keys.device)
    step = slice_of(query.shape[0] * query.shape[1] * shape[2])
    fused = not softcap and bias is None
    if fused:
        keys, values = keys.to(query.dtype), values.to(query.dtype)
    result = query.new_empty(*query.shape[:3], values.shape[-1])
    for start in range(0, count, step):
        part = query[:, :, start : start + step]
        # Query i of `count` is the (i - padding)-th new token; those of padding see nothing.
        place = torch.arange(start, start + part.shape[2], device=keys.device)
        own = place[None, None] - (count - new)[..., None]
        last = torch.where(own >= 0, before[..., None] + own, -1)
        seen = columns <= last.unsqueeze(-1)  # [batch, kv_heads, slice, tokens]
        if fused:
            mask = seen.repeat_interleave(query.shape[1] // heads, 1)
            output = functional.scaled_dot_product_attention(
                part, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
            )
            output = output.masked_fill_(~mask.any(-1, keepdim=True), 0.0)  # padding sees nothing, which is no number
        else:
            wide = None if bias is None else bias.view(shape)
            output = ragged_attention(part, keys, values, seen, scale, softcap, wide)
        result[:, :, start : start + step] = output
    return result


def slice_of(numbers: int) -> int:
    """How many queries go at once, where each takes so many float32 scores."""
    return max(1, _SLICE_BYTES // max(1, 4 * numbers))
