"""Memory of a cache, from a model's config and a policy, before any token is run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.kv_cache.pages import PAGE
from runtime.kv_cache.policy.choices import TierChoice
from runtime.kv_cache.policy.policy import Policy
from runtime.kv_cache.shape import LayerShape, Shape

if TYPE_CHECKING:
    from runtime.kv_cache.eviction import EvictionPlan
    from runtime.kv_cache.plan import CachePlan

_SPARE = 8 / 7  # an eighth of a pool's pages may be free before it is packed
# How many float32 copies of keys, or of values, there are at once while they are encoded, or merged.
_ENCODED = {"int2": 6.5, "int4": 6.5, "int8": 6.5}
_LEAST, _MERGED = 3, 5
_SCORED = 40  # bytes a token and head while tokens are scored: ages, and scores in the making
_LENGTHS = (1024, 8192, 32768, 131072)


def full_bytes(shape: Shape, tokens: int) -> int:
    """Of one sequence in a plain cache."""
    return sum(layer.whole(tokens) for layer in (*shape.layers, *shape.others))


def held_bytes(shape: Shape, policy: Policy, prompt: int, new: int = 0) -> int:
    """Of one sequence once its prompt has been read and `new` tokens were made, half a page a head that is not full included."""
    plan = policy.draft()
    shape = shape.holding(plan.storage.floats)
    held = sum(_layer_bytes(layer, policy, plan, prompt, new, PAGE // 2) for layer in shape.layers)
    return round(held) + sum(layer.whole(prompt + new) for layer in shape.others)


def needed_bytes(shape: Shape, policy: Policy, prompt: int, new: int) -> int:
    """Of one sequence at its largest, with all that is held beside its tokens: the larger of two moments.

    - A layer reads the prompt, the last or the largest. It holds all of it as floats, opens it once (for its attention, its score or
      its storage) and remembers the queries that the score asks for: all of them if it adds up what all tokens look at. The other
      layers hold what they will keep, as floats where the budget of each waits for the layers to come.
    - The last step. What is left is held by all layers, and one is opened to be evicted from or stored.

    What attention computes in between is not counted: slices of scores, and of states made float32, are of a bounded size.
    """
    plan = policy.draft()
    shape = shape.holding(plan.storage.floats)
    read = prompt + len(policy.prefix_tokens)
    windows = sum(layer.whole(read + new) for layer in shape.others)
    kept = [_SPARE * _layer_bytes(layer, policy, plan, read, 0, PAGE) for layer in shape.layers]
    moments = [
        sum(kept) + layer.token * read for layer in shape.others
    ]  # all of the prompt, and of it the window is kept
    for number, layer in enumerate(shape.layers):
        others = kept[:number] + kept[number + 1 :]
        moments.append(_waiting(shape, policy, plan, read, others) + _reading(layer, policy, plan, read))
    moments.append(_stepping(shape, policy, plan, read, new))
    return round(max(moments)) + windows


def _reading(layer: LayerShape, policy: Policy, plan: CachePlan, read: int) -> float:
    """Of a layer that reads a prompt of so many tokens, whether it is padded or not, and then stores what eviction leaves."""
    rule, storage = plan.eviction, plan.storage
    asked = 0 if rule is None else max(1, rule.score.window(read))
    asked += 0 if storage.saliency is None else storage.saliency.window(read)
    # Remembered queries are put together, which is a copy.
    beside = _notes(rule, layer) * read + 2 * asked * _remembered(rule, layer)
    if rule is not None or storage.saliency is not None:
        beside += _SCORED * layer.heads * read
    # Keys and values are opened, and either is copied twice more while its pages are put in order.
    opened = 2 * layer.token
    if layer.held != layer.dtype:  # attention has them as they came
        opened = max(opened, layer.token + layer.arriving)
    left = read if rule is None else _kept(policy, plan, rule, read)
    if rule is not None and rule.layer_share.cascades:  # a layer may be given more than the mean
        left = min(read, left * 3 // 2)
    return max(
        _pool(layer, read) + opened * read + beside, _pool(layer, left) + _storing(layer, policy, plan, left) + beside
    )


def _storing(layer: LayerShape, policy: Policy, plan: CachePlan, count: int) -> float:
    """Of what is copied while older ones of `count` tokens are stored otherwise."""
    storage = plan.storage
    if not storage.moves and policy.offload is None:
        return 0.0
    older = max(0, count - storage.recent - storage.prefix) if storage.tiers or policy.offload is not None else 0
    wide = 4 * layer.heads * max(layer.sizes)
    if storage.clusters is not None:
        older = max(0, count - storage.recent - storage.prefix)
        return (count + older) * layer.token + _MERGED * older * wide
    encoded = [
        tier.share * _ENCODED.get(codec.name, _LEAST)
        for tier in policy.tiers
        for codec in (tier.keys, tier.values)
        if codec.name != "plain"
    ]
    return (count + older) * layer.token + max(encoded, default=0.0) * older * wide


def _pool(layer: LayerShape, count: int) -> float:
    """Of so many tokens as floats, each head's last page whole."""
    return (count + PAGE) * layer.token


def _waiting(shape: Shape, policy: Policy, plan: CachePlan, read: int, kept: list[float]) -> float:
    """Of all layers but the one that reads; `kept` is what each of them will hold."""
    rule = plan.eviction
    if rule is None or not rule.layer_share.cascades:
        return sum(kept)
    # Until the last layer has been seen, the budget of all is shared by those that were, and none is stored yet.
    count = len(shape.layers)
    token = max(layer.token for layer in shape.layers)
    waiting = min(count * _kept(policy, plan, rule, read), (count - 1) * read)
    return max(sum(kept), _SPARE * (waiting + count * PAGE) * token)


def _stepping(shape: Shape, policy: Policy, plan: CachePlan, read: int, new: int) -> float:
    """Of all layers at the last step, one of them opened."""
    rule, storage = plan.eviction, plan.storage
    held = _SPARE * sum(_layer_bytes(layer, policy, plan, read, new, PAGE) for layer in shape.layers)
    moves = storage.moves or policy.offload is not None
    opened = storage.recent + storage.prefix + storage.chunk if moves else 0
    asked = 0
    if rule is not None and rule.interval is not None:
        asked = min(rule.interval, new) if rule.accumulates else rule.score.window(read + new)
        # What is evicted from is opened, and of what is held otherwise all is held as floats until it is stored anew.
        opened = (2 if moves else 1) * _held(policy, plan, read, new)
    if policy.offload is not None and policy.offload.to == "host":
        # Of older tokens, those of the layer at hand and of the next are on the GPU too.
        near = replace(policy, offload=None)
        older = [
            [_layer_bytes(layer, which, plan, read, new, PAGE) for layer in shape.layers] for which in (near, policy)
        ]
        held += 2 * max(inside - outside for inside, outside in zip(*older, strict=True))
    return held + max(opened * layer.token + asked * _remembered(rule, layer) for layer in shape.layers)


def _layer_bytes(shape: LayerShape, policy: Policy, plan: CachePlan, prompt: int, new: int, spare: int) -> float:
    """Of one layer after a prompt and `new` more tokens, with room for `spare` tokens in each head's last page.

    Remembered queries and sums are included.
    """
    storage, rule = plan.storage, plan.eviction
    count = _held(policy, plan, prompt, new)
    beside = float(_notes(rule, shape) * count)
    if rule is not None and rule.interval is not None:
        if rule.accumulates:  # queries stay until they are added
            beside += min(rule.interval, new) * _remembered(rule, shape)
        else:
            beside += rule.score.window(prompt + new) * _remembered(rule, shape)
    if storage.saliency is not None:  # a prompt's window stays whole until as many steps have come
        window = storage.saliency.window(count)
        beside += (window + min(new, window)) * _remembered(rule, shape)
    # Tokens go to a tier a chunk at a time: on average half of one waits. Eviction leaves whole chunks, and none that waits.
    waiting = storage.chunk * spare // PAGE
    if rule is not None:
        waiting = min(waiting, count - _kept(policy, plan, rule, prompt, 0 if rule.interval is None else new))
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
    return min(count, _kept(policy, plan, rule, prompt, 0 if rule.interval is None else new) + late)


def _kept(policy: Policy, plan: CachePlan, rule: EvictionPlan, prompt: int, new: int = 0) -> int:
    """Tokens that eviction leaves a head on average of a prompt and `new` more that came."""
    whole = prompt if rule.keeps_prompt else 0
    seen = prompt + new - whole
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
    return whole + min(kept, seen)


def _remembered(rule: EvictionPlan | None, shape: LayerShape) -> int:
    """Bytes of a token that a score remembers: its queries, and what they were made of where the score sees that."""
    return shape.query + (
        shape.hidden * shape.dtype.itemsize if rule is not None and "hidden" in rule.score.wants else 0
    )


def _notes(rule: EvictionPlan | None, shape: LayerShape) -> int:
    """Bytes a token that a layer keeps for eviction beside keys and values: its sum, its place, whose it is."""
    parts = {} if rule is None else rule.notes
    return shape.heads * sum(part.width * part.dtype.itemsize for part in parts.values())


def tier_bytes(shape: LayerShape, tier: TierChoice) -> float:
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
