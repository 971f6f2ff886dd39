"""Hook on attention for calibration: a watcher gets each layer's queries, keys and values after rotation and returns the layer's output.

It is an attention function registered with transformers, called by every full-attention layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from compress.core.file_matrix import panels
from runtime.errors import RequestError
from runtime.kv_cache.attend import hidden_states, unknown_argument
from runtime.kv_cache.observation import Inputs
from runtime.kv_cache.shape import compressed_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "compress_calibrate"
SLICE = 256  # queries whose streaming attention, or capped scores, are in memory at once


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention over one batch without padding.

    Attributes:
        layer: index among the layers whose cache a policy compresses (`runtime.kv_cache.cache.compressed_layers`).
        query: `[batch, heads, n, size]`, positions applied (RoPE).
        key: `[batch, kv_heads, n, size]`, likewise.
        value: `[batch, kv_heads, n, value_size]`.
        mask: bool or additive, as transformers' sdpa takes it; None: plain causal.
        scale: of the scores.
        softcap: 0: none; else scores become softcap * tanh(scores / softcap).
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    scale: float
    softcap: float = 0.0
    _module: torch.nn.Module | None = field(default=None, repr=False)

    @property
    def inputs(self) -> Inputs:
        """What attention was computed of: the module and its hidden states, so also queries before their rotation; in `observe` only."""
        assert self._module is not None
        return Inputs(self._module, hidden_states(self._module))

    @property
    def groups(self) -> int:
        """Query heads that share a key head."""
        return self.query.shape[1] // self.key.shape[1]

    def full(self) -> torch.Tensor:
        """What the model itself computes, to the bit of its sdpa attention: `[batch, heads, n, value_size]`."""
        if self.softcap or self._module is None:
            return torch.cat([self._slice(part) for part in panels(self.query.shape[2], SLICE)], 2)
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output: torch.Tensor = sdpa_attention_forward(
            self._module, self.query, self.key, self.value, self.mask, scaling=self.scale
        )[0]
        return output.transpose(1, 2)

    def streaming(self, sinks: int, recent: int) -> torch.Tensor:
        """The same where a query sees the first `sinks` tokens and the newest `recent`, its own among them.

        Keys are gathered a slice of queries at a time, so that cost and memory grow with the window, not with the length squared.
        """
        numbers, parts = torch.arange(self.query.shape[2], device=self.query.device), []
        for part in panels(len(numbers), SLICE):
            first = max(0, part.start - recent + 1)
            sunk = min(sinks, first)  # those within the window are there already
            places = torch.cat([numbers[:sunk], numbers[first : part.stop]])
            ages = numbers[part, None] - places
            seen = (ages >= 0) & ((ages < recent) | (places < sinks))
            keys, values = self.key[:, :, places], self.value[:, :, places]
            parts.append(self._attend(self.query[:, :, part], keys, values, seen))
        return torch.cat(parts, 2)

    def _slice(self, part: slice) -> torch.Tensor:
        numbers, stop = torch.arange(part.stop, device=self.query.device), part.stop
        seen = numbers <= numbers[part, None] if self.mask is None else self.mask[..., part, :stop]
        return self._attend(self.query[:, :, part], self.key[:, :, :stop], self.value[:, :, :stop], seen)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        key, value = key.repeat_interleave(self.groups, 1), value.repeat_interleave(self.groups, 1)
        if not self.softcap:
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=self.scale)
        scores = self.softcap * torch.tanh(query @ key.transpose(-1, -2) * self.scale / self.softcap)
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        return scores.softmax(-1) @ value


#: Gives the attention of one layer, `[batch, heads, n, value_size]`.
Watcher = Callable[[AttentionCall], torch.Tensor]


@contextmanager
def watching(model: PreTrainedModel, watcher: Watcher) -> Iterator[None]:
    """Within, attention of the layers with a growing cache is what `watcher` says. Of two models at a time, one can be watched.

    Raises:
        RequestError: the model has no such layer, or never asked (it computes attention by itself).
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    layers = {index: number for number, index in enumerate(compressed_layers(config))}
    if not layers:
        raise RequestError(f"{name} has no layer with full attention, so there is no cache to calibrate")
    calls = 0

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """`[batch, heads, q, size]` in, `[batch, q, heads, size]` out."""
        nonlocal calls
        unknown = unknown_argument(kwargs)
        if unknown is not None:
            raise RequestError(f"{name}: attention has {unknown}, which compressed caches do not know")
        index = getattr(module, "layer_idx", None)
        if index is None:
            raise RequestError(f"{name}: attention does not know which layer it is in, so it cannot be calibrated")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        softcap = float(kwargs.get("softcap") or 0.0)
        call = AttentionCall(layers.get(index, -1), query, key, value, attention_mask, scale, softcap, module)
        if call.layer < 0:  # a sliding window, whose cache stays as it is
            return call.full().transpose(1, 2), None
        calls += 1
        return watcher(call).transpose(1, 2).contiguous(), None

    before = config._attn_implementation
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    try:
        model.set_attn_implementation(NAME)
        yield
    finally:
        model.set_attn_implementation(before)
    if calls == 0:
        raise RequestError(f"{name} computes attention by itself, so its cache cannot be calibrated")
