"""Which keys of a policy do not go together, and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from runtime.config.fields import PolicyError
from runtime.kv_cache.pages import PAGE
from runtime.kv_cache.policy.calibrated import fingerprint
from runtime.kv_cache.policy.choices import Choice
from runtime.kv_cache.scores.base import Accumulating
from runtime.kv_cache.shape import layer_configs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from runtime.kv_cache.cache import CompressedCache
    from runtime.kv_cache.policy.policy import Policy


#: Scores that pick the same tokens in all heads and layers.
_ALIKE = ("streaming",)


def check_combination(policy: Policy) -> None:
    """PolicyError for the first combination that cannot be."""
    _eviction(policy)
    _tiers(policy)
    _clusters(policy)
    _selection(policy)
    _read(policy)
    _calibrated(policy)


def check_positions(policy: Policy, positions: int, name: str) -> None:
    """PolicyError where a ratio of the longest text that the model reads is no more than what is kept or read anyway.

    Args:
        policy: a policy whose keys go together.
        positions: of the model.
        name: of the model.
    """

    def check(key: str, ratio: float | None, least: int, who: str, way: str) -> None:
        if ratio is None or ratio * positions > least:
            return
        share = f"{ratio:.3g} of the {positions} positions of {name} are {ratio * positions:.4g} tokens"
        raise PolicyError((key, "ratio"), f"{share}, not more than the {least} that {who}; {way}")

    if policy.evict is not None:
        least, who = _always_kept(policy)
        check("evict", policy.evict.ratio, least, who, "raise ratio, or shorten the window of the score")
    if policy.select is not None:
        read = _always_read(policy.select)
        who, way = f"{policy.select.name} always reads", f"raise ratio, or lower {_lower(policy.select)}"
        check("select", policy.select.fields.get("ratio"), read, who, way)


def _eviction(policy: Policy) -> None:
    plan = policy.evict
    if plan is None:
        return
    if plan.prompt == "keep" and plan.interval is None:
        text = (
            "prompts stay whole and nothing is cut while decoding, so nothing would ever be evicted; give an interval"
        )
        raise PolicyError(("evict", "prompt"), text)
    if plan.prompt == "keep" and plan.layers.name != "uniform":
        text = f"what {plan.layers.name} gives each layer is found when a prompt is cut; leave out layers, or prompt"
        raise PolicyError(("evict", "prompt"), text)
    if plan.tokens is None:
        return
    least, who = _always_kept(policy)
    if plan.tokens <= least:
        text = f"{plan.tokens} tokens are not more than the {least} that {who}"
        raise PolicyError(("evict", "tokens"), f"{text}; raise tokens, or shorten the window of the score")
    if not policy.tiers and policy.clusters is None and policy.offload is None:
        return
    if plan.prompt == "keep":  # of the prompt at least, much is held otherwise
        return
    prefix = policy.prefix if isinstance(policy.prefix, int) else 0
    floats = policy.recent + prefix
    if plan.tokens <= floats:
        which = f"{policy.recent} newest" + (f" and {prefix} first" if prefix else "")
        text = f"{plan.tokens} tokens are not more than the {which} that stay floats, so none would be held otherwise"
        raise PolicyError(("evict", "tokens"), f"{text}; raise tokens above {floats}, or lower recent")


def idle(policy: Policy, limit: int) -> list[str]:
    """What of a policy does nothing to a model whose texts have at most `limit` tokens, a sentence each."""
    evict, select = policy.evict, policy.select
    long = f"the longest text of this model, {limit} tokens"
    found = []
    if evict is not None and (evict.tokens or 0) >= limit:
        found.append(f"evict.tokens: {evict.tokens} are no fewer than {long}, so nothing is ever evicted; lower tokens")
    if evict is not None and evict.prompt == "keep" and (evict.interval or 0) >= limit:
        found.append(
            f"evict.interval: {evict.interval} steps are no fewer than {long}, so nothing is ever evicted; lower interval"
        )
    tokens = 0 if select is None else select.fields.get("tokens") or 0
    if tokens >= limit:
        found.append(f"select.tokens: {tokens} are no fewer than {long}, so steps read everything; lower tokens")
    floats = policy.recent + (policy.prefix if isinstance(policy.prefix, int) else 0)
    if (policy.tiers or policy.clusters is not None or policy.offload is not None) and floats >= limit:
        found.append(
            f"recent: {floats} tokens that stay floats are no fewer than {long}, so none is held otherwise; lower recent"
        )
    return found


def _always_kept(policy: Policy) -> tuple[int, str]:
    """Tokens that no budget takes from a head, the prefix included, and what to call them."""
    assert policy.evict is not None
    choice = policy.evict.score
    kept = choice.build().kept()
    prefix = policy.prefix if isinstance(policy.prefix, int) else 0
    return kept + prefix, f"{choice.name} and the prefix always keep" if prefix else f"{choice.name} always keeps"


def _read(policy: Policy) -> None:
    """A selection must have something to choose."""
    select = policy.select
    tokens = None if select is None else select.fields.get("tokens")
    if select is None or tokens is None:
        return
    read = _always_read(select)
    if tokens <= read:
        text = f"{tokens} tokens are not more than the {read} that {select.name} always reads ({_ends(select)})"
        raise PolicyError(
            ("select", "tokens"), f"{text}, so it would choose none; raise tokens, or lower {_lower(select)}"
        )


def _always_read(select: Choice) -> int:
    first = PAGE if select.name == "quest" else select.fields.get("sinks", 0)
    return int(first + select.fields.get("recent", 0))


def _ends(select: Choice) -> str:
    """What a selection always reads, in words."""
    return _lower(select) + (" and the first page" if select.name == "quest" else "")


def _lower(select: Choice) -> str:
    """Fields that say how much that is."""
    return " and ".join(name for name in ("recent", "sinks") if name in select.fields)


def _tiers(policy: Policy) -> None:
    if len(policy.tiers) < 2:
        if policy.saliency is not None:
            raise PolicyError(("saliency",), "it orders tokens among several tiers, and there are none")
        return
    if policy.evict is not None and policy.evict.interval is not None:
        text = "tokens of several tiers have lost their order, which eviction while decoding goes by; leave out interval, or the tiers"
        raise PolicyError(("evict", "interval"), text)
    assert policy.saliency is not None
    score = policy.saliency.build()
    if policy.saliency.needs or isinstance(score, Accumulating):
        why = "needs calibration" if policy.saliency.needs else "would have to remember every query"
        raise PolicyError(("saliency",), f"{policy.saliency.name} {why}; take snapkv, normalized, tova or streaming")


def _clusters(policy: Policy) -> None:
    if policy.clusters is None:
        return
    if len(policy.tiers) > 1:
        raise PolicyError(("clusters",), "centroids are held in one way; give keys and values instead of tiers")
    if policy.evict is not None and policy.evict.interval is not None:
        text = "centroids stand for many tokens and cannot be evicted like one; leave out interval, or clusters"
        raise PolicyError(("evict", "interval"), text)


def _selection(policy: Policy) -> None:
    """Some selections use the same places in all heads or layers, which then must hold the same tokens there."""
    if policy.select is None or not getattr(policy.select.cls, "needs_aligned", False):
        return
    name = policy.select.name
    if len(policy.tiers) > 1:
        raise PolicyError(
            ("select",), f"{name} reads the same places in all heads, and tiers hold other tokens in each; give one"
        )
    if policy.clusters is not None:
        raise PolicyError(
            ("select",), f"{name} reads the same places in all heads, and clusters differ from head to head"
        )
    plan = policy.evict
    if plan is None:
        return
    shares = plan.layers.name, plan.heads.name
    if plan.score.name not in _ALIKE or shares != ("uniform", "equal"):
        text = (
            f"{name} reads the same places in all heads and layers, and {plan.score.name} leaves other tokens in each"
        )
        raise PolicyError(("select",), f"{text}; evict by {' or '.join(_ALIKE)} with equal shares, or take quest")


def _calibrated(policy: Policy) -> None:
    known = policy.calibrated
    if known is None:
        return
    for name in ("gates", "channels"):
        table = getattr(known, name)
        if table is not None and (not table or len({len(row) for row in table}) != 1 or not table[0]):
            raise PolicyError(("calibrated", name), "every layer must have as many entries, one a key head")
    if known.channels is not None:
        counts = {len(head) for layer in known.channels for head in layer}
        if len(counts) != 1 or 0 in counts:
            raise PolicyError(("calibrated", "channels"), "every head must have as many channels, and at least one")


# Which models a policy can be for, found before anything runs.


def check_policy(policy: Policy, config: Any) -> None:
    """PolicyError where a model of this config has nothing to compress, or the policy was calibrated for another."""
    from runtime.kv_cache.shape import Shape, compressed_layers
    from runtime.modeling.skeleton import model_kind

    name = _name(config)
    kind = model_kind(config)
    if kind != "decoder":
        raise PolicyError(
            (), f"{name} is an {kind}; only causal language models have a cache that a policy can compress"
        )
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None):
        raise PolicyError(
            (), f"{name} caches latents that keys and values are made of, not these (multi-latent attention)"
        )
    if getattr(text, "num_kv_shared_layers", None) or "reuse" in (getattr(text, "kv_sharing_modes", None) or ()):
        raise PolicyError((), f"{name} has layers that share the cache of others, which compressed caches do not know")
    parts = layer_configs(text)
    layers = compressed_layers(text) if any(getattr(part, "num_attention_heads", None) for part in parts) else []
    if not layers:
        windowed = ["sliding_attention"] if any(getattr(part, "sliding_window", None) for part in parts) else []
        kinds = sorted(set(getattr(text, "layer_types", None) or windowed))
        if "hybrid" in kinds:
            raise PolicyError(
                (),
                f"{name} has layers of attention and a recurrent state side by side (hybrid), which compressed caches do not know",
            )
        what = f" (its layers: {', '.join(kinds)})" if kinds else ""
        raise PolicyError((), f"{name} has no layer with full attention{what}, so there is no cache to compress")
    positions = getattr(text, "max_position_embeddings", None)
    if positions:
        check_positions(policy, int(positions), name)
    selecting = None if policy.select is None else getattr(policy.select.cls, "selecting", None)
    if policy.select is not None and selecting is not None:
        try:
            selecting(policy.select.build(), len(layers))
        except ValueError as error:
            reason = str(error).removeprefix(f"{policy.select.name}.select_layers ")
            raise PolicyError(("select", "select_layers"), f"{reason} ({name})") from error
    known = policy.calibrated
    if known is None:
        return
    own = fingerprint(config)
    if known.fingerprint != own:
        raise PolicyError(
            ("calibrated", "fingerprint"),
            f"the policy was calibrated for another model: its fingerprint is {known.fingerprint}, that of {name} is {own}",
        )
    shapes = Shape.of(config, torch.float32).layers
    for field in ("gates", "channels"):
        table = getattr(known, field)
        if table is not None and [len(row) for row in table] != [shape.heads for shape in shapes]:
            found = f"{len(table)} layers of {_several(len(row) for row in table)} key heads"
            heads = _several(shape.heads for shape in shapes)
            raise PolicyError(
                ("calibrated", field),
                f"they are for {found}; {name} has {len(layers)} layers with full attention, of {heads}",
            )
    for layer, shape in zip(known.channels or (), shapes, strict=False):  # as many, if there are any
        size = shape.sizes[0]
        beyond = [channel for head in layer for channel in head if channel >= size]
        if beyond:
            raise PolicyError(
                ("calibrated", "channels"),
                f"channel {beyond[0]} is outside the head size {size} of {name} (0 to {size - 1})",
            )
    wrong = [token for token in known.prefix_tokens or () if token >= text.vocab_size]
    if wrong:
        raise PolicyError(
            ("calibrated", "prefix_tokens"), f"token {wrong[0]} is outside the vocabulary of {text.vocab_size}"
        )


def check_module(module: PreTrainedModel) -> None:
    """PolicyError where the code of the model's attention cannot be asked to read compressed caches; weights may be on meta."""
    name = type(module).__name__
    # Not `_supports_attention_backend`: many families call the interface without saying so.
    if not module._can_set_attn_implementation():
        text = "computes attention in a way of its own (not through transformers' attention interface), which reads no compressed cache"
        raise PolicyError((), f"{name} {text}")
    if any(part == "sinks" for full, _ in module.named_parameters() for part in full.rsplit(".", 1)[-1:]):
        raise PolicyError((), f"{name} has learned attention sinks, which compressed caches do not know")


@torch.inference_mode()
def probe(module: PreTrainedModel) -> None:
    """Run two tokens over a compressed cache where transformers itself does not vouch for the model's attention.

    Those that it vouches for are asked by `check_asked` after each forward pass; a model that is read from a disk layer by layer
    need not be read once more for it.

    Args:
        module: prepared, its weights in place.

    Raises:
        PolicyError: a layer's attention did not ask its cache, or has an argument that compressed caches do not know.
    """
    from runtime.kv_cache.cache import CompressedCache

    if getattr(module, "_supports_attention_backend", False):
        return
    try:
        cache = CompressedCache(module)
        ids = torch.zeros(1, 2, dtype=torch.int64, device=module.device)
        module(input_ids=ids, past_key_values=cache, use_cache=True)
    except ValueError as error:
        raise PolicyError((), str(error)) from error
    check_asked(module, cache, 2)


def check_asked(module: PreTrainedModel, cache: CompressedCache, tokens: int) -> None:
    """PolicyError where a layer's attention did not ask the cache for what it holds: its output would be wrong, not slow.

    Args:
        module: the model.
        cache: what it has filled.
        tokens: how many have come, padding included.
    """
    from runtime.kv_cache.layer import CompressedLayer

    for layer in cache.layers:
        if isinstance(layer, CompressedLayer) and layer.seen != tokens:
            text = "computes attention in a way that does not read compressed caches; load it with kv_cache=False"
            raise PolicyError((), f"{type(module).__name__} {text}")


def _several(numbers: Iterable[int]) -> str:
    """One number, or the different ones: "2", "1, 4"."""
    return ", ".join(str(number) for number in sorted(set(numbers)))


def _name(config: Any) -> str:
    named = getattr(config, "architectures", None)
    return str(named[0]) if named else str(getattr(config, "model_type", "the model"))
