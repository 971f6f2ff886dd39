"""A block of the original model beside the one that is compressed, so that layers can make up for the errors of those before them."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy

import torch
from torch import nn

from compress.model.hidden_states import HiddenStates
from compress.model.input_statistics import Original, forwards
from compress.model.module_outputs import ModuleOutputs
from compress.model.streamed import Batch, StreamedModel


class OriginalBlock:
    """A copy of a block before anything in it is compressed, over the hidden states of the original model.

    Args:
        block: number `index` of `streamed`, loaded; it is copied.
        states: the original's of batch n are number `first + n`.
        numbers: of the batches that this process reads.
        keep: outputs of submodules are remembered between passes.
    """

    def __init__(
        self, streamed: StreamedModel, index: int, block: nn.Module, states: HiddenStates, batches: list[Batch],
        numbers: Collection[int], first: int, keep: bool,
    ) -> None:  # fmt: skip
        self._streamed, self._index, self._states, self._batches = streamed, index, states, batches
        self._numbers, self._first = list(numbers), first
        self.block = deepcopy(block)
        self.outputs = ModuleOutputs(self.block, len(batches), keep)

    @property
    def runs(self) -> Original:
        """The block and one run a batch."""
        states, first = self._states, self._first
        every = forwards(self._streamed, self._index, states, self._batches, self._numbers, self.block, first)
        return Original(self.block, self.outputs.around(every, self._numbers))

    @torch.inference_mode()
    def advance(self) -> None:
        """Put the states that enter the next block in the place of those that enter this one."""
        for number in self._numbers:
            place, batch = self._first + number, self._batches[number]
            with self.outputs.reused(number):
                state = self._streamed.run_block(self._index, self._states.get(place), batch, block=self.block)
            self._states.put(place, self._streamed.hand_over(self._index, state, batch))
