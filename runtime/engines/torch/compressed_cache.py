"""A compressed cache for an engine of transformers' modules: made for each call, its prefix put before prompts, its size known before."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from runtime.config.settings import ConfigError
from runtime.errors import CompressError
from runtime.kv_cache import drafts
from runtime.kv_cache.cache import CompressedCache, check_asked, prepare, probe
from runtime.kv_cache.estimate import needed_bytes
from runtime.kv_cache.kernels import explain
from runtime.kv_cache.layer import CompressedLayer
from runtime.kv_cache.policy.policy import Policy
from runtime.kv_cache.shape import Shape
from runtime.kv_cache.storage.base import StateError
from runtime.kv_cache.token_store import TokenStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger("compress.kv_cache")


class CacheFactory:
    """What a policy makes of one model's caches.

    Args:
        module: the model; its attention is prepared for compressed caches.
        policy: what they do.

    Attributes:
        description: of the policy, in a few words.
        prefix: token ids that come before every prompt.

    Raises:
        ConfigError: the model's attention cannot, calibration is missing, or its device does not go with the policy.
    """

    def __init__(self, module: PreTrainedModel, policy: Policy) -> None:
        self.policy, self.plan = policy, policy.plan()
        self.description, self.prefix = policy.describe(), policy.prefix_tokens
        prepare(module)
        probe(module)
        self._module = module
        self._shape = Shape.of(module.config, module.dtype)
        for sentence in policy.idle(module.config):
            _log.warning("kv_cache.%s", sentence)
        try:
            self.new()  # what cannot be made is known now
        except ValueError as error:
            raise ConfigError((), str(error), "kv_cache") from error

    def new(self) -> CompressedCache:
        """An empty cache with this plan."""
        return CompressedCache(self._module, self.plan)

    def need(self, prompt: int, new: int) -> int:
        """Bytes that one sequence takes at most, about."""
        return needed_bytes(self._shape, self.policy, prompt, new)

    def explain(self) -> dict[str, str]:
        """{"kv_cache.LAYER": the kernel that steps read the layer's cache with}, or "kv-reference" and why none of them does."""
        device, found = self._module.device, {}
        shapes = iter(self._shape.layers)
        for index, layer in enumerate(self.new().layers):
            if isinstance(layer, CompressedLayer):
                shape = next(shapes)
                query = torch.empty(
                    shape.heads, shape.query_heads // shape.heads, shape.sizes[0], dtype=shape.dtype, device=device
                )
                store = TokenStore(shape.heads, shape.sizes, shape.dtype, device, layer.storage)
                ways = dict.fromkeys(explain(query, region) for region in store.every)
                found[f"kv_cache.{index}"] = ", ".join(ways)
        return found

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Around a forward pass over a compressed cache.

        Raises:
            ConfigError: the policy's storage cannot hold what the model computes; the sentence says what can.
            CompressError: the cache failed otherwise, as where a disk is full.
        """
        try:
            yield
        except CompressError:
            raise
        except StateError as error:
            raise ConfigError((), str(error), "kv_cache") from error
        except ValueError as error:
            raise CompressError(f"kv_cache ({self.description}): {error}") from error

    def check_read(self, cache: CompressedCache, before: int, count: int) -> None:
        """ConfigError where a layer's attention did not ask the cache for what it holds: its output would be wrong, not slow."""
        check_asked(self._module, cache, before + count)

    def length(self, cache: CompressedCache) -> int:
        """Tokens of the longest row so far, prefix and padding included."""
        return next(layer.seen for layer in cache.layers if isinstance(layer, CompressedLayer))

    def begin(
        self, input_ids: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """A prompt `[batch, seq]` with the prefix between its padding, which is on the left, and its tokens; mask and positions too."""
        batch, count = len(input_ids), len(self.prefix)
        device = input_ids.device
        padding = torch.zeros(batch, dtype=torch.int64, device=device) if mask is None else (mask == 0).sum(1)
        ids = torch.cat([input_ids.new_zeros(batch, count), input_ids], 1)
        columns = torch.arange(count, device=device)
        prefix = torch.tensor(self.prefix, device=device).expand(batch, count)
        ids.scatter_(1, padding[:, None] + columns, prefix)
        places = torch.arange(ids.shape[1], device=device)[None] - padding[:, None]
        return ids, self.extend(mask), places.clamp(min=0)

    def extend(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """A mask of prompts and what follows them, with the prefix: rows are padding first, then tokens."""
        return None if mask is None else torch.cat([mask, mask.new_ones(len(mask), len(self.prefix))], 1)

    def why_not_drafts(self) -> str | None:
        """Why drafts cannot be verified over these caches; None: they can."""
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

        reason = drafts.why_not(self.plan)
        if reason is not None:
            return f"the cache is compressed ({self.description}): {reason}"
        for layer in self.new().layers:
            if not isinstance(layer, CompressedLayer) and type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                return f"the model caches with {type(layer).__name__} too, which takes no tokens back"
        return None
