"""Outputs of a model for rows of token ids: hidden states after layers, and logits. For any family that can be streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from compress.distill.train.losses import Targets
from compress.model.module_hooks import block_outputs
from compress.model.streamed import StreamedModel
from runtime.modeling.skeleton import find_stacks


@dataclass
class Outputs:
    """Of rows `[b, s]`.

    Attributes:
        states: `[b, s', hidden]` after each of some layers; s' are the positions that the layer's stack reads.
        logits: `[b, s', vocab]`, or the likeliest of them; None: an encoder's.
        last: an encoder's output `[b, s, hidden]`; None of others.
    """

    states: list[torch.Tensor]
    logits: Targets | None
    last: torch.Tensor | None = None

    @property
    def compared(self) -> list[torch.Tensor]:
        """All hidden states, an encoder's output last."""
        return self.states if self.last is None else [*self.states, self.last]


class Reader:
    """Runs a model, and reads hidden states on the way.

    Args:
        model: whole, in memory.
        streamed: the same or one of its kind, for how rows are given to it; its weights are not needed.
        layers: numbers of the blocks, over all stacks, whose outputs are read.
    """

    def __init__(self, model: Any, streamed: StreamedModel, layers: Sequence[int]) -> None:
        self.model, self.streamed = model, streamed
        blocks = [block for _, stack in find_stacks(model) for block in stack]
        self._blocks = [blocks[layer] for layer in layers]

    def __call__(self, ids: torch.Tensor) -> Outputs:
        """Of ids int64 `[b, s]`, all of them tokens."""
        with block_outputs(self._blocks) as states:
            found = self.streamed.call(self.model, (ids, None))
        if self.streamed.kind == "encoder":
            return Outputs(states, None, found.last_hidden_state)
        return Outputs(states, found.logits)


def said(streamed: StreamedModel, ids: torch.Tensor, trained: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which positions of the logits count, bool `[b, s']`, and the tokens that follow, int64 `[b, s']` (0 where none does)."""
    if streamed.kind == "encoder-decoder":
        labels = streamed.rows.labels(ids)
        return pad(torch.ones_like(labels, dtype=torch.bool), (0, 1)), pad(labels, (0, 1))
    return trained, ids.roll(-1, 1)
