"""Attention function of compressed caches, registered with transformers as "compress_kv".

Layers whose cache is compressed hand their new keys and values on with a mark; attention then asks the cache layer itself, which
reads what it stores. Other layers (sliding windows, no cache at all) get transformers' sdpa attention and its masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from runtime.kv_cache.kernels import attend_region
from runtime.kv_cache.layer_state import LayerState
from runtime.kv_cache.reference import ragged_attention
from runtime.kv_cache.region import Chosen, Queries, Region, merge

NAME = "compress_kv"
SLICE_BYTES = 32 << 20  # of the mask or the scores of a slice of queries
_MARK = "_compress_layer"
_ARGUMENTS, _SDPA, _VALID = "_compress_mask_arguments", "_compress_sdpa_mask", "_compress_padding"


def mark(tensor: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
    """`tensor`, new each time, with the function of its cache layer that computes attention (`CompressedLayer.attend`)."""
    view = tensor.view(tensor.shape)
    setattr(view, _MARK, attend)
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
    attend: Callable[..., torch.Tensor] | None = getattr(key, _MARK, None)
    scale, softcap = query.shape[-1] ** -0.5 if scaling is None else float(scaling), float(kwargs.get("softcap") or 0.0)
    if attend is None:
        attention_mask = _sdpa_mask(attention_mask)
        if softcap:  # sliding layers of models whose scores are capped, which sdpa cannot do (Gemma 2)
            return _capped(query, key, value, attention_mask, scale, softcap), None
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output
    unknown = unknown_argument(kwargs)
    if unknown is not None:
        raise ValueError(f"{type(module).__name__}: attention has {unknown}, which compressed caches do not know")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError("compressed caches take attention masks of shape [batch, tokens] only")
    if attention_mask is not None and not attention_mask.numel():
        attention_mask = None
    valid = None if attention_mask is None else _padding(attention_mask, query.shape[2])
    return attend(query, key, value, valid, scale, softcap, module).transpose(1, 2), None


def unknown_argument(given: Mapping[str, Any]) -> str | None:
    """The first argument of attention that compressed caches cannot compute with; None: there is none."""
    return next((name for name in ("head_mask", "position_bias", "s_aux") if given.get(name) is not None), None)


_HIDDEN = "_compress_hidden_states"


def record_inputs(model: torch.nn.Module) -> list[Any]:
    """Handles of the hooks by which attention modules know the hidden states that they are called with, while they are called."""

    def before(module: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        setattr(module, _HIDDEN, keywords["hidden_states"] if "hidden_states" in keywords else arguments[0])

    def after(module: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        delattr(module, _HIDDEN)

    modules = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    handles = [module.register_forward_pre_hook(before, with_kwargs=True) for module in modules]
    return handles + [module.register_forward_hook(after, always_call=True) for module in modules]


def hidden_states(module: torch.nn.Module) -> torch.Tensor:
    """What an attention module was called with, `[batch, q, hidden]`.

    Raises:
        ValueError: nobody recorded it (`record_inputs`), or the module is called in another way.
    """
    found = getattr(module, _HIDDEN, None)
    if not isinstance(found, torch.Tensor):
        raise ValueError(f"{type(module).__name__} does not show the hidden states that it computes attention of")
    return found


def _padding(mask: torch.Tensor, count: int) -> torch.Tensor | None:
    """bool `[batch, count]`, False at padding among the newest tokens; None: there is none. Asked once a forward, not once a layer."""

    def compute() -> torch.Tensor | None:
        valid = mask[:, -count:].bool()
        return None if bool(valid.all()) else valid

    return _once(mask, _VALID, compute)


def _once(mask: torch.Tensor, name: str, compute: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
    """What `compute` gives the first time; kept with the mask, which lives for one forward."""
    if not hasattr(mask, name):
        setattr(mask, name, compute())
    return getattr(mask, name)


def _capped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float
) -> torch.Tensor:
    """Attention with capped scores over an uncompressed cache; `mask` is sdpa's, None: causal."""
    past = key.shape[2] - query.shape[2]
    columns = torch.arange(key.shape[2], device=query.device)

    def attend(part: torch.Tensor, start: int) -> torch.Tensor:
        stop = start + part.shape[2]
        if mask is None:
            seen = (columns <= torch.arange(start + past, stop + past, device=query.device)[:, None])[None, None]
        else:
            seen = mask[:, :, start:stop]
        return ragged_attention(part, key, value, seen, scale, softcap)

    return in_slices(query, value, attend).transpose(1, 2)


def in_slices(
    query: torch.Tensor, value: torch.Tensor, attend: Callable[[torch.Tensor, int], torch.Tensor]
) -> torch.Tensor:
    """Attention a slice of queries at a time, so that scores take bounded memory.

    Args:
        query: `[batch, heads, q, size]`.
        value: `[batch, kv_heads, n, size]`, of all tokens that are attended to.
        attend: gives the output of a slice from its queries and the number of those before it.

    Returns:
        `[batch, heads, q, size]`.
    """
    step = max(1, SLICE_BYTES // max(1, 4 * query.shape[0] * query.shape[1] * value.shape[2]))
    result = query.new_empty(*query.shape[:3], value.shape[-1])
    for start in range(0, query.shape[2], step):
        part = query[:, :, start : start + step]
        result[:, :, start : start + step] = attend(part, start)
    return result


def masks(**arguments: Any) -> torch.Tensor | None:
    """The mask of padding `[batch, tokens]` for plain causal layers (`[batch, 0]` without padding), transformers' own mask for others.

    Which cache a layer has is not known here; what sdpa's mask would be made of is handed on for those that are not compressed.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if arguments.get("mask_function", causal_mask_function) is not causal_mask_function:
        return sdpa_mask(**arguments)
    given = arguments.get("attention_mask")
    mask = torch.empty(int(arguments["batch_size"]), 0, dtype=torch.bool) if given is None else given.view(given.shape)
    setattr(mask, _ARGUMENTS, arguments)
    return mask


def _sdpa_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask that sdpa takes where `masks` put it off; made once a forward."""
    from transformers.masking_utils import sdpa_mask

    arguments = getattr(mask, _ARGUMENTS, None)
    if mask is None or arguments is None:
        return mask
    return _once(mask, _SDPA, lambda: sdpa_mask(**arguments))


def register() -> None:
    """Make "compress_kv" known to transformers; done once, when the first compressed cache is made."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, masks)


# Attention of a prompt, or a chunk of one, over the cache and itself.


def prompt_attention(
    layer: LayerState,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor | None,
    before: torch.Tensor,
) -> torch.Tensor:
    """Outputs `[batch, heads, q, size]`, zeros at padding; the new tokens are in the layer's store already.

    Older tokens are decoded for it once (one layer at a time): a matrix product over all queries is what prompts are fast with.

    Args:
        layer: whose tokens are attended to.
        query: `[batch, heads, q, size]`.
        key: of the new tokens `[batch, kv_heads, q, size]`.
        value: likewise.
        valid: bool `[batch, q]`, False at padding on the left; None: none.
        before: int64 `[batch, kv_heads]`, tokens that were there before these came.
    """
    scale, softcap, count = layer.scale, layer.softcap, query.shape[2]
    alone = not int(before.max())
    if alone and valid is None and not softcap:
        if layer.storage.floats is not None:
            # In the dtype of the store: a result must not depend on whether padding, or an earlier chunk, had them read back from it.
            key, value = (states.to(layer.storage.floats).to(query.dtype) for states in (key, value))
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    keys, values, used, bias = layer.store.states()
    keys, values, used = (states.unflatten(0, layer.shape) for states in (keys, values, used))
    new = used.sum(-1) - before
    columns = torch.arange(keys.shape[2], device=keys.device)
    fused = not softcap and bias is None
    if fused:
        keys, values = keys.to(query.dtype), values.to(query.dtype)

    def attend(part: torch.Tensor, start: int) -> torch.Tensor:
        # Query i of `count` is the (i - padding)-th new token; those of padding see nothing.
        rows = torch.arange(start, start + part.shape[2], device=keys.device)
        own = rows[None, None] - (count - new)[..., None]
        last = torch.where(own >= 0, before[..., None] + own, -1)
        seen = columns <= last.unsqueeze(-1)  # [batch, kv_heads, slice, tokens]
        if not fused:
            wide = None if bias is None else bias.unflatten(0, layer.shape)
            return ragged_attention(part, keys, values, seen, scale, softcap, wide)
        mask = seen.repeat_interleave(query.shape[1] // keys.shape[1], 1)
        output = functional.scaled_dot_product_attention(
            part, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )
        return output.masked_fill_(~mask.any(-1, keepdim=True), 0.0)  # padding sees nothing, which is no number

    return in_slices(query, values, attend)


# Attention of a few new tokens over the cache, region by region and as it is stored.


def step_attention(layer: LayerState, query: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Outputs `[batch, heads, q, size]` in the query's dtype, zeros at padding; the new tokens are in the layer's tail already.

    Args:
        layer: whose tokens are attended to.
        query: `[batch, heads, q, size]`.
        valid: bool `[batch, q]`, False at padding on the left; None: there is none.

    Raises:
        ValueError: the tokens of the layer do not go with its selection.
    """
    batch, heads = layer.shape
    count, size = query.shape[2:]
    rows = query.reshape(batch * heads, -1, size)  # a key head's queries, head by head
    groups = rows.shape[1] // count
    counted = None if valid is None else valid.repeat_interleave(heads, 0).repeat(1, groups)
    queries = Queries(rows, layer.scale, layer.softcap, count, counted)
    regions, tail = layer.store.regions, layer.store.tail
    chosen: list[Chosen | None] = [None] * len(regions)
    if layer.selection is not None:
        chosen = layer.selection.choose(layer, queries, regions)
    visible = None
    if count > 1:
        newer = torch.arange(count - 1, -1, -1, device=query.device).repeat(groups)
        # A row's new tokens are its tail's last; what padding would see is dropped in the end, and may be nothing.
        visible = (tail.lengths[:, None] - newer).clamp(min=0)
    parts = [
        attend_region(queries, readable, visible if region is tail else None, some)
        for region, readable, some in zip(regions, _fetched(layer, regions, chosen), chosen, strict=True)
    ]
    if layer.elsewhere is not None:
        layer.elsewhere.leave(layer.store.tiers)
    output = merge(parts).view(batch, query.shape[1], count, -1).to(query.dtype)
    return output if valid is None else output.masked_fill(~valid[:, None, :, None], 0)


def _fetched(layer: LayerState, regions: list[Region], chosen: list[Chosen | None]) -> list[Region]:
    """The regions where attention can read what was chosen of them; the next layer's are on their way from now on."""
    if layer.elsewhere is None:
        return regions
    wanted = {region: some for region, some in zip(regions, chosen, strict=True) if region in layer.store.tiers}
    fetched = dict(zip(wanted, layer.elsewhere.fetched(list(wanted), list(wanted.values())), strict=True))
    layer.reads_all = all(some is None for some in wanted.values())
    # What a layer will choose is not known before its turn; where it chose the last time, nothing is fetched in advance.
    if layer.following not in (None, layer) and layer.following.reads_all:
        layer.elsewhere.fetch(layer.following.store.tiers)
    return [fetched.get(region, region) for region in regions]
