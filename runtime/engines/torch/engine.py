"""Engine of transformers' modules, whose compressed layers stay packed: for every causal model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime.config.settings import ConfigError
from runtime.engines.rows import RowEngine, RowPool
from runtime.engines.torch.drafts import MOST_ROWS, ChainPool, TreePool, probe, why_not
from runtime.errors import ArtifactError, CompressError, RequestError
from runtime.kv_cache import drafts
from runtime.kv_cache.cache import CompressedCache, check_asked, prepare
from runtime.kv_cache.cache import probe as probe_cache
from runtime.kv_cache.estimate import needed_bytes
from runtime.kv_cache.kernels import explain
from runtime.kv_cache.layer import STEP_TOKENS, CompressedLayer
from runtime.kv_cache.policy.policy import Policy
from runtime.kv_cache.prefix import PrefixStates
from runtime.kv_cache.shape import Shape
from runtime.kv_cache.storage.base import StateError
from runtime.kv_cache.token_store import TokenStore
from runtime.layers.dense_products import products_of
from runtime.layers.unrounded import input_prefix
from runtime.modeling.cache_argument import CACHE_ARGUMENTS, cache_argument
from runtime.modeling.linear_modules import is_matrix

if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: Elements of the largest float32 copy of weights that a product makes: 64 MB, for which a bound of memory has room.
LARGEST_WIDENED = 1 << 24

# Layers in which padding on the left changes nothing for the tokens; others (recurrent, convolutional) carry it along.
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


class ModuleEngine:
    """Base class: an engine of transformers' modules, whose compressed layers keep their weights packed."""

    why_modules: str | None = None  # why no native engine computes the model; None: none was asked, or one does

    def __init__(self, module: PreTrainedModel, device: torch.device) -> None:
        self.module = module
        self.device = device
        self.weight_bytes = weight_bytes(module)
        self.description = f"transformers' {type(module).__name__}"

    def explain(self) -> dict[str, str]:
        """{linear layer: the kernel that computes it}, and under "model" why transformers' modules compute what lies between."""
        result = {} if self.why_modules is None else {"model": f"transformers' modules, {self.why_modules}"}
        for name, child in self.module.named_modules():
            kernel = getattr(child, "kernel_name", None)
            if kernel is not None:
                result[name] = str(kernel)
            elif is_matrix(child):
                result[name] = f"torch {str(child.weight.dtype).removeprefix('torch.')}"
        return result

    def products(self) -> AbstractContextManager[Any]:
        """The context in which the module runs."""
        return products_of(self.module, self.device, LARGEST_WIDENED)

    @torch.inference_mode()
    def keep_rows(self, cache: Any, rows: torch.Tensor) -> None:
        """Keep only `rows` of a cache of transformers, in this order."""
        cache.batch_select_indices(rows)


class CacheFactory:
    """What a policy makes of one model's caches.

    Args:
        module: the model; its attention is prepared for compressed caches.
        policy: what they do.

    Attributes:
        description: of the policy, in a few words.
        prefix: token ids that come before every prompt.
        states: what is cached of them where static grids would clip their inputs; None: what each prompt's pass computes.

    Raises:
        ConfigError: the model's attention cannot, calibration is missing, or its device does not go with the policy.
    """

    def __init__(self, module: PreTrainedModel, policy: Policy) -> None:
        self.policy, self.plan = policy, policy.plan()
        self.description, self.prefix = policy.describe(), policy.prefix_tokens
        prepare(module)
        probe_cache(module)
        self.states = PrefixStates.compute(module, self.prefix) if input_prefix(module) else None
        self._module = module
        self._shape = Shape.of(module.config, module.dtype)
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

    def length(self, cache: CompressedCache) -> int:
        """Tokens of the longest row so far, prefix and padding included."""
        return next(layer.seen for layer in cache.layers if isinstance(layer, CompressedLayer))

    def begin(
        self, cache: CompressedCache, input_ids: torch.Tensor, mask: torch.Tensor | None
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
        if self.states is not None:
            cache.prefix = self.states, padding
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


class TorchEngine(ModuleEngine, RowEngine):
    """Runs a transformers causal language model over one batch of rows.

    Attributes:
        cache_factory: makes compressed caches of keys and values; None: they are not compressed.

    Raises:
        ArtifactError: the model keeps no KV cache in the way of transformers 5.
    """

    def __init__(self, module: PreTrainedModel, device: torch.device) -> None:
        super().__init__(module, device)
        accepted = inspect.signature(module.forward).parameters
        self._cache_argument = cache_argument(module)
        if not self._cache_argument:
            raise ArtifactError(
                f"{type(module).__name__} takes no KV cache ({' or '.join(CACHE_ARGUMENTS)}); this runtime cannot decode it"
            )
        self._takes_positions = "position_ids" in accepted
        self._takes_last_only = "logits_to_keep" in accepted
        text = module.config.get_text_config()
        self.context_length: int | None = getattr(text, "max_position_embeddings", None)
        layers = set(getattr(text, "layer_types", None) or ())
        self.padding_is_exact = self._takes_positions and layers <= _ATTENTION_LAYERS
        embeddings = module.get_input_embeddings()
        self.vocab_size = int(getattr(embeddings, "num_embeddings", 0) or text.vocab_size)
        self.cache_factory: CacheFactory | None = None

    def compress_cache(self, policy: Policy) -> None:
        """Hold keys and values as a policy says from now on; ConfigError where the model cannot."""
        self.cache_factory, self.policy = CacheFactory(self.module, policy), policy
        self.description += f", compressed cache ({self.cache_factory.description})"
        if self.context_length is not None:
            self.context_length -= len(self.cache_factory.prefix)

    def new_cache(self) -> Any:
        if self.cache_factory is not None:
            return self.cache_factory.new()
        from transformers import DynamicCache

        return DynamicCache(config=self.module.config.get_text_config())

    @torch.inference_mode()
    def rewind(self, cache: Any, count: int) -> bool:
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

        if self.cache_factory is not None:  # what was evicted for one prompt is missing in the next
            return False
        for layer in cache.layers:
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                return False
            if count and layer.is_sliding and layer.get_seq_length() >= layer.sliding_window:
                return False
        if count:
            cache.crop(-count)
        return True

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        cache: Any,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        last_only: bool = False,
    ) -> torch.Tensor:
        """As `Engine.forward`; over a plain cache `attention_mask` may also be what transformers takes as one: who sees whom, `[batch, 1,
        seq, cached + seq]`, or one of these for each kind of layer.
        """
        factory = self.cache_factory if cache is not None else None
        before = factory.length(cache) if factory is not None else 0
        width = input_ids.shape[1]
        if cache is None and self.cache_factory is not None and self.cache_factory.states is not None:
            # Static grids are good for tokens behind the prefix only. Without a cache, rows are whole and unpadded.
            assert attention_mask is None
            assert position_ids is None
            cache = self.cache_factory.states.begin(len(input_ids))
        if factory is not None and factory.prefix:
            if before:
                attention_mask = factory.extend(attention_mask)
                position_ids = None if position_ids is None else position_ids + len(factory.prefix)
            else:
                input_ids, attention_mask, position_ids = factory.begin(cache, input_ids, attention_mask)
        arguments: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "use_cache": cache is not None,
        }
        arguments[self._cache_argument] = cache
        if self._takes_positions and position_ids is not None:
            arguments["position_ids"] = position_ids
        if last_only and self._takes_last_only:
            arguments["logits_to_keep"] = 1
        with self.products(), nullcontext() if factory is None else factory.failures():
            logits = self.module(**arguments).logits
        if factory is not None:
            check_asked(self.module, cache, before + input_ids.shape[1])  # else its output would be wrong, not slow
        return logits[:, -1 if last_only else -width :].float()

    def cache_bytes(self, cache: Any) -> int:
        if self.cache_factory is not None:
            return int(cache.nbytes)
        values = [value for layer in cache.layers for value in vars(layer).values()]
        # Recurrent layers have their states in dictionaries.
        values += [state for value in values if isinstance(value, dict) for state in value.values()]
        return tensor_bytes([value for value in values if isinstance(value, torch.Tensor)])

    def explain(self) -> dict[str, str]:
        return super().explain() | ({} if self.cache_factory is None else self.cache_factory.explain())

    # ---------------------------------------------------------------- drafts
    @property
    def trees(self) -> bool:  # type: ignore[override]
        """Whether chunks may be trees: not with a compressed cache."""
        return self.cache_factory is None

    @property
    def draft_rows(self) -> int:
        """Tokens that a step of drafts should have at most; fewer with a compressed cache."""
        return MOST_ROWS if self.cache_factory is None else STEP_TOKENS

    def new_pages(self, count: int, drafts: bool = False) -> RowPool:
        """As `Engine.new_pages`; over a compressed cache drafts of one sequence are verified.

        Raises:
            RequestError: no drafts are verified for this model, as far as can be told without trying.
        """
        if not drafts:
            return RowPool(self)
        reason = self._against_drafts()
        if reason is not None:
            raise RequestError(f"drafter: {reason}")
        return TreePool(self, self.module) if self.cache_factory is None else ChainPool(self, self.module)

    def draft_room(self, pool: RowPool) -> int | None:
        return pool.room() if isinstance(pool, ChainPool) else None

    def why_not_drafts(self) -> str | None:
        reason = self._against_drafts()
        return probe(self, self.module) if reason is None and self.cache_factory is None else reason

    def _against_drafts(self) -> str | None:
        factory = self.cache_factory
        return why_not(self.module, self.padding_is_exact) if factory is None else factory.why_not_drafts()


def weight_bytes(module: nn.Module) -> int:
    """Memory of all parameters and buffers, shared ones counted once."""
    return tensor_bytes([*module.parameters(), *module.buffers()])


def tensor_bytes(tensors: list[torch.Tensor]) -> int:
    """Memory behind the tensors, shared storages counted once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device.type != "meta"
    }
    return sum(storages.values())
