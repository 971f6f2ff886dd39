"""State of one layer's compressed cache: its tokens, what is noted of them, and how they are stored, observed and dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from runtime.kv_cache.observation import Inputs, Observation
from runtime.kv_cache.offload import Offload
from runtime.kv_cache.pages import Pages, PageTensor
from runtime.kv_cache.storage.plan import StoragePlan
from runtime.kv_cache.token_store import TokenStore


class TokenNotes(Pages):
    """Numbers of each token that a score asks for, in pages that live as long as its keys and values.

    "mass": what the token has gathered; "place": its position in its sequence; "given": whether it came in a prompt.
    """

    def begin(self, first: torch.Tensor, added: torch.Tensor | None, count: int, given: bool) -> None:
        """Those of new tokens.

        Args:
            first: int64 `[rows]`, position of each row's first new one.
            added: int64 `[rows]`, how many of each row are new; None: `count`.
            count: at most so many.
            given: they come in a prompt.
        """
        rows, device = self.rows, self.device
        fresh = {
            "mass": torch.zeros(rows, count, 1, device=device),
            "place": (first[:, None] + torch.arange(count, device=device)).unsqueeze(-1),
            "given": torch.full((rows, count, 1), given, device=device),
        }
        self.append({name: fresh[name] for name in self.parts}, added)

    def set_mass(self, mass: torch.Tensor) -> None:
        """What has been gathered of every token by now, float32 `[batch, kv_heads, longest]`."""
        rows, places = self.used().nonzero(as_tuple=True)
        self.pools["mass"].view(-1)[self._slots(rows, places)] = mass.flatten(0, 1)[rows, places]


class QueryWindow:
    """Queries `[batch, heads, q, size]` in the order in which they came. Chunks are concatenated only when they are asked for."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Memory as allocated."""
        return sum(chunk.untyped_storage().nbytes() for chunk in self._chunks)

    def append(self, query: torch.Tensor, window: int, valid: torch.Tensor | None = None) -> None:
        """Add new queries; older ones than the newest `window` may be dropped.

        Args:
            query: `[batch, heads, q, size]`.
            window: at least 1.
            valid: bool `[batch, q]`, False at padding on the left; None: there is none. Padding goes before the other queries, so that a
                row's newest queries are those of its newest tokens.
        """
        if valid is not None and self._chunks:
            query = self._behind_padding(query, valid)
            self._chunks = []
        self._chunks.append(query[:, :, -window:].clone())
        while sum(chunk.shape[2] for chunk in self._chunks[1:]) >= window:
            self._chunks.pop(0)

    def _behind_padding(self, query: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Padding of the new queries, as zeros, then the older queries, then the other new ones: `[batch, heads, older + q, size]`."""
        joined = torch.cat([*self._chunks, query.masked_fill(~valid[:, None, :, None], 0)], 2)
        real = torch.nn.functional.pad(valid, (joined.shape[2] - valid.shape[1], 0), value=True)
        order = real.to(torch.uint8).argsort(dim=1, stable=True)
        return joined.take_along_dim(order[:, None, :, None], 2)

    def newest(self, window: int) -> torch.Tensor:
        """The newest `window`, at least 1, `[batch, heads, at most window, size]`; some must have been appended."""
        return torch.cat(self._chunks, 2)[:, :, -window:]

    def forget(self, window: int) -> None:
        """Drop all but the newest `window`."""
        self._chunks = [self.newest(window).clone()] if self._chunks and window else []

    def take_back(self, count: int) -> None:
        """Drop the newest `count`."""
        if self._chunks:
            older = torch.cat(self._chunks, 2)
            self._chunks = [older[:, :, : max(0, older.shape[2] - count)]]

    def select(self, indices: torch.Tensor) -> None:
        """Only these sequences (int64), in that order."""
        self._chunks = [chunk[indices] for chunk in self._chunks]


class LayerState:
    """Keys and values of one layer, each head with as many tokens as it is allowed, stored as the plan says.

    Args:
        index: of the layer among the compressed ones.
        storage: how older tokens are stored.
        selection: what a step reads; shared by all layers. None: everything.
        elsewhere: where older tokens lie; shared by all layers. None: in memory of the device.

    Attributes:
        noted: what is noted of each token beside keys and values.
        seen: tokens of the longest row so far, padding and evicted ones included; what positions are counted from.
        store: the tokens; of no rows before the first one.
        notes: what a score keeps of each token beside keys and values; None: nothing.
        share: of the mean budget of a layer, `[batch]`, as the last prompt left it; None: the mean.
        arrived: int64 `[batch]`, tokens that each sequence has had, evicted ones too and padding not.
        shape: (batch, kv_heads).
        scale: of the scores, as attention was last computed.
        softcap: likewise; 0: none.
        chunks: of prompts that have come, steps not counted.
        generated: tokens that have come in steps since the last chunk of a prompt.
        queries: those since the last eviction, as many as the score will ask for.
        hidden: inputs of the attention module for the same tokens, where the score sees them; of `module`.
        newest: queries by which storages are told apart.
        windows: these three.
        intact: newest tokens of every row that are in the tail as they came.
        reads_all: whether the last step read all of its older tokens, chosen none of them.
        following: layer whose tokens are fetched while this one computes.
        changes: how often tokens left their positions (evicted, reordered); what was known of positions is void then.
        taken_back: newest tokens of every row that were taken back so far, of all crops together: what was known of older positions
            stays right.
    """

    noted: Mapping[str, PageTensor] = {}

    def __init__(self, index: int, storage: StoragePlan, selection: Any, elsewhere: Offload | None) -> None:
        self.index, self.storage, self.selection, self.elsewhere = index, storage, selection, elsewhere
        self.following: Any = None
        self.changes = self.taken_back = 0
        self.reset()

    def reset(self) -> None:
        """Begin anew, without tokens."""
        self.seen, self.shape, self.scale, self.softcap = 0, (0, 0), 0.0, 0.0
        self.is_initialized = False
        self.store = TokenStore(0, (1, 1), torch.float32, torch.device("cpu"), StoragePlan())
        self.notes: TokenNotes | None = None
        self.share: torch.Tensor | None = None
        self.arrived = torch.zeros(0, dtype=torch.int64)
        self.windows = self.queries, self.hidden, self.newest = QueryWindow(), QueryWindow(), QueryWindow()
        self.module: nn.Module | None = None
        self.chunks = self.generated = self.intact = 0
        self.reads_all = True
        self.changes += 1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make room for states like these, `[batch, kv_heads, q, size]` each."""
        self.is_initialized, self.dtype, self.device = True, key_states.dtype, key_states.device
        batch, heads = self.shape = (key_states.shape[0], key_states.shape[1])
        allocate = None if self.elsewhere is None else self.elsewhere.allocate
        sizes = key_states.shape[-1], value_states.shape[-1]
        self.store = TokenStore(batch * heads, sizes, self.dtype, self.device, self.storage, allocate)
        self.notes = TokenNotes(batch * heads, self.noted, self.device) if self.noted else None
        self.arrived = torch.zeros(batch, dtype=torch.int64, device=self.device)

    @property
    def offloaded_bytes(self) -> int:
        """Memory of older tokens that lie elsewhere, as allocated there."""
        return 0 if self.elsewhere is None else self.store.tier_bytes

    @property
    def nbytes(self) -> int:
        """Memory as allocated, what scores and selections need included; what is offloaded is counted apart."""
        own = self.store.nbytes - self.offloaded_bytes
        own += 0 if self.notes is None else self.notes.nbytes
        own += 0 if self.selection is None else self.selection.nbytes(self.index)
        return own + sum(window.nbytes for window in self.windows)

    # ---------------------------------------------------------------- tokens
    def append(self, key: torch.Tensor, value: torch.Tensor, valid: torch.Tensor | None, prompt: bool) -> None:
        """Store new tokens `[batch, kv_heads, q, size]` behind the others.

        Args:
            valid: bool `[batch, q]`, False at padding on the left; None: there is none.
            prompt: they come in a prompt.
        """
        heads, count, tail = self.shape[1], key.shape[2], self.store.tail
        before, added = self.arrived, None
        self.arrived = before + (count if valid is None else valid.sum(1))
        if valid is not None:
            if bool((valid[:, :-1] & ~valid[:, 1:]).any()):
                raise ValueError("compressed caches take padding on the left only: set tokenizer.padding_side = 'left'")
            counts = valid.sum(1)
            # Padding is on the left: a row's tokens move to the front, and what is behind is not stored.
            order = (torch.arange(count, device=key.device)[None] + (count - counts)[:, None]) % count
            key, value = (states.take_along_dim(order[:, None, :, None], 2) for states in (key, value))
            added = counts.repeat_interleave(heads)
        tail.append(tail.encoded(key.flatten(0, 1), value.flatten(0, 1)), added)
        if self.notes is not None:
            self.notes.begin(before.repeat_interleave(heads), added, count, prompt)

    def keep(self, score: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Keep the `counts[batch, kv_heads]` best tokens of each head by `score`, in the order of arrival.

        Returns:
            Their scores, `[batch, kv_heads, longest now]`, minus infinity behind a head's last token.
        """
        if bool((counts >= (score > float("-inf")).sum(-1)).all()):
            return score
        places, wanted = best_places(score, counts)
        self.store.keep(places.flatten(0, 1), counts.flatten())
        if self.notes is not None:
            self.notes.keep(places.flatten(0, 1), counts.flatten())
        self.intact = min(self.intact, newest_run(places, counts, score))
        self.changes += 1
        return score.gather(-1, places).masked_fill(~wanted, float("-inf"))

    def settle(self) -> None:
        """Store older tokens as the plan says."""
        if self.storage.moves and self.store.settle(self._saliency):
            # Of a row that is shorter than the prefix, nothing is left in the tail.
            self.intact = min(self.intact, self.storage.recent, int(self.store.tail.lengths.min()))

    def _saliency(self) -> torch.Tensor:
        """Importance of the tail's tokens, `[rows, longest]`."""
        score = self.storage.saliency
        assert score is not None
        tail, newest = self.store.tail, self.newest.newest(max(1, score.window(self.seen)))
        return score(replace(self._observation(newest, *tail.states(), tail.lengths), pinned=0)).flatten(0, 1)

    def select_rows(self, indices: torch.Tensor) -> None:
        """Only these sequences (int64), in that order; one may come several times."""
        if not self.is_initialized:
            return
        indices, heads = indices.to(self.arrived.device), self.shape[1]
        rows = (indices[:, None] * heads + torch.arange(heads, device=indices.device)).reshape(-1)
        self.store.select_rows(rows)
        if self.notes is not None:
            self.notes.select_rows(rows)
        self.shape = (len(indices), heads)
        self.arrived = self.arrived[indices]
        self.share = None if self.share is None else self.share[indices]
        for window in self.windows:
            window.select(indices)
        self.changes += 1

    def take_back(self, count: int) -> None:
        """Drop the newest `count` tokens of every row, which are `intact`."""
        self.store.tail.crop(self.store.tail.lengths - count)
        if self.notes is not None:
            self.notes.crop(self.notes.lengths - count)
        self.generated = max(0, self.generated - count)
        self.arrived = self.arrived - count
        self.seen -= count
        self.intact -= count
        for window in self.windows:
            window.take_back(count)
        self.taken_back += count

    # ---------------------------------------------------------------- what scores see
    def observe(self, window: int) -> Observation:
        """What the newest `window` queries see of the cache."""
        keys, values, *_ = self.store.states()
        seen = self._observation(self.queries.newest(window), keys, values, self.store.lengths)
        inputs = None if self.module is None else Inputs(self.module, self.hidden.newest(window)[:, 0])
        places = self.note("place")
        positions = None if places is None else places.long()
        return replace(seen, generated=self.generated, inputs=inputs, mass=self.note("mass"), positions=positions)

    def note(self, name: str) -> torch.Tensor | None:
        """What is noted of every token, a copy `[batch, kv_heads, longest]`; None: nothing of that name."""
        if self.notes is None or name not in self.notes.parts:
            return None
        return self.notes.dense(name)[..., 0].unflatten(0, self.shape)

    def forget_queries(self, window: int) -> None:
        """Drop all remembered queries but the newest `window`."""
        self.queries.forget(window)
        self.hidden.forget(window)

    def _observation(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor
    ) -> Observation:
        shape = (*self.shape, keys.shape[1], -1)
        ages = lengths.view(*self.shape, 1) - 1 - torch.arange(keys.shape[1], device=keys.device)
        keys, values = keys.view(shape), values.view(shape)
        return Observation(queries, keys, values, ages, self.scale, self.softcap, self.index, self.storage.prefix)


def best_places(score: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions of each head's best tokens, in the order of arrival; of equal scores the newer token is better.

    Args:
        score: `[batch, kv_heads, n]`, minus infinity where there is no token.
        counts: int64 `[batch, kv_heads]`, how many stay, no more than there are.

    Returns:
        int64 `[batch, kv_heads, most]`, ascending, whatever behind a head's last; and bool, which of them count.
    """
    end, longest = score.shape[-1], max(1, int(counts.max()))
    best = end - 1 - score.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :longest]
    wanted = torch.arange(longest, device=score.device) < counts.unsqueeze(-1)
    # Unwanted places sort behind all others, so that what is kept stays in the order of arrival.
    return best.masked_fill(~wanted, end).sort(-1).values.clamp(max=end - 1), wanted


def newest_run(places: torch.Tensor, counts: torch.Tensor, score: torch.Tensor) -> int:
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
