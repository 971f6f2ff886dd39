"""Checks of cache policies: which axes do not go together, and which models a policy can be for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from runtime.config.settings import ConfigError, calibrations_of
from runtime.kv_cache.eviction import EvictionPlan
from runtime.kv_cache.policy.axes import Axes
from runtime.kv_cache.policy.calibrated import calibrations, fingerprint
from runtime.kv_cache.policy.registries import PREFIX_TOKENS
from runtime.kv_cache.scores.base import Accumulating
from runtime.kv_cache.selection.base import Budget
from runtime.kv_cache.shape import Shape, compressed_layers, layer_configs
from runtime.modeling.skeleton import model_kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Scores that pick the same tokens in all heads and layers.
_ALIKE = ("streaming",)


# ---------------------------------------------------------------- combinations
def check_combination(policy: Axes) -> None:
    """ConfigError for the first combination that cannot be."""
    for key, plan, least, who, way in _floors(policy):
        if plan.tokens is not None and plan.tokens <= least:
            text = f"{plan.tokens} tokens are not more than the {least} that {who}"
            raise ConfigError((key, "tokens"), f"{text}; raise tokens, or {way}")
    _check_floats(policy)
    _check_tiers(policy)
    if policy.select is not None and policy.select.needs_aligned:
        _check_aligned(policy, policy.select.name)


def _floors(policy: Axes) -> Iterator[tuple[str, EvictionPlan | Budget, int, str, str]]:
    """For what is evicted and what is read: its key, its budget, tokens that no budget takes from a head, who takes them, and how to
    have fewer of them."""
    evict, select = policy.evict, policy.select
    if evict is not None:
        always = "and the prefix always keep" if policy.first else "always keeps"
        least = evict.score.kept() + policy.first
        yield "evict", evict, least, f"{evict.score.name} {always}", "shorten the window of the score"
    if select is not None:
        ends = " and ".join(name for name in ("recent", "sinks") if hasattr(select, name))
        who = f"{select.name} always reads, so that it would choose none"
        yield "select", select, select.always(), who, f"lower {ends}"


def _moves(policy: Axes) -> bool:
    """Whether older tokens are stored otherwise than the newest."""
    return bool(policy.tiers) or policy.clusters is not None or policy.offload is not None


def _check_floats(policy: Axes) -> None:
    """Something must be left to be stored otherwise; of a prompt that stays, much is."""
    plan, floats = policy.evict, policy.recent + policy.first
    if plan is None or plan.tokens is None or plan.keeps_prompt or not _moves(policy) or plan.tokens > floats:
        return
    which = f"{policy.recent} newest" + (f" and {policy.first} first" if policy.first else "")
    text = f"{plan.tokens} tokens are not more than the {which} stored as floats, so no token would be compressed"
    raise ConfigError(("evict", "tokens"), f"{text}; raise tokens above {floats}, or lower recent")


def _check_tiers(policy: Axes) -> None:
    """Several tiers and centroids lose the order of tokens, which eviction while decoding goes by."""
    several, saliency = len(policy.tiers) > 1, policy.saliency
    if saliency is not None and not several:
        raise ConfigError(("saliency",), "it orders tokens among several tiers, and there are none")
    if several and policy.clusters is not None:
        raise ConfigError(("clusters",), "centroids are held in one way; give keys and values instead of tiers")
    if policy.evict is not None and policy.evict.interval is not None and (several or policy.clusters is not None):
        what = "tokens of several tiers have lost their order" if several else "centroids stand for many tokens"
        key = "tiers" if several else "clusters"
        text = f"{what}, so that eviction while decoding cannot choose among them; leave out interval, or {key}"
        raise ConfigError(("evict", "interval"), text)
    if several:
        assert saliency is not None
        calibrates = calibrations_of(type(saliency))
        if calibrates or isinstance(saliency, Accumulating):
            why = "needs calibration" if calibrates else "would have to remember every query"
            raise ConfigError(("saliency",), f"{saliency.name} {why}; take snapkv, normalized, tova or streaming")


def _check_aligned(policy: Axes, name: str) -> None:
    other = "tiers hold other tokens in each; give one" if len(policy.tiers) > 1 else ""
    other = "clusters differ from head to head" if policy.clusters is not None else other
    if other:
        raise ConfigError(("select",), f"{name} reads the same places in all heads, and {other}")
    plan = policy.evict
    if plan is None:
        return
    if plan.score.name not in _ALIKE or (plan.layers.name, plan.heads.name) != ("uniform", "equal"):
        text = f"{name} reads the same places in all heads and layers"
        text = f"{text}, and {plan.score.name} leaves other tokens in each"
        raise ConfigError(("select",), f"{text}; evict by {' or '.join(_ALIKE)} with equal shares, or take quest")


# ---------------------------------------------------------------- models
def check_model(policy: Axes, config: Any) -> None:
    """ConfigError where a model of this config has nothing to compress, or the policy was calibrated for another."""
    name, reason = _name(config), _why_not(config)
    if reason is not None:
        raise ConfigError((), f"{name} {reason}")
    shape = Shape.of(config, torch.float32)
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions:
        _check_positions(policy, int(positions), name)
    if policy.calibrated is not None:
        _check_calibrated(policy, config, shape)
    for key, method in policy.methods.items():
        try:
            policy.with_facts(method).check_shape(shape)
        except ValueError as error:
            where, _, reason = str(error).removeprefix(f"{method.name}.").partition(" ")
            place = "calibrated" if where in calibrations_of(type(method)) else key
            raise ConfigError((place, where), f"{reason} ({name})") from error


def _why_not(config: Any) -> str | None:
    """Why a model of this config has no cache that a policy could be for; None: it has."""
    kind, text = model_kind(config), config.get_text_config(decoder=True)
    if kind != "decoder":
        return f"is an {kind}; only causal language models have a cache that a policy can compress"
    if getattr(text, "kv_lora_rank", None):
        return "caches latents that keys and values are made of, not these (multi-latent attention)"
    if getattr(text, "num_kv_shared_layers", None) or "reuse" in (getattr(text, "kv_sharing_modes", None) or ()):
        return "has layers that share the cache of others, which compressed caches do not know"
    parts = layer_configs(text)
    if any(getattr(part, "num_attention_heads", None) for part in parts) and compressed_layers(text):
        return None
    windowed = any(getattr(part, "sliding_window", None) for part in parts)
    kinds = sorted(set(getattr(text, "layer_types", None) or (["sliding_attention"] if windowed else [])))
    if "hybrid" in kinds:
        return (
            "has layers of attention and a recurrent state side by side (hybrid), which compressed caches do not know"
        )
    what = f" (its layers: {', '.join(kinds)})" if kinds else ""
    return f"has no layer with full attention{what}, so there is no cache to compress"


def _check_calibrated(policy: Axes, config: Any, shape: Shape) -> None:
    known, name, text = policy.calibrated, _name(config), config.get_text_config(decoder=True)
    assert known is not None
    own = fingerprint(config)
    if known.fingerprint != own:
        what = f"its fingerprint is {known.fingerprint}, that of {name} is {own}"
        raise ConfigError(("calibrated", "fingerprint"), f"the policy was calibrated for another model: {what}")
    for field, calibration in calibrations().items():
        table = known.values.get(field)
        if table is None or not calibration.per_head:
            continue
        if [len(row) for row in table] != [layer.heads for layer in shape.layers]:
            found = f"{len(table)} layers of {_several(len(row) for row in table)} key heads"
            heads = _several(layer.heads for layer in shape.layers)
            whose = f"{name} has {len(shape.layers)} layers with full attention, of {heads}"
            raise ConfigError(("calibrated", field), f"they are for {found}; {whose}")
    wrong = [token for token in known.values.get(PREFIX_TOKENS.name, ()) if token >= text.vocab_size]
    if wrong:
        what = f"token {wrong[0]} is outside the vocabulary of {text.vocab_size}"
        raise ConfigError(("calibrated", PREFIX_TOKENS.name), what)


def _check_positions(policy: Axes, positions: int, name: str) -> None:
    """ConfigError where a ratio of the longest sequence that the model reads is no more than what is kept or read anyway, or prefix tokens
    leave no room for two of a text."""
    count = len(policy.prefix_tokens)
    if positions - count < 2:
        text = f"{count} tokens leave no text in the {positions} positions of {name}; give fewer"
        raise ConfigError(("calibrated", PREFIX_TOKENS.name), text)
    for key, plan, least, who, way in _floors(policy):
        if plan.ratio is not None and plan.ratio * positions <= least:
            share = f"{plan.ratio:.3g} of the {positions} positions of {name} are {plan.ratio * positions:.4g} tokens"
            raise ConfigError((key, "ratio"), f"{share}, not more than the {least} that {who}; raise ratio, or {way}")


def check_module(module: PreTrainedModel) -> None:
    """ConfigError where the code of the model's attention cannot be asked to read compressed caches; weights may be on meta."""
    name = type(module).__name__
    # Not `_supports_attention_backend`: many families call the interface without saying so.
    if not module._can_set_attn_implementation():
        text = "computes attention in a way of its own (not through transformers' attention interface), which reads no compressed cache"
        raise ConfigError((), f"{name} {text}", "kv_cache")
    if any(part == "sinks" for full, _ in module.named_parameters() for part in full.rsplit(".", 1)[-1:]):
        raise ConfigError((), f"{name} has learned attention sinks, which compressed caches do not know", "kv_cache")


def idle(policy: Axes, config: Any) -> list[str]:
    """What of a policy does nothing to a model of this config, whose sequences are too short; sentences that begin with the key."""
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not isinstance(limit, int):
        return []
    evict, select = policy.evict, policy.select
    long = f"the longest sequence of this model, {limit} tokens"
    tokens = 0 if evict is None else evict.tokens or 0
    steps = evict.interval or 0 if evict is not None and evict.keeps_prompt else 0
    read = 0 if select is None else select.tokens or 0
    floats = policy.recent + policy.first if _moves(policy) else 0
    found = {
        f"evict.tokens: {tokens} are": (tokens, "nothing is ever evicted; lower tokens"),
        f"evict.interval: {steps} steps are": (steps, "nothing is ever evicted; lower interval"),
        f"select.tokens: {read} are": (read, "steps read everything; lower tokens"),
        f"recent: {floats} tokens that stay floats are": (floats, "none is held otherwise; lower recent"),
    }
    return [f"{what} no fewer than {long}, so {so}" for what, (count, so) in found.items() if count >= limit]


def _several(numbers: Iterable[int]) -> str:
    """One number, or the different ones: "2", "1, 4"."""
    return ", ".join(str(number) for number in sorted(set(numbers)))


def _name(config: Any) -> str:
    named = getattr(config, "architectures", None)
    return str(named[0]) if named else str(getattr(config, "model_type", "the model"))
