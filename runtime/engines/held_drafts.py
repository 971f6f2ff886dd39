"""Verification of drafts over a compressed cache: one text at a time, chains only, as many tokens as change nothing of the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from runtime.engines.base import Piece
from runtime.engines.drafts import Step
from runtime.engines.torch_drafts import states_of
from runtime.kv_cache import drafts
from runtime.kv_cache.layer import STEP_TOKENS, CompressedLayer

if TYPE_CHECKING:
    from runtime.engines.held_cache import HeldCache
    from runtime.engines.torch import TorchEngine


def why_not(held: HeldCache) -> str | None:
    """Why drafts cannot be verified over a compressed cache; None: they can."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    reason = drafts.why_not(held.plan)
    if reason is not None:
        return f"the cache is compressed ({held.description}): {reason}"
    for layer in held.new().layers:
        if not isinstance(layer, CompressedLayer) and type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"the model caches with {type(layer).__name__} too, which takes no tokens back"
    return None


class HeldDrafts:
    """See `runtime.engines.drafts.Drafts`, for one text. Made by `TorchEngine.new_drafts`."""

    trees = False
    most_rows = STEP_TOKENS

    def __init__(self, engine: TorchEngine, hidden: bool) -> None:
        self._engine, self._hidden = engine, hidden
        self._cache = engine.new_cache()
        self._given = 0  # tokens of the last pass

    @property
    def nbytes(self) -> int:
        return self._engine.cache_bytes(self._cache)

    def room(self) -> int | None:
        return drafts.room(self._cache)

    @torch.inference_mode()
    def read(self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor) -> Step:
        assert len(ids) == 1, "texts over compressed caches are decoded one by one"
        found = self._pass(ids, positions, True)
        for layer in self._cache.layers:
            # Sliding windows keep what they no longer need until it is known what is taken back. The prompt stays.
            if not isinstance(layer, CompressedLayer) and hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        return found

    @torch.inference_mode()
    def verify(self, pieces: Sequence[Piece]) -> Step:
        (piece,) = pieces
        assert piece.parents is None, "chains only"
        device = self._engine.device
        positions = torch.arange(piece.start, piece.start + len(piece.tokens), device=device)[None]
        self._given = len(piece.tokens)
        return self._pass(torch.tensor([piece.tokens], device=device), positions, False)

    def _pass(self, ids: torch.Tensor, positions: torch.Tensor, last_only: bool) -> Step:
        with states_of(self._engine.module, self._hidden) as states:
            logits = self._engine.forward(ids, self._cache, None, positions, last_only)
        # Tokens that the policy puts before the prompt are nobody's.
        hidden = states[0][0, -ids.shape[1] :].float() if states else None
        return Step(logits[0], hidden)

    @torch.inference_mode()
    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        (path,) = paths
        self._cache.crop(len(path) - self._given)
        self._given = len(path)

    def keep_rows(self, rows: Sequence[int]) -> None:
        assert list(rows) == [0], "there is one text"
