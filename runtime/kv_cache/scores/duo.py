"""DuoAttention: retrieval heads keep everything, streaming heads keep sinks and recent tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.config.settings import Fraction, Natural, calibrated, nested
from runtime.kv_cache.observation import Observation
from runtime.kv_cache.scores.base import NEVER, Score


@dataclass(frozen=True)
class Duo(Score):
    """Gates learned on synthetic data say what a head is (DuoAttention, arXiv 2410.10819).

    A streaming head keeps a constant number of tokens whatever the budget; the others share the budget by another score.
    Within one chunk of a prompt all heads look at all of it: streaming heads are cut when the chunk has been read, so their
    attention costs there what that of the others does, while the paper's computes a window only and saves that memory too.

    Attributes:
        gates: `[layers][kv_heads]` in [0, 1], 1: a retrieval head.
        streaming: share of the heads that stream, those with the lowest gates.
        sinks: first tokens that a streaming head keeps.
        recent: newest tokens that it keeps.
        inner: score of the retrieval heads' tokens; None: they keep them all (with a ratio of 1), or the sinks and the newest.
    """

    name: ClassVar[str] = "duo"
    gates: tuple[tuple[Fraction, ...], ...] = calibrated(((0.0,),), per_head=True)
    streaming: Fraction = 0.5
    sinks: Natural = 16
    recent: Natural = 64
    inner: Score | None = nested(None)

    def streams(self) -> list[list[bool]]:
        """Which heads stream: the lowest gates over all layers, as many as `streaming` says."""
        flat = sorted((gate, layer, head) for layer, row in enumerate(self.gates) for head, gate in enumerate(row))
        chosen = {(layer, head) for _, layer, head in flat[: round(self.streaming * len(flat))]}
        return [[(layer, head) in chosen for head in range(len(row))] for layer, row in enumerate(self.gates)]

    def window(self, count: int) -> int:
        return 1 if self.inner is None else self.inner.window(count)

    def kept(self) -> int:
        # Both ends of a streaming head; the sinks are its oldest tokens and would go first.
        ends = self.sinks + self.recent
        return ends if self.inner is None else max(ends, self.inner.kept())

    def average(self, tokens: int) -> int:
        # Streaming heads keep a constant number of tokens; the others share the budget.
        return round(tokens - self.streaming * max(0, tokens - self.sinks - self.recent))

    def __call__(self, seen: Observation) -> torch.Tensor:
        oldest_first = torch.arange(seen.keys.shape[2], device=seen.keys.device)
        first = oldest_first < max(self.sinks, seen.pinned)
        if self.inner is None:
            score = seen.finish(-seen.ages.float(), 1)
            score = score.masked_fill(first & seen.held, float("inf"))
        else:
            score = self.inner(seen)
        streams = torch.tensor(self.streams()[seen.layer], device=score.device)
        stays = (seen.ages < self.recent) | first
        streaming = torch.full_like(score, NEVER).masked_fill(stays, float("inf"))
        return torch.where(streams[:, None], streaming, score).masked_fill(~seen.held, float("-inf"))
