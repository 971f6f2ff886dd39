"""One layer's compressed cache, a cache layer of transformers: what is held, how attention reads it, what leaves it when."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.cache_utils import CacheLayerMixin

from runtime.kv_cache import attend as attention
from runtime.kv_cache.attend import prompt_attention, step_attention
from runtime.kv_cache.eviction import best_places, newest_run
from runtime.kv_cache.observation import Inputs, Observation
from runtime.kv_cache.storage.plan import StoragePlan
from runtime.kv_cache.store import Store
from runtime.kv_cache.window import Notes, QueryWindow

if TYPE_CHECKING:
    from runtime.kv_cache.eviction import Eviction
    from runtime.kv_cache.offload import Offload
    from runtime.kv_cache.selection.base import Selection

#: So many new tokens at most are steps of decoding (a draft to verify), more are a piece of a prompt.
STEP_TOKENS = 16
#: Of so many drafted tokens at most queries are held beside those that scores ask for, until it is known which tokens stay.
_DRAFTED = 4 * STEP_TOKENS


@dataclass(frozen=True)
class _Owed:
    """What is still to be done after a piece of a text: to evict and to store, once it is known which of its tokens stay.

    Attributes:
        step: whether it was a step, not a piece of a prompt.
        count: tokens of it that have not been taken back.
        scale: of the scores.
        softcap: 0: none.
    """

    step: bool
    count: int
    scale: float
    softcap: float


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
        generated: tokens that have come in steps since the last piece of a prompt.
        watched: queries since the last eviction, as many as the score will ask for.
        reads_all: whether the last step read all of its older tokens, chosen none of them.
        changes: how often tokens left their places (evicted, reordered); what was known of places is void then.
        taken_back: newest tokens of every row that were taken back so far, of all crops together: what was known of older places
            stays right.
        inputs: of the attention module for the tokens at hand, where the score sees them.
        record_past: whether any piece may be taken back (speculative decoding has begun), so that what follows a piece is put off.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(
        self,
        index: int,
        eviction: Eviction | None,
        storage: StoragePlan | None = None,
        selection: Selection[Any] | None = None,
        elsewhere: Offload | None = None,
    ) -> None:
        super().__init__()
        self.index, self.eviction, self.selection = index, eviction, selection
        self.storage, self.elsewhere = storage or StoragePlan(), elsewhere
        self.following: CompressedLayer | None = None  # whose tokens are fetched while this layer computes
        self.changes = self.taken_back = 0
        self.record_past = False
        self.reset()

    def reset(self) -> None:
        self.is_initialized, self.seen, self.shape = False, 0, (0, 0)
        self.store: Store | None = None
        self.share: torch.Tensor | None = None
        self.arrived = torch.zeros(0, dtype=torch.int64)
        self.watched, self.reads_all = QueryWindow(), True
        self.inputs: Inputs | None = None
        self._module: nn.Module | None = (
            None  # of attention, where the score sees it, and what it computed the watched queries of
        )
        self._hidden = QueryWindow()
        self._newest = QueryWindow()  # by which storages are told apart
        self._notes: Notes | None = None  # what a score keeps of each token: its sum, its place in the sequence
        self.pieces = self.generated = 0
        self._asked = False  # by update, and not yet by attention
        self._intact = 0  # newest tokens of every row that are in the tail as they came
        self._owed: _Owed | None = None
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
        if self.eviction is not None and self.eviction.plan.notes:
            self._notes = Notes(self.shape, self.eviction.plan.notes, self.device)
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

    def get_max_cache_shape(self) -> int:  # what transformers 5.10 calls the next one
        return self.get_max_length()

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
        if self._notes is not None:
            self._notes.select_rows(rows, len(indices))
        self.shape = (len(indices), heads)
        self.arrived = self.arrived[indices]
        if self.share is not None:
            self.share = self.share[indices]
        for window in (self.watched, self._hidden, self._newest):
            window.select(indices)
        self.changes += 1

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.shape[0]).repeat_interleave(repeats))

    def activate_past_recording(self) -> None:
        """From now on tokens are evicted and stored when the next forward begins, prompts too: a piece may end in a draft."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest `-tokens_to_remove` tokens of every row (speculative decoding).

        Raises:
            ValueError: some of them have been evicted or stored in few bits, some row has not so many behind its padding, or the number
                is positive.
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
        if self._notes is not None:
            self._notes.take_back(count)
        counted = count
        if self._owed is not None:
            counted = max(0, count - self._owed.count)
            self._owed = replace(self._owed, count=max(0, self._owed.count - count))
        if counted and self.eviction is not None:
            self.eviction.take_back(self, counted)
        self.generated = max(0, self.generated - count)
        self.arrived = self.arrived - count
        self.seen -= count
        self._intact -= count
        for window in (self.watched, self._hidden, self._newest):
            window.take_back(count)
        self.taken_back += count

    @property
    def nbytes(self) -> int:
        """Memory as allocated, what scores and selections need included."""
        held = 0 if self.store is None else self.store.nbytes - self.offloaded_bytes
        held += 0 if self._notes is None else self._notes.nbytes
        held += 0 if self.selection is None else self.selection.nbytes(self.index)
        return held + self.watched.nbytes + self._hidden.nbytes + self._newest.nbytes

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

        After several tokens at once, which may be a draft to verify, that is done when the next forward begins: until then all of them
        can be taken back.

        Args:
            query: `[batch, heads, q, size]`.
            key: `[batch, kv_heads, q, size]`.
            value: `[batch, kv_heads, q, size]`.
            valid: bool `[batch, q]`, False at padding, which must be on the left of all tokens; None: there is none.
            scale: of the scores.
            softcap: 0: none.

        Returns:
            `[batch, heads, q, size]`, zeros at padding.
        """
        assert self.store is not None
        self._asked = False
        if self._owed is not None:
            self._finish_all()
        count = query.shape[2]
        step = self.seen > 0 and count <= STEP_TOKENS
        one = step and count == 1 and valid is None
        before = self.store.lengths
        if one:
            self.store.tail.append_one(key.flatten(0, 2), value.flatten(0, 2))
            self.arrived = self.arrived + 1
        else:
            self.append(key, value, valid)
        if self._notes is not None:
            added = (self.store.lengths - before).clamp(min=0)
            first = self.arrived.repeat_interleave(self.shape[1]) - added
            self._notes.begin(first, added, count, self.seen == 0 or count > STEP_TOKENS, one)
        if step:
            output = step_attention(self, query, valid, scale, softcap)
        else:
            output = prompt_attention(self, query, key, value, valid, before.view(self.shape), scale, softcap)
        self.seen += count
        self.pieces += not step
        self.generated = self.generated + count if step else 0
        # With padding the newest columns are not tokens of every row, so no more than this piece's can be taken back.
        self._intact = self._intact + count if valid is None else int(valid.sum(1).min())
        self._owed = _Owed(step, count, scale, softcap)
        later = self.record_past or (step and count > 1)
        self._watch(query, valid, step, min(count, _DRAFTED) if later else 0)
        if not later:
            self._finish()
        return output

    def _watch(self, query: torch.Tensor, valid: torch.Tensor | None, step: bool, drafted: int) -> None:
        """Remember the queries that scores will ask for, even when the newest `drafted` of them are taken back."""
        window = 0 if self.eviction is None else self.eviction.window(self.seen, step)
        if window:
            self.watched.append(query, window + drafted, valid)
            if self.inputs is not None:
                self._hidden.append(self.inputs.hidden.unsqueeze(1), window + drafted, valid)
                self._module, self.inputs = self.inputs.module, None
        if self.storage.saliency is not None:
            self._newest.append(query, max(1, self.storage.saliency.window(self.seen)) + drafted, valid)

    def _finish_all(self) -> None:
        """Do what was put off, in all layers and in their order: layers that share a budget wait for each other."""
        layer: CompressedLayer | None = self
        while layer is not None:
            layer._finish()
            layer = None if layer.following is self else layer.following

    def _finish(self) -> None:
        """Evict and store after a piece of a text."""
        owed, self._owed = self._owed, None
        if owed is None:
            return
        if self.eviction is not None:
            if owed.step:
                self.eviction.after_step(self, owed.count, owed.scale, owed.softcap)
            else:
                self.eviction.after_prompt(self, owed.scale, owed.softcap)
        self.settle(owed.scale, owed.softcap)

    def settle(self, scale: float, softcap: float) -> None:
        """Store older tokens as the plan says."""
        assert self.store is not None
        if not self.storage.moves or (self.eviction is not None and self.eviction.waits(self)):
            return

        def saliency() -> torch.Tensor:
            score = self.storage.saliency
            assert score is not None
            assert self.store is not None
            newest = self._newest.newest(max(1, score.window(self.seen)))
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

    # ---------------------------------------------------------------- eviction
    @property
    def wants_inputs(self) -> bool:
        """Whether the eviction's score sees the inputs of the attention module."""
        return self.eviction is not None and "hidden" in self.eviction.plan.score.wants

    def forget_queries(self, window: int) -> None:
        """Drop all remembered queries but the newest `window`."""
        self.watched.forget(window)
        self._hidden.forget(window)

    @property
    def is_final(self) -> bool:
        """Whether there are tokens before this piece of a text that cannot be told apart any more."""
        return self.storage.is_final and self.pieces > 1

    def observe(self, window: int, scale: float, softcap: float) -> Observation:
        """What the newest `window` queries see of what is held."""
        assert self.store is not None
        keys, values, _ = self.store.states()
        seen = self._observation(self.watched.newest(window), keys, values, self.store.lengths, scale, softcap)
        seen = replace(seen, generated=self.generated)
        if self._module is not None:
            seen = replace(seen, inputs=Inputs(self._module, self._hidden.newest(window)[:, 0]))
        if self._notes is None:
            return seen
        places = self._notes.dense("place")
        return replace(seen, mass=self._notes.dense("mass"), positions=None if places is None else places.long())

    def given(self) -> torch.Tensor:
        """Which tokens came in prompts, bool `[batch, kv_heads, longest]`, in the order of `observe`; where eviction keeps them."""
        given = None if self._notes is None else self._notes.dense("given")
        assert given is not None
        return given

    def remember_mass(self, mass: torch.Tensor) -> None:
        """What has been gathered of every token, float32 `[batch, kv_heads, longest]`."""
        assert self._notes is not None
        self._notes.set_mass(mass)

    def keep(self, score: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Keep the `counts[batch, kv_heads]` best tokens of each head by `score`, in the order of arrival.

        Returns:
            Their scores, `[batch, kv_heads, longest now]`, minus infinity behind a head's last token.
        """
        assert self.store is not None
        if bool((counts >= (score > float("-inf")).sum(-1)).all()):
            return score
        places, wanted = best_places(score, counts)
        self.store.keep(places.flatten(0, 1), counts.flatten())
        if self._notes is not None:
            self._notes.pages.keep(places.flatten(0, 1), counts.flatten())
        self._intact = min(self._intact, newest_run(places, counts, score))
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
