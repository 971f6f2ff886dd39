"""Reasoning Path Compression: what the newest queries look at among all older tokens, all heads of a layer together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.config.settings import OddCount
from runtime.kv_cache.observation import Observation
from runtime.kv_cache.scores.base import Windowed


@dataclass(frozen=True)
class ReasoningPath(Windowed):
    """Attention of a window of selectors over the tokens before it and no others, averaged over all heads of the layer, then pooled
    (Reasoning Path Compression, arXiv 2505.13866).

    The softmax leaves out the window itself, and with `prompt: keep` the prompt, so that a query counts the same however much of
    its attention these get. Heads hold the same tokens only while their budgets are equal; where they are not, a head's own
    average counts.

    Attributes:
        observe: queries of the window, which is always kept.
        kernel: neighbours that are averaged, odd.
    """

    name: ClassVar[str] = "rpc"
    kernel: OddCount = 7

    def __call__(self, seen: Observation) -> torch.Tensor:
        newest, width = self.observed(seen)
        past = (seen.ages >= width)[:, :, None, None]
        score = torch.zeros(seen.keys.shape[:3], device=seen.keys.device)
        for _, logits in newest.logits():
            # 0 where there is nothing before.
            weights = logits.masked_fill(~past, float("-inf")).softmax(-1).nan_to_num(0.0)
            score += weights.sum(3).mean(2) / width
        return seen.finish(self.pooled(seen.over_heads(score)), width)
