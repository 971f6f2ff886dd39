"""What transformers says, computed once a family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda_models
import pytest
import torch


@pytest.fixture(scope="session")
def truth() -> Callable[..., torch.Tensor]:
    """`truth(name, tokens)`: transformers' own logits after every token."""
    made: dict[str, Any] = {}

    def logits(name: str, tokens: list[int]) -> torch.Tensor:
        if name not in made:
            made[name] = cuda_models.build(name)
        with torch.inference_mode():
            return made[name](torch.tensor([tokens])).logits[0]

    return logits
