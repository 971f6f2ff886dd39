"""Stacks of blocks, and recorders that stand in for blocks to see how they are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Stack:
    """Blocks that run one after the other.

    Attributes:
        name: qualified name of their list.
        blocks: the list.
        first: number of the first one among the blocks of all stacks.
    """

    name: str
    blocks: nn.ModuleList
    first: int


@dataclass
class Handover:
    """What the blocks of a stack return: `extras` follow the hidden states in a tuple (or list); None: the hidden states alone, no tuple.

    T5 computes the bias of relative positions in the first block, and each block hands it on to the next.
    """

    extras: tuple[Any, ...] | None

    @classmethod
    def of(cls, output: Any) -> Handover:
        """What a block has returned: a tuple, a list (OpenAI's first GPT), or the hidden states. Only that is sure: annotations of
        `forward` say tuple where there is none (Gemma 3)."""
        return cls(tuple(output[1:]) if isinstance(output, (tuple, list)) else None)

    @property
    def depends_on_batch(self) -> bool:
        """Whether something is handed over that another batch would have otherwise."""
        return any(value is not None for value in self.extras or ())


class Recorder(nn.Module):
    """Stands in for a block: tells `sink` how it was called, and hands on its hidden states (or `instead`) unchanged.

    Args:
        handover: what it returns beside them; shared by the recorders of a stack.
        run: run the block too, to learn what it hands over.
    """

    def __init__(
        self,
        block: nn.Module,
        sink: Callable[[torch.Tensor, dict[str, Any]], None],
        handover: Handover,
        instead: torch.Tensor | None = None,
        run: bool = False,
    ) -> None:
        super().__init__()
        self.__dict__["_instead"] = instead
        self.__dict__["_block"] = block  # not registered: the recorder must have no parameters of its own
        self.__dict__["_sink"] = sink
        self.__dict__["_handover"] = handover
        self.__dict__["_run"] = run

    def __getattr__(self, name: str) -> Any:
        # Decoders read facts off their blocks while looping (Gemma: `layer.attention_type`).
        return getattr(self.__dict__["_block"], name)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        names = list(inspect.signature(self._block.forward).parameters)
        if self._run:
            # A copy: a block may write into what it is given.
            self._handover.extras = Handover.of(self._block(hidden_states.clone(), *args, **kwargs)).extras
        self._sink(hidden_states, {**dict(zip(names[1:], args, strict=False)), **kwargs})
        value = hidden_states if self._instead is None else self._instead
        return value if self._handover.extras is None else (value, *self._handover.extras)
