"""Base of engines that compute a model of transformers without its modules' code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.engines.base import Engine

if TYPE_CHECKING:
    from runtime.engines.torch.engine import TorchEngine


class FusedEngine(Engine):
    """Base class: an engine that has taken over the modules of a torch engine. `parts`: their program, as it reads it."""

    def __init__(self, torch_engine: TorchEngine, parts: Any) -> None:
        self.torch_engine = torch_engine
        self.module = torch_engine.module
        self.device = torch_engine.device
        self.vocab_size = torch_engine.vocab_size
        self.context_length = torch_engine.context_length
        self.weight_bytes = torch_engine.weight_bytes
        self.parts = parts

    @property
    def logits_width(self) -> int:
        """Rows of the head."""
        return self.parts.vocabulary

    def explain(self) -> dict[str, str]:
        return self.torch_engine.explain()
