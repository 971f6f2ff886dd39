"""A draft model for a random target."""

from __future__ import annotations

from typing import Any

import torch
from llama_engines import model_of


def draft_model(noise: float = 0.01, **changes: Any) -> Any:
    """The tiny target itself, its weights a little off: right often, not always."""
    found = model_of("grouped", **changes)
    generator = torch.Generator().manual_seed(1)
    for parameter in found.parameters():
        if parameter.dim() == 2:
            parameter.data += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return found
