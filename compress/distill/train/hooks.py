"""Outputs of transformer blocks in one forward pass, read by hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from compress.model.module_hooks import hooks


@contextmanager
def block_outputs(blocks: Sequence[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """The outputs `[b, s, hidden]` of transformer blocks in one forward pass, in their order; the list is filled when the pass ends.

    What a backward pass computes again (gradient checkpointing) is not recorded.
    """
    found: dict[int, torch.Tensor] = {}
    states: list[torch.Tensor] = []
    looking = True

    def keep(place: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if looking:
                found[place] = output[0] if isinstance(output, (tuple, list)) else output

        return hook

    with hooks({block: keep(place) for place, block in enumerate(blocks)}):
        try:
            yield states
            states += [found[place] for place in range(len(blocks))]
        finally:
            looking = False
