"""Outputs of submodules of a block whose layers are solved: computed once for each batch of calibration text, not in every pass.

A block whose layers are solved one input after the other reads the text once for each of them. Once all layers of its attention are
solved, what the attention gives no longer changes, and later passes take it from here. The first of them only needs the last layer
of the attention, whose inputs the pass before has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from compress.model.input_statistics import Forwards
from compress.model.module_hooks import hooks
from runtime.modeling.experts import Experts
from runtime.modeling.linear_modules import is_matrix


@dataclass
class _Module:
    """A submodule.

    Attributes:
        length: of the tuple that it gives; 0: a tensor alone.
        tail: name (inside the block) of the layer whose output that is, unless its inputs are larger; None: of none.
        outputs, inputs: what is known, by batch (-1: the memory that they share); inputs are the tail's.
    """

    length: int
    tail: str | None
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)


class ModuleOutputs:
    """Submodules of `block` with modules inside, as far as they are finished, and their outputs.

    A module counts that runs once in a forward pass and gives one tensor, alone or as the first of a tuple of None. Modules with routed
    experts do not: which tokens these read may change.

    Args:
        count: of batches.
        keep: False remembers nothing, where hidden states are too large for the memory.
    """

    def __init__(self, block: nn.Module, count: int, keep: bool = True) -> None:
        routed = {part for module in block.modules() if isinstance(module, Experts) for part in module.modules()}
        self._block, self._count = block, count
        self._names = [
            name
            for name, module in block.named_modules()
            if keep and name and any(True for _ in module.children()) and routed.isdisjoint(module.modules())
        ]
        self._modules: dict[str, _Module] = {}
        self._finished: list[str] = []
        self._last: list[str] = []  # modules of which only the tail is unsolved
        self._stops = True

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A whole forward pass, which shows the modules that count."""
        given: dict[str, list[Any]] = {name: [] for name in self._names}
        layers: dict[str, list[tuple[Any, Any]]] = {}

        def note_output(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
            given[name].append(output)

        def note_layer(name: str, _module: nn.Module, args: Any, output: Any) -> None:
            layers.setdefault(name, []).append((args, output))

        found = {name: module for name, module in self._block.named_modules() if is_matrix(module)}
        with (
            hooks({module: partial(note_layer, name) for name, module in found.items()}),
            hooks({self._block.get_submodule(name): partial(note_output, name) for name in self._names}),
        ):
            yield
        for name, outputs in given.items():
            if len(outputs) != 1 or (length := _length(outputs[0])) is None:
                continue
            value = outputs[0][0] if length else outputs[0]
            tails = (
                layer
                for layer, calls in layers.items()
                for args, given_by in calls
                if given_by is value and len(calls) == len(args) == 1 and args[0].numel() <= value.numel()
            )
            self._modules[name] = _Module(length, next(tails, None))

    def watch_as(self, other: ModuleOutputs) -> None:
        """The modules that count are those of `other`, whose block this one's is a copy of."""
        self._modules = {name: _Module(module.length, module.tail) for name, module in other._modules.items()}

    def settle(self, unsolved: Collection[str], stops: bool = True) -> None:
        """Modules without any of the layers `unsolved` (names inside the block) do not change any more.

        Args:
            stops: the next passes end at the first of these layers, so that all they compute is final. Else nothing is remembered: what
                comes after the layer may change with it.
        """
        self._finished, self._last, self._stops = [], [], stops
        for name, module in self._modules.items():  # a module comes before those inside it
            left = {layer for layer in unsolved if layer.startswith(f"{name}.")}
            inside = any(name.startswith(f"{other}.") for other in self._finished)
            if not left and not inside:
                self._finished.append(name)
                continue
            module.outputs.clear()
            if left == {module.tail}:
                self._last.append(name)
            else:
                module.inputs.clear()

    def around(self, forwards: Forwards, numbers: Collection[int]) -> Forwards:
        """Runs of batches `numbers`, in that order, which take the outputs that are known, and remember the others."""

        def run(number: int, whole: Callable[[], Any]) -> Any:
            with self.reused(number, remember=self._stops):
                return whole()

        return [(partial(run, number, whole), mask) for number, (whole, mask) in zip(numbers, forwards, strict=True)]

    @contextmanager
    def reused(self, number: int, remember: bool = False) -> Iterator[None]:
        """While active, finished modules give what they gave for batch `number`, where that is known; `remember`: else it is noted."""
        with ExitStack() as stack:
            for name in self._finished:
                own, module = self._modules[name], self._block.get_submodule(name)
                if number in own.outputs or number in own.inputs:
                    stack.enter_context(_instead(module, partial(self._give, own, number, remember)))
                elif remember:
                    stack.enter_context(hooks({module: partial(self._note_output, own, number)}))
            for name in self._last if remember else []:
                own = self._modules[name]
                layer = self._block.get_submodule(str(own.tail))
                # First of all hooks: one that collects statistics may end the pass.
                stack.enter_context(
                    layer.register_forward_pre_hook(partial(self._note_input, own, number), prepend=True)
                )
            yield

    def drop(self) -> None:
        """Free the memory."""
        self._modules.clear()
        self._finished, self._last = [], []

    def _note_input(self, own: _Module, number: int, _module: nn.Module, args: Any) -> None:
        self._remember(own.inputs, number, args[0])

    def _note_output(self, own: _Module, number: int, _module: nn.Module, _args: Any, output: Any) -> None:
        self._remember(own.outputs, number, output[0] if own.length else output)

    def _remember(self, known: dict[int, torch.Tensor], number: int, value: torch.Tensor) -> None:
        """A copy, which what comes after cannot change; those of batches of one shape are one piece of memory, which stays whole."""
        if -1 not in known:
            known[-1] = value.new_empty(self._count, *value.shape)
        room = known[-1][number]
        alike = room.shape == value.shape and room.dtype == value.dtype
        known[number] = room.copy_(value) if alike else value.clone()

    def _give(self, own: _Module, number: int, remember: bool, *_args: Any, **_kwargs: Any) -> Any:
        if number in own.outputs:
            value = own.outputs[number].clone()
        else:
            entered = own.inputs[number]
            value = self._block.get_submodule(str(own.tail))(entered)
            if remember:
                if not own.outputs and entered.shape == value.shape:  # they take the place of the inputs
                    own.outputs[-1] = own.inputs[-1]
                self._remember(own.outputs, number, value)
                del own.inputs[number]
        return (value, *(None,) * (own.length - 1)) if own.length else value


@contextmanager
def _instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """`module` computes `forward`."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _length(output: Any) -> int | None:
    """0 for a tensor, the length of a tuple of a tensor and Nones, None for all else."""
    if isinstance(output, torch.Tensor):
        return 0
    if type(output) is not tuple or not output or not isinstance(output[0], torch.Tensor):
        return None
    return len(output) if all(part is None for part in output[1:]) else None
