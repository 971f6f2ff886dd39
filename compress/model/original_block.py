"""A block of the original model beside the one that is compressed, so that layers can make up for the errors of those before them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn

from compress.model.hidden_states import HiddenStates
from compress.model.input_statistics import Original, forwards
from compress.model.module_hooks import hooks
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
        self.residual_layers: dict[str, str] = {}  # see `find_residual_layers`

    @property
    def runs(self) -> Original:
        """The block and one run a batch."""
        states, first = self._states, self._first
        every = forwards(self._streamed, self._index, states, self._batches, self._numbers, self.block, first)
        return Original(self.block, self.outputs.around(every, self._numbers), self.residual_layers)

    @torch.inference_mode()
    def advance(self) -> None:
        """Put the states that enter the next block in the place of those that enter this one."""
        for number in self._numbers:
            place, batch = self._first + number, self._batches[number]
            with self.outputs.reused(number):
                state = self._streamed.run_block(self._index, self._states.get(place), batch, block=self.block)
            self._states.put(place, self._streamed.hand_over(self._index, state, batch))


def find_residual_layers(block: nn.Module, run: Callable[[], Any], names: Iterable[str]) -> dict[str, str]:
    """The layers of `names` whose output is added to the residual stream as it is, each with the name of a module that reads the stream
    before ("": the block itself). `run` runs the block once.

    They are observed: what a layer gives, and what a module read before it, add up to what a module reads later, or the block gives.
    """
    wanted, read, given = set(names), list[tuple[str, torch.Tensor]](), dict[str, tuple[int, torch.Tensor]]()

    def on_input(name: str, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
            read.append((name, args[0].clone()))  # a model may add in place

    def on_output(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        if name in wanted and isinstance(output, torch.Tensor):
            given[name] = (len(read), output.clone())

    modules = dict(block.named_modules())
    inputs = {module: partial(on_input, name) for name, module in modules.items()}
    outputs = {module: partial(on_output, name) for name, module in modules.items()}
    with hooks(inputs, before=True), hooks(outputs), torch.no_grad():
        last = run()
    read.append(("", last[0] if isinstance(last, (tuple, list)) else last))
    found = {}
    for name, (place, output) in given.items():
        later = [each for _, each in read[place:] if each.shape == output.shape]
        before = [(reader, each) for reader, each in read[:place] if each.shape == output.shape and reader != name]
        for reader, stream in before:
            added = stream + output
            if any(torch.equal(added, each) for each in later):
                found[name] = reader
                break
    return found
