"""Recorder of the residual stream: what every layer of a step leaves in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.engines.base import Chunk
from runtime.kernels.cpu.decoder import PAGE


class Recorder:
    """What every layer of one step leaves in the residual stream; `Pool.recorder` of the step's pool."""

    def __init__(self) -> None:
        self._states: dict[tuple[int, int], torch.Tensor] = {}

    def fill(self, chunks: Sequence[Chunk], states: torch.Tensor) -> None:
        """The step is done: float32 `[layers, tokens of all chunks, hidden]`."""
        for chunk, mine in zip(chunks, states.split([len(chunk.tokens) for chunk in chunks], 1), strict=True):
            self._states[_place(chunk.pages, chunk.slot)] = mine

    def of(self, pages: Sequence[int], start: int) -> torch.Tensor | None:
        """`[layers, tokens, hidden]` of the chunk of these pages that began at `start`; None: there was none."""
        return self._states.get(_place(pages, start))


def _place(pages: Sequence[int], start: int) -> tuple[int, int]:
    return start, pages[start // PAGE]  # what is written to belongs to one sequence
