"""Keys and values of calibrated prefix tokens, computed once from unrounded inputs (PrefixQuant, 2024, arXiv 2410.05265).

A static input grid is made for the tokens behind the prefix. The prefix's own inputs are the outliers that the grid leaves out, and
rounding would clip them. All that other tokens see of the prefix are its keys and values, which are the same in every sequence: they are
computed when the model is loaded, by its own compressed weights with inputs as they are, and take the place of what a prompt's pass
computes. So an artifact stores no cache, and no kernel needs to know which tokens it rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache

from runtime.config.settings import ConfigError
from runtime.layers.unrounded import unrounded
from runtime.modeling.cache_argument import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Recorded(DynamicCache):
    """A cache that notes what each layer gives it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.given[layer_idx] = key_states, value_states
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@dataclass(frozen=True)
class PrefixStates:
    """What a model caches of its prefix.

    Attributes:
        config: of the model's decoder.
        layers: of each layer keys `[1, kv_heads, tokens, size]`, rotated for positions 0, 1, ..., and values `[1, kv_heads, tokens,
            value_size]`, in the model's dtype.
    """

    config: Any
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    @torch.inference_mode()
    def compute(cls, module: PreTrainedModel, tokens: tuple[int, ...]) -> PrefixStates:
        """Run the tokens through the model.

        Raises:
            ConfigError: a layer keeps something else of tokens than keys and values.
        """
        config = module.config.get_text_config(decoder=True)
        cache = _Recorded(config)
        ids = torch.tensor([tokens], device=module.device)
        with unrounded(module):
            module(input_ids=ids, use_cache=True, **{cache_argument(module): cache})
        if len(cache.given) < config.num_hidden_layers:
            text = f"{type(module).__name__} has layers without keys and values, which clipped inputs of prefix tokens would reach"
            raise ConfigError(("prefix",), f"{text}; make the activations dynamic", "kv_cache")
        return cls(config, cache.given)

    def put(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, first: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[batch, kv_heads, n, size]` of a layer with the prefix's own in columns `first` `[batch]` and following."""
        own = self.layers[layer]
        columns = first[:, None] + torch.arange(own[0].shape[2], device=first.device)
        rows = torch.arange(len(first), device=first.device)[:, None]
        found = []
        for states, prefix in zip((keys, values), own, strict=True):
            states = states.clone()
            states[rows, :, columns] = prefix.transpose(1, 2).to(states.dtype)
            found.append(states)
        return found[0], found[1]

    def begin(self, batch: int) -> DynamicCache:
        """A plain cache of so many sequences that hold the prefix alone."""
        cache = DynamicCache(config=self.config)
        for layer, (keys, values) in self.layers.items():
            cache.update(keys.expand(batch, -1, -1, -1), values.expand(batch, -1, -1, -1), layer)
        return cache
