"""Base of engines that compute a model of transformers without its modules' code."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from runtime.engines.base import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from runtime.engines.torch.engine import TorchEngine


@dataclass(frozen=True)
class UnbuiltEngine:
    """What is known of a torch engine before it is built; `build` does it, on the same weights. Other attributes as a torch engine's."""

    device: torch.device
    vocab_size: int
    context_length: int | None
    weight_bytes: int
    build: Callable[[], TorchEngine]


class FusedEngine(Engine):
    """Base class: an engine that has taken over the modules of a torch engine. `parts`: their program, as it reads it."""

    def __init__(self, torch_engine: TorchEngine | UnbuiltEngine, parts: Any) -> None:
        self._torch_engine = torch_engine
        self._building = threading.Lock()
        self.device = torch_engine.device
        self.vocab_size = torch_engine.vocab_size
        self.context_length = torch_engine.context_length
        self.weight_bytes = torch_engine.weight_bytes
        self.parts = parts

    @property
    def torch_engine(self) -> TorchEngine:
        """The engine of the modules, built now if its program is all that was needed so far."""
        with self._building:
            if isinstance(self._torch_engine, UnbuiltEngine):
                self._torch_engine = self._torch_engine.build()
            return self._torch_engine

    @property
    def module(self) -> PreTrainedModel:
        """The modules."""
        return self.torch_engine.module

    @property
    def logits_width(self) -> int:
        """Rows of the head."""
        return self.parts.vocabulary

    def explain(self) -> dict[str, str]:
        return self.torch_engine.explain()
