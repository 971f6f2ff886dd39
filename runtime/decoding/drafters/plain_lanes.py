"""Lanes over an engine of transformers' modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from runtime.decoding.drafters.lanes import Lane


class PlainLanes:
    """Lanes of which each has a cache of its own and is read by itself.

    Args:
        engine: of the draft model; all its layers must keep every token.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.most_rows = 512
        self.vocabulary: int = engine.vocab_size
        self._lanes: dict[int, Lane] = {}

    def open(self) -> Lane:
        lane = Lane(cache=self._engine.new_cache())
        self._lanes[id(lane)] = lane
        return lane

    def feed(self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.cat([self._read(lane, each) for lane, each in zip(lanes, tokens, strict=True)])

    def _read(self, lane: Lane, tokens: Sequence[int]) -> torch.Tensor:
        logits = torch.empty(0)
        self.cut(lane, len(lane.tokens))
        for start in range(0, len(tokens), self.most_rows):
            part = list(tokens[start : start + self.most_rows])
            ids = torch.tensor([part], device=self._engine.device)
            positions = torch.arange(len(lane.tokens), len(lane.tokens) + len(part), device=self._engine.device)[None]
            logits = self._engine.forward(ids, lane.cache, None, positions, True)[:, -1]
            lane.tokens += part
        return logits

    def ahead(
        self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]], more: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        found = []
        for lane, own, extra in zip(lanes, tokens, more, strict=True):
            self._read(lane, own[:-1])
            ids = torch.tensor([[*own[-1:], *extra]], device=self._engine.device)
            start = len(lane.tokens)
            positions = torch.arange(start, start + ids.shape[1], device=self._engine.device)[None]
            found.append(self._engine.forward(ids, lane.cache, None, positions)[0])
            lane.tokens += own[-1:]
            lane.unsure = len(extra)
        return found

    def keep(self, lane: Lane, tokens: Sequence[int]) -> None:
        lane.tokens += tokens
        lane.unsure -= len(tokens)

    def cut(self, lane: Lane, length: int) -> None:
        extra = max(0, len(lane.tokens) - length) + lane.unsure
        if extra:
            lane.cache.crop(-extra)
            lane.unsure = 0
            del lane.tokens[length:]

    def close(self, lane: Lane) -> None:
        lane.cache, lane.tokens = None, []
        self._lanes.pop(id(lane), None)

    @property
    def nbytes(self) -> int:
        return sum(self._engine.cache_bytes(lane.cache) for lane in self._lanes.values())
