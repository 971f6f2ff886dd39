"""Losses of recovery, and the model that learns by them: distance from a teacher's hidden states, and from what it says next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from compress.distill.recover.config import RecoverConfig
from compress.distill.recover.outputs import Outputs, Reader, said
from compress.distill.train.data import Batch
from compress.distill.train.loop import Goal, Sums
from compress.distill.train.losses import Objective
from compress.model.streamed import StreamedModel


def squarehead(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mean over layers and rows of `|f_t - f_s|^2 / |f_t|^2`, both summed over a row's positions.

    Normalized by layer, as the states of late layers are many times as large as those of early ones; and by row, so that it does not
    matter which rows are computed together, or by whom.

    Args:
        ours, theirs: hidden states of layers, `[b, s, hidden]` each.

    Source: Kurtic et al., Sparse Finetuning for Inference Acceleration of Large Language Models, arXiv 2310.06927 (SquareHead, whose
    sums are over a batch).
    """
    parts = []
    for own, other in zip(ours, theirs, strict=True):
        target = other.detach().float()
        error, size = ((value.square()).sum((1, 2)) for value in (own.float() - target, target))
        parts.append((error / size.clamp_min(torch.finfo(torch.float32).tiny)).mean())
    return torch.stack(parts).mean()


class Recovering(nn.Module):
    """A model in recovery; see `compress.distill.train.loop.Learner`.

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

    def forward(self, batch: Batch, targets: Outputs | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss over a batch times its positions, and their number."""
        losses = self.losses(batch, targets)
        count = batch.trained.sum().to(losses["loss"].dtype)
        return losses["loss"] * count, count

    def losses(self, batch: Batch, targets: Outputs | None) -> dict[str, torch.Tensor]:
        """Means over the batch: "loss", which is made small, and what it is made of."""
        config = self.config
        reader, streamed = self._held
        ours = reader(batch.ids)
        parts: dict[str, torch.Tensor] = {}
        if config.squarehead:
            assert targets is not None
            parts["squarehead"] = squarehead(ours.compared, targets.compared)
        if ours.logits is not None:
            counted, following = said(streamed, batch.ids, batch.trained)
            logits = ours.logits[counted]
            assert isinstance(logits, torch.Tensor)
            if config.kl:
                assert targets is not None
                assert targets.logits is not None
                parts["kl"] = self.objective(logits, targets.logits[counted], following[counted]).mean()
            if config.cross_entropy or not self.training:
                parts["cross_entropy"] = nn.functional.cross_entropy(logits.float(), following[counted])
        weights = {"squarehead": config.squarehead, "kl": config.kl, "cross_entropy": config.cross_entropy}
        total = torch.stack([weights[name] * value for name, value in parts.items()]).sum()
        return {"loss": total, **parts}

    @torch.no_grad()
    def measure(self, batch: Batch, targets: Outputs | None) -> Sums:
        """ "loss", what it is made of, and "cross_entropy", whose exponential is the perplexity."""
        count = float(batch.trained.sum())
        return {name: (float(value) * count, count) for name, value in self.losses(batch, targets).items()}

    def describe_means(self, means: dict[str, float]) -> str:
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
