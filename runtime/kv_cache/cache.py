"""The compressed cache of a model: a transformers `Cache`, so that `model.generate(past_key_values=...)` takes it too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from runtime.kv_cache import attention
from runtime.kv_cache.eviction import Eviction, EvictionPlan
from runtime.kv_cache.layer import CompressedLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FULL = "full_attention"


class CompressedCache(Cache):
    """Layers with full attention are compressed; sliding, chunked and recurrent ones keep the cache that transformers gives them.

    Args:
        model: whose cache it is; its attention implementation must be "compress_kv" (`prepare`).
        plan: what is evicted; None: nothing.

    Raises:
        ValueError: the model's attention is another one, or no layer has full attention.
    """

    def __init__(self, model: PreTrainedModel, plan: EvictionPlan | None) -> None:
        config = model.config.get_text_config(decoder=True)
        if getattr(config, "_attn_implementation", None) != attention.NAME:
            raise ValueError(
                f"{type(model).__name__} computes attention with {config._attn_implementation!r}, which reads no compressed cache; "
                "call runtime.kv_cache.prepare(model) first"
            )
        layers: list[Any] = list(DynamicCache(config=config).layers)
        kinds = getattr(config, "layer_types", None) or [_FULL] * config.num_hidden_layers
        compressed = [index for index, kind in enumerate(kinds) if kind == _FULL]
        if not compressed:
            raise ValueError(
                f"{type(model).__name__} has no layer with full attention, so there is no cache to compress"
            )
        eviction = None if plan is None else Eviction(plan, len(compressed))
        for number, index in enumerate(compressed):
            layers[index] = CompressedLayer(number, eviction)
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """Memory as allocated, all layers."""
        own = [layer for layer in self.layers if isinstance(layer, CompressedLayer)]
        others = [layer for layer in self.layers if not isinstance(layer, CompressedLayer)]
        tensors = [value for layer in others for value in vars(layer).values() if isinstance(value, torch.Tensor)]
        return sum(layer.nbytes for layer in own) + sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def prepare(model: PreTrainedModel) -> None:
    """Let the model's attention read compressed caches; without one it computes as with sdpa."""
    attention.register()
    model.set_attn_implementation(attention.NAME)
