"""One layer's compressed cache, a cache layer of transformers: tokens in pages, evicted by score and budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from transformers.cache_utils import CacheLayerMixin

from runtime.kv_cache import attention
from runtime.kv_cache.observation import Observation
from runtime.kv_cache.paged import PagedTokens
from runtime.kv_cache.reference import ragged_attention

if TYPE_CHECKING:
    from runtime.kv_cache.eviction import Eviction

_QUERY_SLICE = 128  # queries of a piece of a prompt that go over what is stored at once


class CompressedLayer(CacheLayerMixin):
    """Keys and values `[batch, kv_heads, ...]` of one layer, each head with as many tokens as it is allowed.

    Attributes:
        seen: tokens of the longest row so far, padding and evicted ones included; what positions are counted from.
        tokens: what is held; None before the first token.
        share: of the mean budget of a layer, `[batch]`, as the last prompt left it; None: the mean.
        arrived: int64 `[batch]`, tokens that each sequence has had, evicted ones too and padding not.
    """

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, index: int, eviction: Eviction | None) -> None:
        super().__init__()
        self.index, self.eviction, self.seen = index, eviction, 0
        self.tokens: PagedTokens | None = None
        self.share: torch.Tensor | None = None
        self.arrived = torch.zeros(0, dtype=torch.int64)
        self._shape = (0, 0)
        self._recent: list[torch.Tensor] = []  # queries since the last eviction, newest last

    # ---------------------------------------------------------------- transformers' interface
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, heads = key_states.shape[:2]
        self.dtype, self.device = key_states.dtype, key_states.device
        self._shape = (batch, heads)
        widths = {"keys": key_states.shape[-1], "values": value_states.shape[-1]}
        self.tokens = PagedTokens(batch * heads, widths, dict.fromkeys(widths, self.dtype), self.device)
        self.arrived = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Marks the new states; `attend` stores them, since only attention knows queries and padding."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return attention.mark(key_states, self), value_states

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.tokens, self.is_initialized, self.seen, self.share = None, False, 0, None
        self._recent = []

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these sequences, in that order."""
        if self.tokens is None:
            return
        heads = self._shape[1]
        rows = (indices.to(self.device)[:, None] * heads + torch.arange(heads, device=self.device)).reshape(-1)
        self.tokens.select_rows(rows)
        self._shape = (len(indices), heads)
        self.arrived = self.arrived[indices.to(self.device)]
        if self.share is not None:
            self.share = self.share[indices.to(self.device)]
        self._recent = [queries[indices.to(queries.device)] for queries in self._recent]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self._shape[0]).repeat_interleave(repeats))

    @property
    def nbytes(self) -> int:
        """Memory as allocated."""
        held = 0 if self.tokens is None else self.tokens.nbytes
        return held + sum(queries.untyped_storage().nbytes() for queries in self._recent)

    # ---------------------------------------------------------------- attention
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        valid: torch.Tensor | None,
        scale: float,
        softcap: float,
    ) -> torch.Tensor:
        """Attention of new tokens over what is held and each other; then they are stored, and some may be evicted.

        Args:
            query: `[batch, heads, q, size]`.
            key: `[batch, kv_heads, q, size]`.
            value: `[batch, kv_heads, q, size]`.
            valid: bool `[batch, q]`, False at padding, which must be on the left of all tokens; None: none.
            scale: of the scores.
            softcap: 0: none.

        Returns:
            `[batch, heads, q, size]`, zeros at padding.
        """
        assert self.tokens is not None
        count = query.shape[2]
        batch, heads = self._shape
        first = self.tokens.longest == 0
        lengths = self.tokens.lengths.view(batch, heads)
        self._store(key, value, valid)
        if count > 1 and first and valid is None and not softcap:
            output = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=True
            )
        else:
            output = self._over_stored(query, lengths, scale, softcap)
        self.seen += count
        if self.eviction is not None:
            self._watch(query)
            if count > 1:
                self.eviction.after_prompt(self, scale, softcap)
            else:
                self.eviction.after_step(self, scale, softcap)
        return output

    def _store(self, key: torch.Tensor, value: torch.Tensor, valid: torch.Tensor | None) -> None:
        assert self.tokens is not None
        batch, heads = self._shape
        count = key.shape[2]
        counts = torch.full((batch,), count, dtype=torch.int64, device=key.device)
        if valid is not None and not bool(valid.all()):
            counts = valid.sum(1)
            # Padding is on the left: a row's tokens move to the front, and what is behind is not stored.
            order = (torch.arange(count, device=key.device)[None] + (count - counts)[:, None]) % count
            places = order[:, None, :, None]
            key = key.gather(2, places.expand_as(key))
            value = value.gather(2, places.expand_as(value))
        states = {"keys": key.reshape(batch * heads, count, -1), "values": value.reshape(batch * heads, count, -1)}
        self.tokens.append(states, counts.repeat_interleave(heads))
        self.arrived = self.arrived + counts

    def _over_stored(self, query: torch.Tensor, before: torch.Tensor, scale: float, softcap: float) -> torch.Tensor:
        """Attention over the pages, the new tokens among them. A query sees what was there `before`, and new ones up to its own."""
        keys, values, used = self.states()
        count = query.shape[2]
        new = used.sum(-1) - before  # [batch, kv_heads]
        columns = torch.arange(keys.shape[2], device=keys.device)
        pieces = []
        for start in range(0, count, _QUERY_SLICE):
            part = query[:, :, start : start + _QUERY_SLICE]
            # Query i of `count` is the (i - padding)-th new token; those of padding see nothing.
            place = torch.arange(start, start + part.shape[2], device=keys.device)
            own = place[None, None] - (count - new)[..., None]
            last = torch.where(own >= 0, before[..., None] + own, -1)
            seen = columns <= last.unsqueeze(-1)
            pieces.append(ragged_attention(part, keys, values, seen, scale, softcap))
        return torch.cat(pieces, 2)

    # ---------------------------------------------------------------- eviction
    def states(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copies of keys and values `[batch, kv_heads, longest, size]`, and bool `[batch, kv_heads, longest]`: in use."""
        assert self.tokens is not None
        (keys, values), used = self.tokens.dense(("keys", "values"))
        batch, heads = self._shape
        shape = (batch, heads, used.shape[1])
        return keys.view(*shape, -1), values.view(*shape, -1), used.view(shape)

    def observe(self, window: int, scale: float, softcap: float) -> Observation:
        """What the newest `window` queries see of what is held."""
        keys, values, used = self.states()
        ages = used.sum(-1, keepdim=True) - 1 - torch.arange(used.shape[2], device=used.device)
        queries = torch.cat(self._recent, 2)[:, :, -window:]
        return Observation(queries, keys, values, ages, scale, softcap)

    def keep(self, score: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Keep the `counts[batch, kv_heads]` best tokens of each head by `score`, in the order of arrival.

        Returns:
            Their scores, `[batch, kv_heads, longest now]`, minus infinity behind a head's last token.
        """
        assert self.tokens is not None
        if bool((counts >= (score > float("-inf")).sum(-1)).all()):
            return score
        longest = int(counts.max())
        best = score.argsort(dim=-1, descending=True, stable=True)[..., :longest]
        wanted = torch.arange(longest, device=score.device) < counts.unsqueeze(-1)
        # Unwanted places sort behind all others, so that what is kept stays in the order of arrival.
        places = best.masked_fill(~wanted, score.shape[-1]).sort(-1).values
        self.tokens.keep(places.flatten(0, 1), counts.flatten())
        left = score.gather(-1, places.clamp(max=score.shape[-1] - 1))
        return left.masked_fill(~wanted, float("-inf"))

    def _watch(self, query: torch.Tensor) -> None:
        """Remember the queries that the score will ask for."""
        assert self.eviction is not None
        window = self.eviction.window(self.seen)
        self._recent.append(query[:, :, -window:].clone())
        while len(self._recent) > 1 and sum(q.shape[2] for q in self._recent[1:]) >= window:
            self._recent.pop(0)

    def forget_queries(self, window: int) -> None:
        """Drop all remembered queries but the newest `window`."""
        if not self._recent:
            return
        newest = torch.cat(self._recent, 2)
        self._recent = [newest[:, :, newest.shape[2] - window :].clone()] if window else []
