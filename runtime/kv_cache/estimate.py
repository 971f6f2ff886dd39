"""How much memory a cache will take, from a model's config and a policy; before any token is run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from runtime.kv_cache.cache import compressed_layers
from runtime.kv_cache.pages import PAGE
from runtime.kv_cache.policy import Policy
from runtime.kv_cache.policy_parts import TierChoice
from runtime.kv_cache.scores.base import Accumulating, Placed

if TYPE_CHECKING:
    from runtime.kv_cache.eviction import EvictionPlan
    from runtime.kv_cache.plan import CachePlan

_ATTENDED = ("full_attention", "sliding_attention", "chunked_attention")
_SPARE = 8 / 7  # an eighth of a pool's pages may be free before it is packed
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
        dtype: of queries, keys and values as they come.
        floats: dtype that tokens which stay floats are held in; None: as they come.
    """

    layers: int
    windows: tuple[int, ...]
    heads: int
    sizes: tuple[int, int]
    query_heads: int
    dtype: torch.dtype
    floats: torch.dtype | None = None

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
    def held(self) -> torch.dtype:
        """What tokens that stay floats are held in."""
        return self.floats or self.dtype

    @property
    def token(self) -> int:
        """Bytes of a token in one layer as floats."""
        return self.heads * sum(self.sizes) * self.held.itemsize

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
    shape = replace(shape, floats=plan.storage.floats)
    layer = _layer_bytes(shape, policy, plan, prompt, new, PAGE // 2)
    return round(layer * shape.layers) + shape.token * _windowed(shape, prompt + new)


def needed_bytes(shape: Shape, policy: Policy, prompt: int, new: int) -> int:
    """Of one sequence at its largest, with all that is held beside its tokens: the larger of two moments.

    - The last layer reads the prompt. It holds all of it as floats, opens it once (for its attention, its score or its storage) and
      remembers the queries that the score asks for: all of them if it adds up what all tokens look at. The layers before hold what they
      will keep, as floats where the budget of each waits for the layers to come.
    - The last step. What is left is held by all layers, and one is opened to be evicted from or stored.

    What attention computes in between is not counted: slices of scores are of a bounded size.
    """
    plan = policy.draft()
    shape = replace(shape, floats=plan.storage.floats)
    read = prompt + len(policy.prefix_tokens)
    rule, storage = plan.eviction, plan.storage
    others = _SPARE * (shape.layers - 1) * _layer_bytes(shape, policy, plan, read, 0, PAGE)
    if rule is not None and rule.layer_share.cascades:
        # Until the last layer has been seen, the budget of all is shared by those that were, and none is stored yet.
        waiting = min(shape.layers * _kept(policy, plan, rule, read), (shape.layers - 1) * read)
        others = max(others, _SPARE * (waiting + shape.layers * PAGE) * shape.token)
    asked = 0 if rule is None else max(1, rule.score.window(read))
    asked += 0 if storage.saliency is None else storage.saliency.window(read)
    # Remembered queries are put together, which is a copy.
    reading = (2 * read + PAGE) * shape.token + _notes(rule, shape) * read + 2 * asked * shape.query

    held = _SPARE * shape.layers * _layer_bytes(shape, policy, plan, read, new, PAGE)
    moves = storage.moves or policy.offload is not None
    opened = storage.recent + storage.prefix + storage.chunk if moves else 0
    if rule is not None and rule.interval is not None:
        asked = min(rule.interval, new) if isinstance(rule.score, Accumulating) else rule.score.window(read + new)
        # What is evicted from is opened, and of what is held otherwise all is held as floats until it is stored anew.
        opened = (2 if moves else 1) * _held(policy, plan, read, new)
        held += asked * shape.query
    if policy.offload is not None and policy.offload.to == "host":
        # Of older tokens, those of the layer at hand and of the next are on the GPU too.
        near = replace(policy, offload=None)
        older = [_layer_bytes(shape, which, plan, read, new, PAGE) for which in (near, policy)]
        held += 2 * (older[0] - older[1])
    return round(max(others + reading, held + opened * shape.token)) + shape.token * _windowed(shape, read + new)


def _layer_bytes(shape: Shape, policy: Policy, plan: CachePlan, prompt: int, new: int, spare: int) -> float:
    """Of one layer after a prompt and `new` more tokens, with room for `spare` tokens in each head's last page.

    Remembered queries and sums are included.
    """
    storage, rule = plan.storage, plan.eviction
    count = _held(policy, plan, prompt, new)
    beside = float(_notes(rule, shape) * count)
    if rule is not None and rule.interval is not None:
        if isinstance(rule.score, Accumulating):  # queries stay until they are added
            beside += min(rule.interval, new) * shape.query
        else:
            beside += rule.score.window(prompt + new) * shape.query
    if storage.saliency is not None:  # a prompt's window stays whole until as many steps have come
        window = storage.saliency.window(count)
        beside += (window + min(new, window)) * shape.query
    # Tokens go to a tier a chunk at a time: on average half of one waits. Eviction leaves whole chunks, and none that waits.
    waiting = storage.chunk * spare // PAGE
    if rule is not None:
        waiting = min(waiting, count - _kept(policy, plan, rule, prompt if rule.interval is None else prompt + new))
    near = min(count, storage.recent + storage.prefix + waiting)
    older: float = count - near
    if not storage.tiers and storage.clusters is None and policy.offload is None:
        near, older = count, 0
    if storage.clusters is not None:
        older = older * storage.clusters.ratio
    tiers = policy.tiers or (TierChoice.parse({}, ()),)
    stored = 0.0 if policy.offload is not None else sum(tier.share * older * tier_bytes(shape, tier) for tier in tiers)
    labels = 0 if policy.select is None else count * shape.token / 16
    pages = near + spare * (2 if storage.prefix else 1)  # a prefix has pages of its own
    return pages * shape.token + stored + beside + labels


def _held(policy: Policy, plan: CachePlan, prompt: int, new: int) -> int:
    """Tokens that a head holds on average just before it is evicted from, if it is."""
    rule, count = plan.eviction, prompt + new
    if rule is None:
        return count
    late = new if rule.interval is None else min(new, rule.interval)
    return min(count, _kept(policy, plan, rule, prompt if rule.interval is None else count) + late)


def _kept(policy: Policy, plan: CachePlan, rule: EvictionPlan, seen: int) -> int:
    """Tokens that eviction leaves a head on average of the `seen` that came."""
    kept = rule.tokens if rule.ratio is None else round(rule.ratio * seen)
    assert kept is not None
    storage = plan.storage
    kept = max(rule.least + storage.prefix, kept)
    if policy.evict is not None and policy.evict.score.name == "duo":
        # Streaming heads keep a constant number of tokens; the others share the budget.
        fields = policy.evict.score.fields
        ends = int(fields["sinks"]) + int(fields["recent"])
        kept = round(kept - float(fields["streaming"]) * max(0, kept - ends))
    floats = storage.recent + storage.prefix
    if (storage.tiers or policy.offload is not None) and kept > floats:  # the rest is whole chunks
        kept = floats + storage.chunk * max(1, round((kept - floats) / storage.chunk))
    return min(kept, seen)


def _notes(rule: EvictionPlan | None, shape: Shape) -> int:
    """Bytes a token that a layer keeps for a score beside keys and values: its sum, and its place."""
    if rule is None:
        return 0
    sums = rule.interval is not None and isinstance(rule.score, Accumulating)
    return 4 * shape.heads * (int(sums) + int(isinstance(rule.score, Placed)))


def tier_bytes(shape: Shape, tier: TierChoice) -> float:
    """Bytes of a token in one layer as a tier holds it."""
    total = 0.0
    for codec, size in zip((tier.keys, tier.values), shape.sizes, strict=True):
        for part in codec.build().parts(size, shape.held).values():
            total += part.width * part.dtype.itemsize / (PAGE if part.per_page else 1)
    return shape.heads * total


def table(shape: Shape, policy: Policy, limit: int | None) -> list[dict[str, int]]:
    """For `compress plan` and reports: [{"tokens", "bytes", "full_bytes"}] of one sequence; lengths up to the model's `limit`."""
    lengths = [tokens for tokens in _LENGTHS if limit is None or tokens <= limit] or [limit or _LENGTHS[0]]
    return [
        {"tokens": tokens, "bytes": held_bytes(shape, policy, tokens), "full_bytes": full_bytes(shape, tokens)}
        for tokens in lengths
    ]


def _windowed(shape: Shape, tokens: int) -> int:
    return sum(min(tokens, window) if window else tokens for window in shape.windows)
