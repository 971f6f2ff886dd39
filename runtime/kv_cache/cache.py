"""Compressed cache of a model: a transformers `Cache`, so that `model.generate(past_key_values=...)` takes it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicSlidingWindowLayer

from runtime.config.settings import ConfigError
from runtime.kv_cache import attend
from runtime.kv_cache.eviction import Eviction
from runtime.kv_cache.layer import CompressedLayer
from runtime.kv_cache.plan import CachePlan
from runtime.kv_cache.policy.checks import check_module
from runtime.kv_cache.policy.policy import Policy
from runtime.kv_cache.prefix import PrefixStates
from runtime.kv_cache.shape import compressed_layers
from runtime.kv_cache.storage.plan import Tier
from runtime.modeling.cache_argument import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from runtime.kv_cache.selection.base import ReadCounter


_RECORDED = "_compress_inputs_recorded"


class CompressedCache(Cache):
    """Layers with full attention are compressed; sliding, chunked and recurrent ones keep the cache that transformers gives them.

    Keys are stored with their rotary embedding applied and keep it: a token that stays has the position it had in its sequence, whatever
    was evicted around it, and new tokens go on counting from all that came. Models trained on n positions are so bound to n still.

    Args:
        model: whose cache it is; its attention implementation must be "compress_kv" (`prepare`).
        plan: what is evicted, stored and read; None: everything, as it comes. A `Policy`, or what `Policy.parse` takes (a published
            name, a mapping), is checked against the model as by `runtime.load`; a `CachePlan` is taken as it is.

    Attributes:
        reads: how many of the cached tokens steps have read; None without a selection: all of them.
        prefix: what the first chunk's prefix tokens are cached as, and the columns `[batch]` where these begin; None: as they come.

    Raises:
        ValueError: the model's attention is another one, no layer has full attention, or the policy cannot be for this model:
            it was calibrated for another, needs calibration and has none, or wants tokens before the prompts, which only
            `runtime.load` puts there.
    """

    def __init__(
        self, model: PreTrainedModel, plan: Policy | CachePlan | str | Mapping[str, Any] | None = None
    ) -> None:
        if isinstance(plan, (str, Mapping)):
            plan = Policy.parse(plan)
        config = model.config.get_text_config(decoder=True)
        name = type(model).__name__
        if getattr(config, "_attn_implementation", None) != attend.NAME:
            raise ValueError(
                f"{name} computes attention with {config._attn_implementation!r}, which reads no compressed cache; "
                "call runtime.kv_cache.prepare(model) first"
            )
        plan = _checked(plan, model) if isinstance(plan, Policy) else plan or CachePlan()
        layers: list[Any] = list(DynamicCache(config=config).layers)
        compressed = compressed_layers(config)
        if not compressed:
            raise ValueError(f"{name} has no layer with full attention, so there is no cache to compress")
        eviction = None if plan.eviction is None else Eviction(plan.eviction, len(compressed))
        if eviction is not None and "hidden" in eviction.plan.score.wants and not getattr(model, _RECORDED, False):
            attend.record_inputs(model)
            setattr(model, _RECORDED, True)
        selection = None if plan.selection is None else plan.selection.begin(len(compressed))
        self.reads: ReadCounter | None = None if selection is None else selection.reads
        self.prefix: tuple[PrefixStates, torch.Tensor] | None = None
        storage, offload = plan.storage, None
        if plan.offload is not None:
            offload = plan.offload.begin(model.device)
            if not storage.tiers:  # floats, but elsewhere
                storage = replace(storage, tiers=(Tier(),))
        for number, index in enumerate(compressed):
            layers[index] = CompressedLayer(number, eviction, storage, selection, offload)
        super().__init__(layers=layers)
        own = self.compressed
        for layer, following in zip(own, [*own[1:], own[0]], strict=True):
            layer.following = following

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As transformers' own; what a sliding window no longer needs is freed, too."""
        if self.prefix is not None and not self.get_seq_length(layer_idx):
            states, first = self.prefix
            key_states, value_states = states.put(layer_idx, key_states, value_states, first)
        found: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        if isinstance(layer, DynamicSlidingWindowLayer) and not layer.record_past:
            assert layer.keys is not None
            assert layer.values is not None
            # They keep a view of all that came, so that a whole prompt would stay in memory until the next step.
            layer.keys, layer.values = _own(layer.keys), _own(layer.values)
        return found

    @property
    def compressed(self) -> list[CompressedLayer]:
        """The layers with full attention."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    @property
    def offloaded_bytes(self) -> int:
        """Memory of tokens that lie elsewhere (a disk, the host of a GPU), as allocated there."""
        return sum(layer.offloaded_bytes for layer in self.compressed)

    @property
    def nbytes(self) -> int:
        """Memory as allocated, all layers; what is offloaded is counted apart."""
        others = [layer for layer in self.layers if not isinstance(layer, CompressedLayer)]
        values = [value for layer in others for value in vars(layer).values()]
        # Recurrent layers have their states in dictionaries.
        values += [state for value in values if isinstance(value, dict) for state in value.values()]
        beside = sum(value.untyped_storage().nbytes() for value in values if isinstance(value, torch.Tensor))
        return beside + sum(layer.nbytes for layer in self.compressed)


def prepare(model: PreTrainedModel) -> None:
    """Let the model's attention read compressed caches; without one it computes as with sdpa.

    Raises:
        ConfigError: the model's attention cannot be asked to.
    """
    check_module(model)
    attend.register()
    model.set_attn_implementation(attend.NAME)


@torch.inference_mode()
def probe(module: PreTrainedModel) -> None:
    """Run two tokens over a compressed cache where transformers itself does not vouch for the model's attention.

    Those that it vouches for are asked by `check_asked` after each forward pass; a model that is read from a disk layer by layer
    need not be read once more for it.

    Args:
        module: prepared, its weights in place.

    Raises:
        ConfigError: a layer's attention did not ask its cache, or has an argument that compressed caches do not know.
    """
    if getattr(module, "_supports_attention_backend", False):
        return
    try:
        cache = CompressedCache(module)
        ids = torch.zeros(1, 2, dtype=torch.int64, device=module.device)
        module(input_ids=ids, use_cache=True, **{cache_argument(module): cache})
    except ValueError as error:
        raise ConfigError((), str(error), "kv_cache") from error
    check_asked(module, cache, 2)


def check_asked(module: PreTrainedModel, cache: CompressedCache, tokens: int) -> None:
    """ConfigError where a layer's attention did not read the cache: its output would be wrong, not slow.

    Args:
        module: the model.
        cache: that it has filled.
        tokens: how many have come, padding included.
    """
    for layer in cache.compressed:
        if layer.seen != tokens:
            text = "computes attention in a way that does not read compressed caches; load it with kv_cache=False"
            raise ConfigError((), f"{type(module).__name__} {text}", "kv_cache")


def _checked(policy: Policy, model: PreTrainedModel) -> CachePlan:
    """The plan of a policy that is for this model; ConfigError where it is not."""
    policy.check_model(model.config)
    plan = policy.plan()
    if policy.prefix == "calibrated":
        text = (
            "calibrated prefix tokens are put before every prompt by runtime.load, not by a cache; load the model with it, "
            "or put them there yourself and say how many they are (prefix: n)"
        )
        raise ConfigError(("prefix",), text, "kv_cache")
    return plan


def _own(states: torch.Tensor) -> torch.Tensor:
    """The same states, copied where more than an eighth of the memory behind them is not theirs: not at every step of decoding."""
    return states.clone() if states.untyped_storage().nbytes() * 8 > states.nbytes * 9 else states
