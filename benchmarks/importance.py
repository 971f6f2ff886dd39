"""The importance matrix that llama.cpp's quantizers take."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch


def mean_squares(model: torch.nn.Module, batches: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """{weight of a linear layer: mean square of every input, float32 `[in]`} over batches of tokens; the head is left out."""
    totals: dict[str, torch.Tensor] = {}
    tokens = 0

    def add(parameter: str, _module: Any, inputs: Any) -> None:
        square = inputs[0].double().square().flatten(0, -2).sum(0)
        totals[parameter] = totals.get(parameter, torch.zeros_like(square)) + square

    handles = [
        module.register_forward_pre_hook(partial(add, f"{name}.weight"))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    for rows in batches:
        model(rows)
        tokens += rows.numel()
    for handle in handles:
        handle.remove()
    return {parameter: (total / tokens).float() for parameter, total in totals.items()}
