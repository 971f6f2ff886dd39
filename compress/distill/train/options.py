"""How a draft is trained: the numbers of a run, checked before anything is computed."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from runtime.errors import RequestError


@dataclass(frozen=True)
class TrainOptions:
    """A run of AdamW with a linear warmup and a cosine decay.

    Attributes:
        steps: at most.
        batch: rows of a step, over all processes together.
        micro_batch: rows of one forward pass; None: all that a process has of a step.
        learning_rate: at its height.
        warmup: share of the steps over which it rises, in [0, 1).
        final_rate: what it falls to, as a share of its height, in [0, 1].
        weight_decay: of matrices; vectors (norms, biases) have none.
        betas: of AdamW.
        clip: largest norm of all gradients together.
        precision: of forward passes. "auto": bfloat16 autocast on GPUs that have it, else float32. Weights and the loss are float32.
        evaluate_every: steps between looks at held-out acceptance.
        patience: looks in a row without a gain of `gain` that end the run; None: it goes on to the last step.
        gain: in acceptance, absolute.
        checkpoint_every: steps between checkpoints, where there is a directory for them.
        seed: of the order of rows and of all that is random.

    Raises:
        RequestError: a value out of range.
    """

    steps: int = 400
    batch: int = 8
    micro_batch: int | None = None
    learning_rate: float = 1e-3
    warmup: float = 0.05
    final_rate: float = 0.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    evaluate_every: int = 50
    patience: int | None = 5
    gain: float = 0.001
    checkpoint_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "micro_batch", "evaluate_every", "checkpoint_every", "patience"):
            value = getattr(self, name)
            optional = name in ("micro_batch", "patience")
            if not (optional and value is None) and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                raise RequestError(
                    f"{name} of training must be an integer of at least 1{' or None' if optional else ''}, not {value!r}"
                )
        for name, low, high in (
            ("learning_rate", 0.0, math.inf), ("warmup", 0.0, 1.0), ("final_rate", 0.0, 1.0),
            ("weight_decay", 0.0, math.inf), ("clip", 0.0, math.inf), ("gain", 0.0, math.inf),
        ):  # fmt: skip
            value = getattr(self, name)
            above = name in ("learning_rate", "clip")
            if not (low <= value <= high) or (above and value == 0) or math.isinf(value):
                raise RequestError(
                    f"{name} of training must be {'above' if above else 'at least'} 0{f' and at most {high:g}' if high == 1 else ''}, "
                    f"not {value!r}"
                )
        if self.precision not in ("auto", "float32", "bfloat16"):
            raise RequestError(f"precision of training must be auto, float32 or bfloat16, not {self.precision!r}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise RequestError(f"betas of training must be at least 0 and below 1, not {self.betas!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise RequestError(f"seed of training must be an integer of at least 0, not {self.seed!r}")

    def rate(self, step: int) -> float:
        """The learning rate of step 0, 1, ... as a share of its height."""
        rising = round(self.steps * self.warmup)
        if step < rising:
            return (step + 1) / (rising + 1)
        done = (step - rising) / max(1, self.steps - rising)
        return self.final_rate + (1 - self.final_rate) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def describe(self) -> dict[str, Any]:
        """All that decides the result: runs may go on from each other where it is equal."""
        return {**asdict(self), "betas": list(self.betas), "checkpoint_every": None}
