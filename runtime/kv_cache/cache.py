"""The compressed cache of a model: a transformers `Cache`, so that `model.generate(past_key_values=...)` takes it too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from runtime.kv_cache import attention
from runtime.kv_cache.eviction import Eviction
from runtime.kv_cache.layer import CompressedLayer
from runtime.kv_cache.plan import CachePlan
from runtime.kv_cache.storage.plain import Plain
from runtime.kv_cache.storage.plan import Tier

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from runtime.kv_cache.selection.reads import Reads


class CompressedCache(Cache):
    """Layers with full attention are compressed; sliding, chunked and recurrent ones keep the cache that transformers gives them.

    Keys are stored with their rotary embedding applied and keep it: a token that stays has the position it had in the text, whatever
    was evicted around it, and new tokens go on counting from all that came. Models trained on n positions are so bound to n still.

    Args:
        model: whose cache it is; its attention implementation must be "compress_kv" (`prepare`).
        plan: what is evicted, stored and read; None: everything, as it comes.

    Attributes:
        reads: how much of what they held steps have read; None without a selection, all of it.

    Raises:
        ValueError: the model's attention is another one, or no layer has full attention.
    """

    def __init__(self, model: PreTrainedModel, plan: CachePlan | None = None) -> None:
        config = model.config.get_text_config(decoder=True)
        if getattr(config, "_attn_implementation", None) != attention.NAME:
            raise ValueError(
                f"{type(model).__name__} computes attention with {config._attn_implementation!r}, which reads no compressed cache; "
                "call runtime.kv_cache.prepare(model) first"
            )
        plan = plan or CachePlan()
        layers: list[Any] = list(DynamicCache(config=config).layers)
        compressed = compressed_layers(config)
        if not compressed:
            raise ValueError(
                f"{type(model).__name__} has no layer with full attention, so there is no cache to compress"
            )
        eviction = None if plan.eviction is None else Eviction(plan.eviction, len(compressed))
        selection = None if plan.selection is None else plan.selection.begin(len(compressed))
        self.reads: Reads | None = None if selection is None else selection.reads
        storage, offload = plan.storage, None
        if plan.offload is not None:
            offload = plan.offload.begin(model.device)
            if not storage.tiers:  # floats, but elsewhere
                storage = replace(storage, tiers=(Tier(Plain(), Plain()),))
        previous: CompressedLayer | None = None
        for number, index in enumerate(compressed):
            layer = layers[index] = CompressedLayer(number, eviction, storage, selection, offload)
            if previous is not None:
                previous.following = layer
            previous = layer
        if previous is not None:
            previous.following = layers[compressed[0]]
        super().__init__(layers=layers)

    @property
    def offloaded_bytes(self) -> int:
        """Of tokens that are held elsewhere (a disk, the host of a GPU), as allocated there."""
        return sum(layer.offloaded_bytes for layer in self.layers if isinstance(layer, CompressedLayer))

    @property
    def nbytes(self) -> int:
        """Memory as allocated, all layers; what is offloaded is counted apart."""
        own = [layer for layer in self.layers if isinstance(layer, CompressedLayer)]
        others = [layer for layer in self.layers if not isinstance(layer, CompressedLayer)]
        tensors = [value for layer in others for value in vars(layer).values() if isinstance(value, torch.Tensor)]
        return sum(layer.nbytes for layer in own) + sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def compressed_layers(config: Any) -> list[int]:
    """Indices of the layers of a text config that are compressed: those with full attention, as transformers tells them apart."""
    return [index for index, layer in enumerate(DynamicCache(config=config).layers) if type(layer) is DynamicLayer]


def prepare(model: PreTrainedModel) -> None:
    """Let the model's attention read compressed caches; without one it computes as with sdpa."""
    attention.register()
    model.set_attn_implementation(attention.NAME)
