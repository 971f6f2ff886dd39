"""Sensitivity of a loss to each unit: squared derivatives by a factor on it, mean over sequences. The whole model is in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from compress.core.file_matrix import panels
from compress.core.progress import Reporter
from compress.model.module_hooks import hooks
from compress.model.streamed import Batch, StreamedModel
from runtime.checkpoint.artifact import Artifact
from runtime.engines.blueprint import Blueprint
from runtime.errors import CompressError

ROWS = 2  # of one forward and backward pass


def sensitivities(
    streamed: StreamedModel, readers: Mapping[str, int], batches: Sequence[Batch], reporter: Reporter
) -> dict[str, torch.Tensor]:
    """Of language models the loss is that of the text itself, of encoders half the squared change of the hidden states that they give,
    by random projections.

    Args:
        readers: {name of a linear layer: units that its inputs are}.

    Returns:
        {name: float32 `[units]`}.
    """
    blueprint = Blueprint(Artifact(streamed.checkpoint.path), streamed.device, "reference", None, False)
    model = blueprint.build_module().float()
    model.requires_grad_(False)
    factors: dict[str, torch.Tensor] = {}
    rows = 0

    def scaled(name: str, units: int) -> Callable[..., Any]:
        def hook(_module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            value = args[0]
            factor = torch.ones(rows, 1, units, device=value.device, requires_grad=True)
            factors[name] = factor
            wide = factor.repeat_interleave(value.shape[-1] // units, dim=2)
            by_row = value.reshape(rows, -1, value.shape[-1])  # OPT lays all tokens end to end
            return ((by_row * wide.to(value.dtype)).view_as(value), *args[1:])

        return hook

    total = {name: torch.zeros(units) for name, units in readers.items()}
    generator = torch.Generator().manual_seed(0)
    count = 0
    with hooks({model.get_submodule(name): scaled(name, units) for name, units in readers.items()}, before=True):
        for ids, mask in batches:
            for part in panels(len(ids), ROWS):
                batch = ids[part], mask[part] if mask is not None else None
                rows = len(batch[0])
                with torch.enable_grad():
                    loss = _loss(streamed, model, batch, generator)
                    found = torch.autograd.grad(loss, list(factors.values()), allow_unused=True)
                for name, gradient in zip(factors, found, strict=True):
                    if gradient is not None:
                        total[name] += gradient.detach().float().square().sum((0, 1)).cpu()
                factors.clear()
                count += rows
            reporter.detail(f"gradients of {count} rows")
    for name, value in total.items():
        if not bool(torch.isfinite(value).all()):
            raise CompressError(f"{name}: the derivatives by its inputs hold NaN or Inf")
    return {name: value / max(count, 1) for name, value in total.items()}


def _loss(streamed: StreamedModel, model: Any, batch: Batch, generator: torch.Generator) -> torch.Tensor:
    """A sum over rows, so that the derivatives of each row stay apart."""
    ids, mask = batch
    output = streamed.call(model, batch)
    if streamed.kind == "encoder":
        states = output.last_hidden_state.float()
        noise = torch.randn(states.shape, generator=generator).to(states.device)
        if mask is not None:
            noise = noise * mask.to(states.device)[..., None]
        return (states * noise).sum()
    logits = output.logits[:, :-1].float()
    labels = streamed.rows.labels(ids).to(logits.device)
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    if mask is not None:
        losses = losses * mask[:, 1:].to(losses.device)
    return losses.sum()
