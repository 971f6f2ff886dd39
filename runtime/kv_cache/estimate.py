"""How much memory a cache will take, from a model's config and a policy; before any token is run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from runtime.kv_cache.cache import compressed_layers
from runtime.kv_cache.pages import PAGE
from runtime.kv_cache.policy import Policy
from runtime.kv_cache.policy_parts import TierChoice
from runtime.kv_cache.scores.base import Accumulating

_ATTENDED = ("full_attention", "sliding_attention", "chunked_attention")
_SPARE = 9 / 8  # pools grow by an eighth
_LENGTHS = (1024, 8192, 32768, 131072)


@dataclass(frozen=True)
class Shape:
    """What of a model decides the size of its cache.

    Attributes:
        layers: with full attention, which a policy is about.
        windows: of the other layers with attention, the tokens each sees.
        heads: key heads.
        sizes: channels of a key and of a value.
        query_heads: for queries that scores remember.
        dtype: of keys and values as they come.
    """

    layers: int
    windows: tuple[int, ...]
    heads: int
    sizes: tuple[int, int]
    query_heads: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> Shape:
        """Of a model's config."""
        text = config.get_text_config(decoder=True)
        layers = len(compressed_layers(text))
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * layers
        others = sum(kind in _ATTENDED[1:] for kind in kinds)
        window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None) or 0
        queries = int(text.num_attention_heads)
        heads = int(getattr(text, "num_key_value_heads", None) or queries)
        size = int(getattr(text, "head_dim", None) or text.hidden_size // queries)
        return cls(layers, (int(window),) * others, heads, (size, size), queries, dtype)

    @property
    def token(self) -> int:
        """Bytes of a token in one layer, as it comes."""
        return self.heads * sum(self.sizes) * self.dtype.itemsize

    @property
    def query(self) -> int:
        """Bytes of a token's queries in one layer."""
        return self.query_heads * self.sizes[0] * self.dtype.itemsize


def full_bytes(shape: Shape, tokens: int) -> int:
    """Of one sequence in a plain cache."""
    return shape.token * (shape.layers * tokens + _windowed(shape, tokens))


def held_bytes(shape: Shape, policy: Policy, prompt: int, new: int = 0) -> int:
    """Of one sequence once its prompt has been read and `new` tokens were made, half a page a head that is not full included."""
    plan = policy.draft()
    if plan.storage.floats is not None:
        shape = replace(shape, dtype=plan.storage.floats)
    prefix = plan.storage.prefix
    count = prompt + new
    beside = 0.0  # bytes a layer that are not tokens
    if plan.eviction is not None:
        rule = plan.eviction
        seen = prompt if rule.interval is None else prompt + new
        kept = rule.tokens if rule.ratio is None else round(rule.ratio * seen * _share(policy))
        assert kept is not None
        late = new if rule.interval is None else min(new, rule.interval)
        count = min(count, max(rule.least + prefix, kept) + late)
        if rule.interval is not None and isinstance(
            rule.score, Accumulating
        ):  # sums stay, queries until they are added
            beside += min(rule.interval, seen) * shape.query + 4 * shape.heads * count
        elif rule.interval is not None:
            beside += rule.score.window(seen) * shape.query
    if plan.storage.saliency is not None:
        beside += plan.storage.saliency.window(count) * shape.query
    near = min(count, plan.storage.recent + prefix + plan.storage.chunk)
    older = count - near
    if not plan.storage.tiers and plan.storage.clusters is None:
        near, older = count, 0
    if plan.storage.clusters is not None:
        older = round(older * plan.storage.clusters.ratio)
    elsewhere = policy.offload is not None
    tiers = policy.tiers or (TierChoice.parse({}, ()),)
    stored = 0.0 if elsewhere else sum(tier.share * older * tier_bytes(shape, tier) for tier in tiers)
    labels = 0 if policy.select is None else count * shape.token / 16
    layer = (near + PAGE / 2) * shape.token + stored + beside + labels
    return round(layer * shape.layers) + shape.token * _windowed(shape, prompt + new)


def needed_bytes(shape: Shape, policy: Policy, prompt: int, new: int) -> int:
    """Of one sequence at its largest: what is held at the end, and one layer in full (and opened once) while a prompt is read."""
    read = prompt + len(policy.prefix_tokens)
    return round(_SPARE * held_bytes(shape, policy, read, new)) + 2 * read * shape.token


def tier_bytes(shape: Shape, tier: TierChoice) -> float:
    """Bytes of a token in one layer as a tier holds it."""
    total = 0.0
    for codec, size in zip((tier.keys, tier.values), shape.sizes, strict=True):
        for part in codec.build().parts(size, shape.dtype).values():
            total += part.width * part.dtype.itemsize / (PAGE if part.per_page else 1)
    return shape.heads * total


def table(shape: Shape, policy: Policy, limit: int | None) -> list[dict[str, int]]:
    """For `compress plan` and reports: [{"tokens", "bytes", "full_bytes"}] of one sequence; lengths up to the model's `limit`."""
    lengths = [tokens for tokens in _LENGTHS if limit is None or tokens <= limit] or [limit or _LENGTHS[0]]
    return [
        {"tokens": tokens, "bytes": held_bytes(shape, policy, tokens), "full_bytes": full_bytes(shape, tokens)}
        for tokens in lengths
    ]


def _share(policy: Policy) -> float:
    """Of the heads that share the budget; DuoAttention's streaming heads keep a constant number of tokens beside it."""
    if policy.evict is None or policy.evict.score.name != "duo":
        return 1.0
    return 1 - float(policy.evict.score.fields["streaming"])


def _windowed(shape: Shape, tokens: int) -> int:
    return sum(min(tokens, window) if window else tokens for window in shape.windows)
