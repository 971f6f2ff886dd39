"""Finished submodules of a block: their outputs are computed once for each batch of calibration text, not in every pass over it.

A block whose layers are solved one input after the other reads the text once for each of them. Once all layers of its attention are
solved, what the attention gives no longer changes, and later passes take it from here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from compress.model.input_statistics import Forwards
from compress.model.module_hooks import hooks
from runtime.modeling.experts import Experts


class FinishedModules:
    """Submodules of `block` with modules inside, as far as they are finished, and their outputs.

    A module counts that runs once in a forward pass and gives one tensor, alone or as the first of a tuple of None. Modules with routed
    experts do not: which tokens these read may change.

    Args:
        count: of batches.
        keep: False remembers nothing, where hidden states are too large for the memory.
    """

    def __init__(self, block: nn.Module, count: int, keep: bool = True) -> None:
        routed = {part for module in block.modules() if isinstance(module, Experts) for part in module.modules()}
        self._count = count
        self._modules = {
            name: module
            for name, module in block.named_modules()
            if keep and name and any(True for _ in module.children()) and routed.isdisjoint(module.modules())
        }
        self._lengths: dict[str, int] = {}  # of the tuple that a module gives; 0: a tensor alone
        self._outputs: dict[str, dict[int, torch.Tensor]] = {}  # of finished modules, by batch
        self._rooms: dict[str, torch.Tensor] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A whole forward pass, which shows the modules that count."""
        given: dict[str, list[int | None]] = {name: [] for name in self._modules}

        def note(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
            given[name].append(_length(output))

        with hooks({module: partial(note, name) for name, module in self._modules.items()}):
            yield
        self._lengths = {name: found[0] for name, found in given.items() if len(found) == 1 and found[0] is not None}

    def settle(self, unsolved: Collection[str]) -> None:
        """Modules without any of the layers `unsolved` (names inside the block) do not change any more."""
        found: dict[str, dict[int, torch.Tensor]] = {}
        for name in self._modules:  # a module comes before those inside it
            inside = any(name.startswith(f"{other}.") for other in found)
            if name in self._lengths and not inside and not any(layer.startswith(f"{name}.") for layer in unsolved):
                found[name] = self._outputs.get(name, {})
        self._outputs = found
        self._rooms = {name: room for name, room in self._rooms.items() if name in found}

    def around(self, forwards: Forwards, numbers: Collection[int]) -> Forwards:
        """Runs of batches `numbers`, in that order, which take the outputs that are known, and remember the others."""

        def run(number: int, whole: Callable[[], Any]) -> Any:
            with self.reused(number, remember=True):
                return whole()

        return [(partial(run, number, whole), mask) for number, (whole, mask) in zip(numbers, forwards, strict=True)]

    @contextmanager
    def reused(self, number: int, remember: bool = False) -> Iterator[None]:
        """While active, finished modules give what they gave for batch `number`, where that is known; `remember`: else it is noted."""
        with ExitStack() as stack:
            for name, outputs in self._outputs.items():
                module = self._modules[name]
                if number in outputs:
                    stack.enter_context(_instead(module, partial(self._give, name, number)))
                elif remember:
                    stack.enter_context(hooks({module: partial(self._remember, name, number)}))
            yield

    def drop(self) -> None:
        """Free the memory."""
        self._outputs.clear()
        self._rooms.clear()

    def _remember(self, name: str, number: int, _module: nn.Module, _args: Any, output: Any) -> None:
        """A copy, which what comes after cannot change; those of batches of one shape are one piece of memory, which stays whole."""
        value = output[0] if self._lengths[name] else output
        if name not in self._rooms:
            self._rooms[name] = value.new_empty(self._count, *value.shape)
        room = self._rooms[name][number]
        alike = room.shape == value.shape and room.dtype == value.dtype
        self._outputs[name][number] = room.copy_(value) if alike else value.clone()

    def _give(self, name: str, number: int, *_args: Any, **_kwargs: Any) -> Any:
        value, length = self._outputs[name][number].clone(), self._lengths[name]
        return (value, *(None,) * (length - 1)) if length else value


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
