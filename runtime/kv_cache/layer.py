"""One layer's compressed cache, a cache layer of transformers: what is held, how attention reads it, what leaves it when."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import CacheLayerMixin

from runtime.kv_cache import attention
from runtime.kv_cache.kernels import attend_region
from runtime.kv_cache.observation import Observation
from runtime.kv_cache.pages import Pages, Part
from runtime.kv_cache.prompt import prompt_attention
from runtime.kv_cache.region import Chosen, Region, merge
from runtime.kv_cache.storage.plan import StoragePlan
from runtime.kv_cache.store import Store

if TYPE_CHECKING:
    from runtime.kv_cache.eviction import Eviction
    from runtime.kv_cache.offload import Offload
    from runtime.kv_cache.selection.base import Selection

#: So many new tokens at most are steps of decoding (a draft to verify), more are a piece of a prompt.
STEP_TOKENS = 16


class CompressedLayer(CacheLayerMixin):
    """Keys and values of one layer, each head with as many tokens as it is allowed, stored as the plan says.

    Args:
        index: of the layer among the compressed ones.
        eviction: what leaves the cache; shared by all layers. None: nothing.
        storage: how older tokens are held.
        selection: what a step reads; shared by all layers. None: everything.
        elsewhere: where older tokens are held; shared by all layers. None: in memory of the device.

    Attributes:
        seen: tokens of the longest row so far, padding and evicted ones included; what positions are counted from.
        store: what is held; None before the first token.
        share: of the mean budget of a layer, `[batch]`, as the last prompt left it; None: the mean.
        arrived: int64 `[batch]`, tokens that each sequence has had, evicted ones too and padding not.
        shape: (batch, kv_heads).
        pieces: of prompts that have come, steps not counted.
        changes: how often tokens left their places (evicted, reordered, taken back); what was known of places is void then.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(
        self,
        index: int,
        eviction: Eviction | None,
        storage: StoragePlan | None = None,
        selection: Selection | None = None,
        elsewhere: Offload | None = None,
    ) -> None:
        super().__init__()
        self.index, self.eviction, self.selection = index, eviction, selection
        self.storage, self.elsewhere = storage or StoragePlan(), elsewhere
        self.following: CompressedLayer | None = None  # whose tokens are fetched while this layer computes
        self.changes = 0
        self.reset()

    def reset(self) -> None:
        self.is_initialized, self.seen, self.shape = False, 0, (0, 0)
        self.store: Store | None = None
        self.share: torch.Tensor | None = None
        self.arrived = torch.zeros(0, dtype=torch.int64)
        self._recent: list[torch.Tensor] = []  # queries since the last eviction, newest last
        self._newest: torch.Tensor | None = None  # queries that storages are told apart by
        self._mass: Pages | None = None  # what an accumulating score has gathered, token by token
        self.pieces = 0
        self._asked = False  # by update, and not yet by attention
        self._intact = 0  # newest tokens of every row that are in the tail as they came
        self.changes += 1
        if self.eviction is not None:
            self.eviction.forget(self)

    # ---------------------------------------------------------------- transformers' interface
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, heads = key_states.shape[:2]
        self.dtype, self.device, self.shape = key_states.dtype, key_states.device, (batch, heads)
        sizes = key_states.shape[-1], value_states.shape[-1]
        allocate = None if self.elsewhere is None else self.elsewhere.allocate
        self.store = Store(batch * heads, sizes, self.dtype, self.device, self.storage, allocate)
        self.arrived = torch.zeros(batch, dtype=torch.int64, device=self.device)
        if self.eviction is not None and self.eviction.accumulates:
            self._mass = Pages(batch * heads, {"mass": Part(1, torch.float32)}, self.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Marks the new states; `attend` stores them, since only attention knows queries and padding."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._asked:
            raise ValueError(
                "this model's attention does not read its cache in the way of transformers: it cannot be compressed"
            )
        self._asked = True
        return attention.mark(key_states, self), value_states

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these sequences, in that order; one may come several times."""
        if self.store is None:
            return
        indices = indices.to(self.device)
        heads = self.shape[1]
        rows = (indices[:, None] * heads + torch.arange(heads, device=self.device)).reshape(-1)
        self.store.select_rows(rows)
        if self._mass is not None:
            self._mass.select_rows(rows)
        self.shape = (len(indices), heads)
        self.arrived = self.arrived[indices]
        if self.share is not None:
            self.share = self.share[indices]
        self._recent = [queries[indices] for queries in self._recent]
        self._newest = None if self._newest is None else self._newest[indices]
        self.changes += 1

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.shape[0]).repeat_interleave(repeats))

    def activate_past_recording(self) -> None:
        """Nothing to do: the newest tokens are always there to be taken back."""

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest `-tokens_to_remove` tokens (speculative decoding).

        Raises:
            ValueError: some of them have been evicted or stored in few bits, or the number is positive.
        """
        count = -tokens_to_remove
        if count < 0:
            raise ValueError(f"crop takes minus the number of tokens to take back, not {tokens_to_remove}")
        if count == 0 or self.store is None:
            return
        if count > self._intact:
            raise ValueError(
                f"{count} tokens cannot be taken back from a compressed cache: only the newest {self._intact} are as they came; "
                "draft fewer tokens, or keep more recent ones"
            )
        self.store.tail.pages.crop(self.store.tail.lengths - count)
        if self._mass is not None:
            self._mass.crop(self._mass.lengths - count)
        self.arrived = self.arrived - count
        self.seen -= count
        self._intact -= count
        self._take_back_queries(count)
        self.changes += 1

    @property
    def nbytes(self) -> int:
        """Memory as allocated, what scores and selections need included."""
        held = 0 if self.store is None else self.store.nbytes - self.offloaded_bytes
        held += 0 if self._mass is None else self._mass.nbytes
        held += 0 if self.selection is None else self.selection.nbytes(self.index)
        queries = [*self._recent, *([] if self._newest is None else [self._newest])]
        return held + sum(tensor.untyped_storage().nbytes() for tensor in queries)

    @property
    def offloaded_bytes(self) -> int:
        """Of older tokens that are held elsewhere, as allocated there."""
        return 0 if self.store is None or self.elsewhere is None else self.store.tier_bytes

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
        assert self.store is not None
        self._asked = False
        count = query.shape[2]
        step = self.seen > 0 and count <= STEP_TOKENS and (valid is None or bool(valid.all()))
        before = self.store.lengths
        if step and count == 1:
            self.store.tail.append_one(key.flatten(0, 2), value.flatten(0, 2))
            self.arrived = self.arrived + 1
        else:
            valid = None if valid is None or bool(valid.all()) else valid
            self.append(key, value, valid)
        if self._mass is not None and step and count == 1:
            self._mass.append_one({"mass": torch.zeros(self._mass.rows, 1, device=self.device)})
        elif self._mass is not None:
            added = (self.store.lengths - before).clamp(min=0)
            self._mass.append({"mass": torch.zeros(len(added), count, 1, device=self.device)}, added)
        if step:
            output = self._step_attention(query, scale, softcap)
        else:
            output = prompt_attention(self, query, key, value, valid, before.view(self.shape), scale, softcap)
        self.seen += count
        self.pieces += not step
        self._intact += count
        if self.eviction is not None:
            self._watch(query, step)
            if step:
                self.eviction.after_step(self, count, scale, softcap)
            else:
                self.eviction.after_prompt(self, scale, softcap)
        if self.storage.saliency is not None:
            width = max(1, self.storage.saliency.window(self.seen))
            newest = query if self._newest is None else torch.cat([self._newest, query], 2)
            self._newest = newest[:, :, -width:].clone()
        self.settle(scale, softcap)
        return output

    def settle(self, scale: float, softcap: float) -> None:
        """Store older tokens as the plan says."""
        assert self.store is not None
        if not self.storage.moves or (self.eviction is not None and self.eviction.waits(self)):
            return

        def saliency() -> torch.Tensor:
            score, newest = self.storage.saliency, self._newest
            assert score is not None
            assert newest is not None
            assert self.store is not None
            keys, values = self.store.tail.states()
            lengths = self.store.tail.lengths
            seen = self._observation(newest, keys, values, lengths, scale, softcap)
            return score(replace(seen, pinned=0)).flatten(0, 1)

        if self.store.settle(saliency):
            # Of a row that is shorter than the prefix, nothing is left in the tail.
            self._intact = min(self._intact, self.storage.recent, int(self.store.tail.lengths.min()))

    def append(self, key: torch.Tensor, value: torch.Tensor, valid: torch.Tensor | None) -> None:
        """Store new tokens `[batch, kv_heads, q, size]` behind the others; `valid` bool `[batch, q]`, False at padding on the left."""
        assert self.store is not None
        batch, heads = self.shape
        count = key.shape[2]
        counts = torch.full((batch,), count, dtype=torch.int64, device=key.device)
        if valid is not None:
            if bool((valid[:, :-1] & ~valid[:, 1:]).any()):
                raise ValueError("compressed caches take padding on the left only: set tokenizer.padding_side = 'left'")
            counts = valid.sum(1)
            # Padding is on the left: a row's tokens move to the front, and what is behind is not stored.
            order = (torch.arange(count, device=key.device)[None] + (count - counts)[:, None]) % count
            places = order[:, None, :, None]
            key = key.gather(2, places.expand_as(key))
            value = value.gather(2, places.expand_as(value))
        self.store.tail.append(key.flatten(0, 1), value.flatten(0, 1), counts.repeat_interleave(heads))
        self.arrived = self.arrived + counts

    def _step_attention(self, query: torch.Tensor, scale: float, softcap: float) -> torch.Tensor:
        """Attention of a few new tokens, region by region, as stored."""
        assert self.store is not None
        batch, heads = self.shape
        count, size = query.shape[2:]
        rows = query.reshape(batch * heads, -1, size)  # a key head's queries, head by head
        regions = self.store.regions
        chosen: list[Chosen | None] = [None] * len(regions)
        if self.selection is not None:
            chosen = self.selection.choose(self, rows, regions, scale)
        visible = None
        if count > 1:
            newest = torch.arange(count - 1, -1, -1, device=query.device).repeat(rows.shape[1] // count)
            visible = self.store.tail.lengths[:, None] - newest
        readable = self._near(regions)
        pieces = [
            attend_region(rows, region, scale, softcap, visible if region is self.store.tail else None, some)
            for region, some in zip(readable, chosen, strict=True)
        ]
        if self.elsewhere is not None:
            self.elsewhere.leave(self.store.tiers)
        return merge(pieces).view(batch, query.shape[1], count, -1).to(query.dtype)

    def _near(self, regions: list[Region]) -> list[Region]:
        """The regions where attention can read them; the next layer's are on their way from now on."""
        if self.elsewhere is None or self.store is None:
            return regions
        far = [region for region in regions if any(region is tier for tier in self.store.tiers)]
        near = iter(self.elsewhere.near(far))
        if self.following not in (None, self) and self.following.store is not None:
            self.elsewhere.fetch(self.following.store.tiers)
        return [next(near) if any(region is tier for tier in far) else region for region in regions]

    # ---------------------------------------------------------------- eviction
    @property
    def is_final(self) -> bool:
        """Whether there are tokens before this piece of a text that cannot be told apart any more."""
        return self.storage.is_final and self.pieces > 1

    def observe(self, window: int, scale: float, softcap: float) -> Observation:
        """What the newest `window` queries see of what is held."""
        assert self.store is not None
        keys, values, _ = self.store.states()
        queries = torch.cat(self._recent, 2)[:, :, -window:]
        seen = self._observation(queries, keys, values, self.store.lengths, scale, softcap)
        if self._mass is None:
            return seen
        return seen.with_mass(self._mass.dense("mass")[..., 0].view(*self.shape, -1))

    def remember_mass(self, mass: torch.Tensor) -> None:
        """What has been gathered of every token, float32 `[batch, kv_heads, longest]`."""
        assert self._mass is not None
        lengths = self._mass.lengths
        self._mass.crop(torch.zeros_like(lengths))
        self._mass.append({"mass": mass.flatten(0, 1).unsqueeze(-1)}, lengths)

    def keep(self, score: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Keep the `counts[batch, kv_heads]` best tokens of each head by `score`, in the order of arrival.

        Returns:
            Their scores, `[batch, kv_heads, longest now]`, minus infinity behind a head's last token.
        """
        assert self.store is not None
        if bool((counts >= (score > float("-inf")).sum(-1)).all()):
            return score
        longest = max(1, int(counts.max()))
        # Of equal scores the newer token stays.
        best = score.shape[-1] - 1 - score.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :longest]
        wanted = torch.arange(longest, device=score.device) < counts.unsqueeze(-1)
        # Unwanted places sort behind all others, so that what is kept stays in the order of arrival.
        places = best.masked_fill(~wanted, score.shape[-1]).sort(-1).values.clamp(max=score.shape[-1] - 1)
        self.store.keep(places.flatten(0, 1), counts.flatten())
        if self._mass is not None:
            self._mass.keep(places.flatten(0, 1), counts.flatten())
        self._intact = min(self._intact, _newest_run(places, counts, score))
        self.changes += 1
        return score.gather(-1, places).masked_fill(~wanted, float("-inf"))

    def _observation(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        lengths: torch.Tensor,
        scale: float,
        softcap: float,
    ) -> Observation:
        batch, heads = self.shape
        shape = (batch, heads, keys.shape[1], -1)
        ages = lengths.view(batch, heads, 1) - 1 - torch.arange(keys.shape[1], device=keys.device)
        return Observation(
            queries, keys.view(shape), values.view(shape), ages, scale, softcap, self.index, self.storage.prefix
        )

    def _watch(self, query: torch.Tensor, step: bool) -> None:
        """Remember the queries that the score will ask for."""
        assert self.eviction is not None
        window = self.eviction.window(self.seen, step)
        if window == 0:
            return
        self._recent.append(query[:, :, -window:].clone())
        while len(self._recent) > 1 and sum(q.shape[2] for q in self._recent[1:]) >= window:
            self._recent.pop(0)

    def forget_queries(self, window: int) -> None:
        """Drop all remembered queries but the newest `window`."""
        if not self._recent:
            return
        newest = torch.cat(self._recent, 2)
        self._recent = [newest[:, :, max(0, newest.shape[2] - window) :].clone()] if window else []

    def _take_back_queries(self, count: int) -> None:
        if self._recent:
            held = torch.cat(self._recent, 2)
            self._recent = [held[:, :, : max(0, held.shape[2] - count)]]
        if self._newest is not None:
            self._newest = self._newest[:, :, : max(0, self._newest.shape[2] - count)]


def _newest_run(places: torch.Tensor, counts: torch.Tensor, score: torch.Tensor) -> int:
    """How many of the newest tokens every head still has, one after the other.

    Args:
        places: int64 `[batch, kv_heads, most]`, what is kept, ascending.
        counts: int64 `[batch, kv_heads]`, how many of them.
        score: `[batch, kv_heads, n]`, minus infinity where there was no token.
    """
    ends = (score > float("-inf")).sum(-1, keepdim=True) - 1
    from_end = counts.unsqueeze(-1) - 1 - torch.arange(places.shape[-1], device=places.device)
    # A token is part of the run if as many newer ones are kept as there were; behind a head's last there is nothing.
    gaps = ((ends - places) != from_end) & (from_end >= 0)
    first = torch.where(gaps, from_end, counts.unsqueeze(-1)).amin(-1)
    return int(first.min())
