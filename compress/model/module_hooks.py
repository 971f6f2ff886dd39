"""Forward hooks on modules of a model, and its evaluation mode, for the length of a `with` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


@contextmanager
def hooks(
    found: Mapping[nn.Module, Callable[..., Any]], before: bool = False, keywords: bool = False
) -> Iterator[None]:
    """Register {module: hook} on outputs, or (`before`) on inputs; `keywords`: hooks are given keyword arguments too."""
    with ExitStack() as stack:
        for module, hook in found.items():
            register = module.register_forward_pre_hook if before else module.register_forward_hook
            stack.enter_context(register(hook, with_kwargs=keywords))
        yield


@contextmanager
def block_outputs(blocks: Sequence[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """The outputs `[b, s, hidden]` of transformer blocks in one forward pass, in their order; the list is filled when the pass ends.

    What a backward pass computes again (gradient checkpointing) is not recorded.
    """
    found: dict[int, torch.Tensor] = {}
    states: list[torch.Tensor] = []
    looking = True

    def keep(place: int, _module: nn.Module, _args: Any, output: Any) -> None:
        if looking:
            found[place] = output[0] if isinstance(output, (tuple, list)) else output

    with hooks({block: partial(keep, place) for place, block in enumerate(blocks)}):
        try:
            yield states
            states += [found[place] for place in range(len(blocks))]
        finally:
            looking = False


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout), and afterwards the mode from before."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
