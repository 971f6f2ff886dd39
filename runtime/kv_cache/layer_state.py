"""State of one layer's compressed cache, as attention, eviction and selections see it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from runtime.kv_cache.observation import Inputs, Observation
from runtime.kv_cache.offload import Offload
from runtime.kv_cache.storage.plan import StoragePlan
from runtime.kv_cache.store import Store


class LayerState(Protocol):
    """What `runtime.kv_cache.layer.CompressedLayer` is to them; its attributes are described there."""

    index: int
    seen: int
    shape: tuple[int, int]
    changes: int
    taken_back: int
    storage: StoragePlan
    store: Store | None
    elsewhere: Offload | None
    selection: Any
    share: torch.Tensor | None
    arrived: torch.Tensor
    reads_all: bool
    following: Any
    inputs: Inputs | None

    @property
    def is_final(self) -> bool:
        """Whether there are tokens before this chunk of a sequence that cannot be told apart any more."""

    @property
    def wants_inputs(self) -> bool:
        """Whether the eviction's score sees the inputs of the attention module."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        valid: torch.Tensor | None,
        scale: float,
        softcap: float,
    ) -> torch.Tensor:
        """Attention of new tokens over what is held and each other."""

    def observe(self, window: int, scale: float, softcap: float) -> Observation:
        """What the newest `window` queries see of what is held."""

    def given(self) -> torch.Tensor:
        """Which tokens came in prompts."""

    def remember_mass(self, mass: torch.Tensor) -> None:
        """What has been gathered of every token."""

    def keep(self, score: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Keep the best tokens of each head."""

    def forget_queries(self, window: int) -> None:
        """Drop all remembered queries but the newest `window`."""

    def settle(self, scale: float, softcap: float) -> None:
        """Store older tokens as the plan says."""
