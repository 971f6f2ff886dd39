"""One layer's compressed cache, a cache layer of transformers: how attention reads it, and when tokens are evicted and stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.cache_utils import CacheLayerMixin

from runtime.kv_cache import attend as attention
from runtime.kv_cache.attend import hidden_states, prompt_attention, step_attention
from runtime.kv_cache.layer_state import LayerState
from runtime.kv_cache.storage.plan import StoragePlan

if TYPE_CHECKING:
    from runtime.kv_cache.eviction import Eviction
    from runtime.kv_cache.offload import Offload
    from runtime.kv_cache.selection.base import Selection

#: So many new tokens at most are steps of decoding (a draft to verify), more are a chunk of a prompt.
STEP_TOKENS = 16
#: Of so many drafted tokens at most queries are remembered beside those that scores ask for, until it is known which tokens stay.
_DRAFTED = 4 * STEP_TOKENS


class CompressedLayer(LayerState, CacheLayerMixin):
    """A `LayerState` that transformers' models and their attention use as a cache layer.

    Args:
        index: of the layer among the compressed ones.
        eviction: what leaves the cache; shared by all layers. None: nothing.
        storage: how older tokens are stored.
        selection: what a step reads; shared by all layers. None: everything.
        elsewhere: where older tokens lie; shared by all layers. None: in memory of the device.

    Attributes:
        record_past: whether any chunk may be taken back (speculative decoding has begun), so that what follows a chunk is put off.
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
        CacheLayerMixin.__init__(self)
        self.eviction = eviction
        self.record_past = False
        self._sees_inputs = eviction is not None and "hidden" in eviction.plan.score.wants
        self.noted = {} if eviction is None else eviction.plan.notes
        super().__init__(index, storage or StoragePlan(), selection, elsewhere)

    def reset(self) -> None:
        super().reset()
        self._asked = False  # by update, and not yet by attention
        # What is still to be evicted and stored after a chunk, once it is known which of its tokens stay: whether it was a step, not a
        # chunk of a prompt, and its tokens that have not been taken back.
        self._pending: tuple[bool, int] | None = None
        if self.eviction is not None:
            self.eviction.forget(self)

    # ---------------------------------------------------------------- transformers' interface
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Marks the new states; `attend` stores them, since only attention knows queries and padding."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._asked:
            raise ValueError("this model's attention reads its cache in a way of its own: it cannot be compressed")
        self._asked = True
        return attention.mark(key_states, self.attend), value_states

    def get_seq_length(self) -> int:
        """Tokens seen so far, evicted ones included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask covers: all tokens seen and the new ones, from 0 on."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """-1: the cache grows without a limit."""
        return -1

    get_max_cache_shape = get_max_length  # as transformers 5.10 calls it

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Select rows for beam search, `beam_idx` int64 `[batch]`."""
        self.select_rows(beam_idx)

    batch_select_indices = LayerState.select_rows

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, copies side by side."""
        self.select_rows(torch.arange(self.shape[0]).repeat_interleave(repeats))

    def activate_past_recording(self) -> None:
        """From now on tokens are evicted and stored when the next forward begins, prompts too: a chunk may end in a draft."""
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
        if count == 0 or not self.is_initialized:
            return
        if count > self.intact:
            raise ValueError(
                f"{count} tokens cannot be taken back from a compressed cache: only the newest {self.intact} are as they came; "
                "draft fewer tokens, or keep more recent ones"
            )
        counted = count
        if self._pending is not None:
            step, last = self._pending
            counted, self._pending = max(0, count - last), (step, max(0, last - count))
        if counted and self.eviction is not None:
            self.eviction.take_back(self, counted)
        self.take_back(count)

    # ---------------------------------------------------------------- attention
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        valid: torch.Tensor | None,
        scale: float,
        softcap: float,
        module: nn.Module | None = None,
    ) -> torch.Tensor:
        """Attention of new tokens over the cache and each other; then they are stored, and some may be evicted.

        After several tokens at once, which may be a draft to verify, that is done when the next forward begins: until then all of them
        can be taken back.

        Args:
            query: `[batch, heads, q, size]`.
            key: `[batch, kv_heads, q, size]`.
            value: `[batch, kv_heads, q, size]`.
            valid: bool `[batch, q]`, False at padding, which must be on the left of all tokens; None: there is none.
            scale: of the scores.
            softcap: 0: none.
            module: of attention, whose inputs a score may see.

        Returns:
            `[batch, heads, q, size]`, zeros at padding.
        """
        self._asked, self.scale, self.softcap = False, scale, softcap
        if self._pending is not None:
            self._finish_all()
        count = query.shape[2]
        step = self.seen > 0 and count <= STEP_TOKENS
        if step:
            self.append(key, value, valid, False)
            output = step_attention(self, query, valid)
        else:
            before = self.store.lengths.view(self.shape)
            self.append(key, value, valid, True)
            output = prompt_attention(self, query, key, value, valid, before)
        self.seen += count
        self.chunks += not step
        self.generated = self.generated + count if step else 0
        # With padding the newest columns are not tokens of every row, so no more than this chunk's can be taken back.
        self.intact = self.intact + count if valid is None else int(valid.sum(1).min())
        self._pending = step, count
        later = self.record_past or (step and count > 1)
        self._remember(query, valid, step, min(count, _DRAFTED) if later else 0, module)
        if not later:
            self._finish()
        return output

    def _remember(
        self, query: torch.Tensor, valid: torch.Tensor | None, step: bool, drafted: int, module: nn.Module | None
    ) -> None:
        """Remember the queries that scores will ask for, even when the newest `drafted` of them are taken back."""
        window = 0 if self.eviction is None else self.eviction.window(self.seen, step)
        if window:
            self.queries.append(query, window + drafted, valid)
            if self._sees_inputs and module is not None:
                self.module = module
                self.hidden.append(hidden_states(module).unsqueeze(1), window + drafted, valid)
        if self.storage.saliency is not None:
            self.newest.append(query, max(1, self.storage.saliency.window(self.seen)) + drafted, valid)

    def _finish_all(self) -> None:
        """Do what was put off, in all layers and in their order: layers that share a budget wait for each other."""
        layer: CompressedLayer | None = self
        while layer is not None:
            layer._finish()
            layer = None if layer.following is self else layer.following

    def _finish(self) -> None:
        """Evict and store after a chunk of a sequence."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if self.eviction is not None:
            step, count = pending
            if step:
                self.eviction.after_step(self, count)
            else:
                self.eviction.after_prompt(self)
        if self.eviction is None or not self.eviction.waits(self):
            self.settle()
