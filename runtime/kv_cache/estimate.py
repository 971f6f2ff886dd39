"""Memory of a cache, from a model's config and a policy, before any token is run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.kv_cache.pages import PAGE
from runtime.kv_cache.policy.policy import Policy
from runtime.kv_cache.shape import LayerShape, Shape
from runtime.kv_cache.storage.plan import Tier

if TYPE_CHECKING:
    from runtime.kv_cache.plan import CachePlan

_SPARE = 8 / 7  # an eighth of a pool's pages may be free before it is packed
# How many float32 copies of keys, or of values, there are at once while they are encoded, or merged.
_ENCODED = {"int2": 6.5, "int4": 6.5, "int8": 6.5}
_LEAST, _MERGED = 3, 5
_SCORED = 40  # bytes a token and head while tokens are scored: ages, and unfinished scores
_LENGTHS = (1024, 8192, 32768, 131072)


def full_bytes(shape: Shape, tokens: int) -> int:
    """Bytes of one sequence in an uncompressed cache."""
    return sum(layer.whole(tokens) for layer in (*shape.layers, *shape.others))


def held_bytes(shape: Shape, policy: Policy, prompt: int, new: int = 0) -> int:
    """Bytes of one sequence once its prompt has been read and `new` tokens were decoded; of each head's last page, half is counted."""
    estimate = _Estimate(shape, policy.draft())
    held = sum(estimate.layer_bytes(layer, prompt, new, PAGE // 2) for layer in estimate.shape.layers)
    return round(held) + sum(layer.whole(prompt + new) for layer in shape.others)


def needed_bytes(shape: Shape, policy: Policy, prompt: int, new: int) -> int:
    """Bytes of one sequence at its largest, temporary tensors included: the larger of two moments.

    - A layer reads the prompt, the last or the largest. It has all of it as floats, decodes it once (for its attention, its score or
      its storage) and remembers the queries that the score asks for: all of them if it adds up what all tokens look at. The other
      layers have what they will keep, as floats where the budget of each waits for the layers to come.
    - The last step. All layers have what is left, and one is decoded to be evicted from or stored.

    What attention computes in between is not counted: slices of scores, and of states made float32, are of a bounded size.
    """
    estimate = _Estimate(shape, policy.draft())
    shape, read = estimate.shape, prompt + len(policy.prefix_tokens)
    windows = sum(layer.whole(read + new) for layer in shape.others)
    stored = [_SPARE * estimate.layer_bytes(layer, read, 0, PAGE) for layer in shape.layers]
    # A layer with a window has all of the prompt until it is cut to the window.
    moments = [sum(stored) + layer.token * read for layer in shape.others]
    for number, layer in enumerate(shape.layers):
        others = stored[:number] + stored[number + 1 :]
        moments.append(estimate.waiting(read, others) + estimate.reading(layer, read))
    moments.append(estimate.stepping(read, new))
    return round(max(moments)) + windows


class _Estimate:
    """Bytes of one sequence under one plan; `read` is the length of its prompt, prefix included, `new` the tokens decoded since."""

    def __init__(self, shape: Shape, plan: CachePlan) -> None:
        self.plan, self.rule, self.storage = plan, plan.eviction, plan.storage
        layers = (replace(layer, floats=self.storage.floats) for layer in shape.layers)
        self.shape = replace(shape, layers=tuple(layers))
        self.floats = self.storage.recent + self.storage.prefix  # tokens that always stay floats
        self.is_tiered = bool(self.storage.tiers) or plan.offload is not None
        self.moves = self.storage.moves or plan.offload is not None

    def reading(self, layer: LayerShape, read: int) -> float:
        """Of a layer that reads a prompt, whether it is padded or not, and then stores what eviction leaves."""
        rule, storage = self.rule, self.storage
        asked = 0 if rule is None else max(1, rule.score.window(read))
        asked += 0 if storage.saliency is None else storage.saliency.window(read)
        # Remembered queries are put together, which is a copy.
        beside = self.notes(layer) * read + 2 * asked * self.remembered(layer)
        if rule is not None or storage.saliency is not None:
            beside += _SCORED * layer.heads * read
        # Keys and values are decoded, and either is copied twice more while its pages are put in order.
        decoded = 2 * layer.token
        if layer.held != layer.dtype:  # attention has them as they came
            decoded = max(decoded, layer.token + replace(layer, floats=None).token)
        left = self.left(read)
        if rule is not None and rule.layers.cascades:  # a layer may be given more than the mean
            left = min(read, left * 3 // 2)
        return max(_pool(layer, read) + decoded * read, _pool(layer, left) + self.storing(layer, left)) + beside

    def storing(self, layer: LayerShape, count: int) -> float:
        """Of what is copied while older ones of `count` tokens are stored otherwise."""
        storage = self.storage
        if not self.moves:
            return 0.0
        older = max(0, count - self.floats) if self.is_tiered or storage.clusters is not None else 0
        wide = 4 * layer.heads * max(layer.sizes)
        if storage.clusters is not None:
            return (count + older) * layer.token + _MERGED * older * wide
        stored = [(tier.share, codec.name) for tier in storage.tiers for codec in (tier.keys, tier.values)]
        copies = [share * _ENCODED.get(name, _LEAST) for share, name in stored if name != "plain"]
        return (count + older) * layer.token + max(copies, default=0.0) * older * wide

    def waiting(self, read: int, stored: list[float]) -> float:
        """Of all layers but the one that reads; `stored` is what each of them will take."""
        if self.rule is None or not self.rule.layers.cascades:
            return sum(stored)
        # Until the last layer has been seen, the budget of all is shared by those that were, and none is stored yet.
        count = len(self.shape.layers)
        token = max(layer.token for layer in self.shape.layers)
        waiting = min(count * self.left(read), (count - 1) * read)
        return max(sum(stored), _SPARE * (waiting + count * PAGE) * token)

    def stepping(self, read: int, new: int) -> float:
        """Of all layers at the last step, one of them decoded."""
        rule, layers = self.rule, self.shape.layers
        held = _SPARE * sum(self.layer_bytes(layer, read, new, PAGE) for layer in layers)
        decoded = self.floats + self.storage.chunk if self.moves else 0
        if rule is not None and rule.interval is not None:
            # What is evicted from is decoded, and of what is stored otherwise all is floats until it is stored anew.
            decoded = (2 if self.moves else 1) * self.held(read, new)
        if self.plan.offload is not None and self.plan.offload.to == "host":
            # Of older tokens, those of the layer at hand and of the next are on the GPU too.
            near = _Estimate(self.shape, replace(self.plan, offload=None))
            older = [[which.layer_bytes(layer, read, new, PAGE) for layer in layers] for which in (near, self)]
            held += 2 * max(inside - outside for inside, outside in zip(*older, strict=True))
        asked = self.asked(read, new)
        return held + max(decoded * layer.token + asked * self.remembered(layer) for layer in layers)

    def layer_bytes(self, layer: LayerShape, read: int, new: int, spare: int) -> float:
        """Of one layer after a prompt and `new` more tokens, with room for `spare` tokens in each head's last page.

        Remembered queries and sums are included.
        """
        storage, rule = self.storage, self.rule
        count = self.held(read, new)
        beside = float(self.notes(layer) * count + self.asked(read, new) * self.remembered(layer))
        if storage.saliency is not None:  # a prompt's window stays whole until as many steps have come
            window = storage.saliency.window(count)
            beside += (window + min(new, window)) * self.remembered(layer)
        # Tokens go to a tier a chunk at a time: on average half of one waits. Eviction leaves whole chunks, and none that waits.
        waiting = storage.chunk * spare // PAGE
        if rule is not None:
            waiting = min(waiting, count - self.left(read, 0 if rule.interval is None else new))
        near = min(count, self.floats + waiting)
        older: float = count - near
        if not self.is_tiered and storage.clusters is None:
            near, older = count, 0
        if storage.clusters is not None:
            older = older * storage.clusters.ratio
        tiers = storage.tiers or (Tier(),)
        offloads = self.plan.offload is not None
        stored = 0.0 if offloads else sum(tier.share * older * tier_bytes(layer, tier) for tier in tiers)
        labels = 0 if self.plan.selection is None else count * layer.token / 16
        pages = near + spare * (2 if storage.prefix else 1)  # a prefix has pages of its own
        return pages * layer.token + stored + beside + labels

    def asked(self, read: int, new: int) -> int:
        """Queries that are remembered from one eviction to the next; those of an accumulating score stay until they are added."""
        rule = self.rule
        if rule is None or rule.interval is None:
            return 0
        return min(rule.interval, new) if rule.accumulates else rule.score.window(read + new)

    def held(self, read: int, new: int) -> int:
        """Tokens that a head has on average just before it is evicted from, if it is."""
        rule, count = self.rule, read + new
        if rule is None:
            return count
        late = new if rule.interval is None else min(new, rule.interval)
        return min(count, self.left(read, 0 if rule.interval is None else new) + late)

    def left(self, read: int, new: int = 0) -> int:
        """Tokens that eviction leaves a head on average."""
        rule, storage = self.rule, self.storage
        if rule is None:
            return read + new
        whole = read if rule.keeps_prompt else 0
        seen = read + new - whole
        left = rule.tokens if rule.ratio is None else round(rule.ratio * seen)
        assert left is not None
        left = rule.score.average(max(rule.least + storage.prefix, left))
        if self.is_tiered and left > self.floats:  # the rest is whole chunks
            left = self.floats + storage.chunk * max(1, round((left - self.floats) / storage.chunk))
        return whole + min(left, seen)

    def remembered(self, layer: LayerShape) -> int:
        """Bytes of a token that a score remembers: its queries, and what they were made of where the score sees that."""
        sees = self.rule is not None and "hidden" in self.rule.score.wants
        return (layer.query_heads * layer.sizes[0] + (layer.hidden if sees else 0)) * layer.dtype.itemsize

    def notes(self, layer: LayerShape) -> int:
        """Bytes a token of what eviction notes beside keys and values."""
        parts = {} if self.rule is None else self.rule.notes
        return layer.heads * sum(part.width * part.dtype.itemsize for part in parts.values())


def _pool(layer: LayerShape, count: int) -> float:
    """Bytes of so many tokens as floats, each head's last page whole."""
    return (count + PAGE) * layer.token


def tier_bytes(shape: LayerShape, tier: Tier) -> float:
    """Bytes of a token in one layer as a tier stores it."""
    total = 0.0
    for codec, size in zip((tier.keys, tier.values), shape.sizes, strict=True):
        for part in codec.parts(size, shape.held).values():
            total += part.width * part.dtype.itemsize / (PAGE if part.per_page else 1)
    return shape.heads * total


def table(shape: Shape, policy: Policy, limit: int | None) -> list[dict[str, int]]:
    """For `compress plan` and reports: [{"tokens", "bytes", "full_bytes"}] of one sequence; lengths up to the model's `limit`."""
    lengths = [tokens for tokens in _LENGTHS if limit is None or tokens <= limit] or [limit or _LENGTHS[0]]
    return [
        {"tokens": tokens, "bytes": held_bytes(shape, policy, tokens), "full_bytes": full_bytes(shape, tokens)}
        for tokens in lengths
    ]
