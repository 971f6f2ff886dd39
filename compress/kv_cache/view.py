"""View of a model that calibrations of cache methods are given."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compress.core.progress import Progress
from compress.kv_cache.attention import AttentionCall, watching
from compress.kv_cache.statistics import Observer, activations_shown, hidden_states
from runtime.kv_cache.attend import record_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 2048  # of one forward
#: {name of what is calibrated: (what was found, plain JSON; facts for the report)}
Found = dict[str, tuple[Any, dict[str, Any]]]


@dataclass(frozen=True)
class CalibrationView:
    """What a calibration may look at.

    Attributes:
        model: the artifact's, in eval mode, its compressed weights packed; float32 on a CPU, bfloat16 on a GPU.
        tokenizer: of the model, or None.
        rows: calibration data, int64 `[n, length]`, without padding.
        method: that asks, with its settings, not calibrated yet; None: a policy's own needs, or no policy asks.
        options: of the calibrations of this package (`CalibrationOptions`).
        progress: who is told.
        seed: of everything random.
    """

    model: PreTrainedModel
    tokenizer: Any
    rows: torch.Tensor
    method: Any = None
    options: Any = None
    progress: Progress | None = None
    seed: int = 0

    @torch.no_grad()
    def observe(self, *observers: Observer) -> None:
        """Run all rows through the model, a few at a time, and show each observer what it asks to see, where the model is."""
        device = next(self.model.parameters()).device
        batches = self.rows.split(max(1, TOKENS // self.rows.shape[1]))
        if self.progress is not None:
            self.progress.phase("cache statistics", len(batches))

        def watcher(call: AttentionCall) -> torch.Tensor:
            for observer in observers:
                observer.attention(call)
            return call.full()

        with ExitStack() as stack:
            for handle in record_inputs(self.model):
                stack.enter_context(handle)
            stack.enter_context(activations_shown(self.model, observers))
            stack.enter_context(watching(self.model, watcher))
            for number, rows in enumerate(batches, 1):
                ids = rows.to(device)
                hidden_states(self.model, ids)
                for observer in observers:
                    observer.batch_done(ids)
                if self.progress is not None:
                    self.progress.step(f"batch {number}")
