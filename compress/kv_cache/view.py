"""View of a model that calibrations of cache methods are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compress.core.progress import Progress
from compress.kv_cache.statistics import Observer, observe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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

    def observe(self, *observers: Observer) -> None:
        """Run all rows through the model, a few at a time, and show each observer what it asks to see."""
        observe(self.model, self.rows, observers, self.progress)
