"""A model that is trained to give again what another gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from compress.distill.loop import Goal, Sums
from compress.distill.losses import Objective
from compress.distill.recovery.config import RecoverConfig
from compress.distill.recovery.losses import squarehead
from compress.distill.recovery.outputs import Outputs, Reader, said
from compress.distill.rows import Batch
from compress.pipeline.stream import StreamedModel


class Recovering(nn.Module):
    """A model in recovery; see `compress.distill.loop.Learner`.

    Args:
        model: its weights, as they are trained, float32.
        streamed: for how rows are given to it.
        config: weights of the losses.
        layers: blocks whose hidden states are compared with those that the teacher gives.
    """

    phase = "recover"
    goal = Goal("loss", larger=False, relative=True)
    forgiving = True

    def __init__(self, model: Any, streamed: StreamedModel, config: RecoverConfig, layers: Sequence[int]) -> None:
        super().__init__()
        self.model, self.config = model, config
        self.layers = list(layers) if config.squarehead else []
        self._held = (Reader(model, streamed, self.layers), streamed)  # a tuple: neither is a part of this module
        self.objective = Objective(config.divergence, config.temperature)

    def targets(self, teacher: Any, batch: Batch) -> Outputs:
        """Of a teacher of `compress.distill.recovery.teachers`."""
        found: Outputs = teacher.outputs(batch)
        return found

    def forward(self, batch: Batch, targets: Outputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss over a batch times its positions, and their number."""
        losses = self.losses(batch, targets)
        count = batch.trained.sum().to(losses["loss"].dtype)
        return losses["loss"] * count, count

    def losses(self, batch: Batch, targets: Outputs) -> dict[str, torch.Tensor]:
        """Means over the batch: "loss", which is made small, and what it is made of."""
        config = self.config
        reader, streamed = self._held
        ours = reader(batch.ids)
        parts: dict[str, torch.Tensor] = {}
        if config.squarehead:
            parts["squarehead"] = squarehead(
                [*ours.states, *([ours.last] if ours.last is not None else [])],
                [*targets.states, *([targets.last] if targets.last is not None else [])],
            )
        if ours.logits is not None:
            counted, following = said(streamed, batch.ids, batch.trained)
            logits = ours.logits[counted]
            assert isinstance(logits, torch.Tensor)
            if config.kl:
                assert targets.logits is not None
                parts["kl"] = self.objective(logits, targets.logits[counted], following[counted]).mean()
            if config.cross_entropy or not self.training:
                parts["cross_entropy"] = nn.functional.cross_entropy(logits.float(), following[counted])
        weights = {"squarehead": config.squarehead, "kl": config.kl, "cross_entropy": config.cross_entropy}
        total = torch.stack([weights[name] * value for name, value in parts.items()]).sum()
        return {"loss": total, **parts}

    @torch.no_grad()
    def look(self, batch: Batch, judge: Any) -> Sums:
        """ "loss", what it is made of, and "cross_entropy", whose exponential is the perplexity."""
        count = float(batch.trained.sum())
        return {name: (float(value) * count, count) for name, value in self.losses(batch, judge.outputs(batch)).items()}

    def told(self, means: dict[str, float]) -> str:
        """For people."""
        text = f"held-out {means['loss']:.4f}"
        if "cross_entropy" in means:
            text += f", perplexity {torch.tensor(means['cross_entropy']).exp().item():.2f}"
        return text

    def describe(self) -> dict[str, Any]:
        """See `Learner.describe`."""
        return {
            "learner": type(self).__name__, "config": self.config.model_dump(mode="json"), "layers": self.layers,
            "parameters": {name: list(p.shape) for name, p in self.named_parameters() if p.requires_grad},
        }  # fmt: skip
