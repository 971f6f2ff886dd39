"""Observation of a layer that a score sees: its newest queries, the tokens in the cache, and attention between them in slices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from runtime.kv_cache.reference import scores_of

CHUNK_BYTES = 32 << 20  # of one slice of attention weights


@dataclass(frozen=True)
class Inputs:
    """What a layer's attention was computed of.

    Attributes:
        module: the attention module, with its weights.
        hidden: its inputs, `[batch, w, hidden]`, of the newest w tokens; whatever at padding.
    """

    module: nn.Module
    hidden: torch.Tensor

    def queries(self, size: int) -> torch.Tensor:
        """Queries before their rotation, `[batch, heads, w, size]`.

        Raises:
            ValueError: the module makes its queries in another way than by one projection `q_proj` and maybe a norm `q_norm`.
        """
        name = type(self.module).__name__
        project, norm = getattr(self.module, "q_proj", None), getattr(self.module, "q_norm", None)
        if project is None:
            raise ValueError(f"{name} has no q_proj, so that its queries before rotation are not known")
        found = project(self.hidden)
        if norm is None:
            return found.unflatten(-1, (-1, size)).transpose(1, 2)
        if norm.weight.shape[-1] == size:  # each head's own
            return norm(found.unflatten(-1, (-1, size))).transpose(1, 2)
        return norm(found).unflatten(-1, (-1, size)).transpose(1, 2)


@dataclass(frozen=True)
class Observation:
    """One layer after some tokens were added.

    Attributes:
        queries: `[batch, heads, w, size]`, of the newest w tokens, rotary embedding applied; whatever at padding.
        keys: `[batch, kv_heads, n, size]`, whatever where `ages` is negative.
        values: `[batch, kv_heads, n, size]`, likewise.
        ages: int64 `[batch, kv_heads, n]`: how many tokens came after each one, 0 for the newest; negative where there is none.
        scale: of the scores, usually size ** -0.5.
        softcap: 0: none; else scores become softcap * tanh(scores / softcap).
        layer: index of the layer among the compressed ones.
        pinned: oldest tokens of every head that are always kept.
        mass: float32 `[batch, kv_heads, n]`, what an accumulating score has gathered before these queries; None: it gathers nothing.
        positions: int64 `[batch, kv_heads, n]`, each token's place in its own sequence, padding not counted, 0 for the first ever;
            whatever where `ages` is negative. None: the layer did not note them (see `places`).
        generated: tokens that were decoded since the prompt, the newest query's among them; 0: the newest query is of a prompt.
        inputs: of the attention module, for the same queries; None unless the score `wants` "hidden".
        sums: float32 `[batch, kv_heads, n]`, what tokens get from all queries together, summed over the heads of a group, where an
            engine has computed it: keys, values and queries are of no channels then, and good for their shapes only.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    ages: torch.Tensor
    scale: float
    softcap: float = 0.0
    layer: int = 0
    pinned: int = 0
    mass: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    generated: int = 0
    inputs: Inputs | None = None
    sums: torch.Tensor | None = None

    @property
    def groups(self) -> int:
        """Query heads that share a key head."""
        return self.queries.shape[1] // self.keys.shape[1]

    @property
    def held(self) -> torch.Tensor:
        """bool `[batch, kv_heads, n]`: there is a token."""
        return self.ages >= 0

    def places(self) -> torch.Tensor | None:
        """Places of tokens in their own sequences, as `positions`; None where the layer did not keep them and some tokens may be gone.

        A row's tokens are in the order of arrival, so as long as the queries of all of them are there, an index is a place.
        """
        if self.positions is not None:
            return self.positions
        count = self.keys.shape[2]
        if self.queries.shape[2] < count:
            return None
        return torch.arange(count, device=self.ages.device).expand(self.ages.shape)

    def newest(self, count: int) -> Observation:
        """The same with at most the newest `count` queries."""
        inputs = None if self.inputs is None else replace(self.inputs, hidden=self.inputs.hidden[:, -count:])
        return replace(self, queries=self.queries[:, :, -count:], inputs=inputs)

    def logits(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Slices of queries with their scores, float32 `[batch, kv_heads, groups, slice, n]`; minus infinity where a query may not look.

        Never more than about 32 MB at a time, however long the prompt is (or one query's worth). They are the caller's to change.
        """
        batch, heads, width, size = self.queries.shape
        kv_heads, count = self.keys.shape[1:3]
        step = max(1, CHUNK_BYTES // max(1, 4 * batch * heads * count))
        for start in range(0, width, step):
            part = slice(start, min(start + step, width))
            queries = self.queries[:, :, part].float()
            rows = queries.shape[2]
            # Query heads of a key head side by side: torch would copy the keys for each of them otherwise.
            scores = scores_of(queries.reshape(batch, kv_heads, -1, size) * self.scale, self.keys, self.softcap)
            scores = scores.view(batch, kv_heads, self.groups, rows, count)
            own = torch.arange(width - 1 - part.start, width - 1 - part.stop, -1, device=self.ages.device)
            seen = self.ages.unsqueeze(2) >= own[:, None]  # the query's own token and all before it
            yield part, scores.masked_fill_(~(seen & self.held.unsqueeze(2)).unsqueeze(2), float("-inf"))

    def weights(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Slices of queries with their attention weights, as `logits`; 0 for queries that see nothing (padding)."""
        for part, scores in self.logits():
            weights = scores.softmax(-1).nan_to_num_(0.0)
            del scores  # a slice of scores and one of weights at once are enough
            yield part, weights
            del weights

    def received(self) -> torch.Tensor:
        """Attention that each token gets from all queries together, averaged over the heads of a group, float32 `[batch, kv_heads, n]`."""
        if self.sums is not None:
            return self.sums / self.groups
        total = torch.zeros(self.keys.shape[:3], device=self.keys.device)
        for _, weights in self.weights():
            total += weights.sum(3).mean(2)
        return total

    def over_heads(self, score: torch.Tensor) -> torch.Tensor:
        """A score `[batch, kv_heads, n]` averaged over the heads of the layer, where all hold the same tokens; else as it is."""
        alike = bool((self.ages == self.ages[:, :1]).all())
        return score.mean(1, keepdim=True).expand_as(score) if alike else score

    def finish(self, score: torch.Tensor, newest: int) -> torch.Tensor:
        """A score with the newest and the pinned tokens always kept, and minus infinity where there is no token."""
        score = score.masked_fill(self.ages < newest, float("inf"))
        if self.pinned:
            first = torch.arange(score.shape[-1], device=score.device) < self.pinned
            score = score.masked_fill(first, float("inf"))
        return score.masked_fill(~self.held, float("-inf"))
