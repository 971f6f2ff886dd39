"""Stand-in for gpt-fast's `model.py`, version with flex attention: one table and one head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass
class ModelArgs:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    dim: int
    intermediate_size: int
    n_local_heads: int


class Transformer(nn.Module):
    def __init__(self, config: ModelArgs) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.max_batch_size = self.max_seq_length = -1

    def setup_caches(self, max_batch_size: int, max_seq_length: int) -> None:
        self.max_batch_size, self.max_seq_length = max_batch_size, max_seq_length

    def forward(self, mask: Any, idx: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        assert mask.seq_lengths == (1, self.max_seq_length)
        assert idx.shape == (self.max_batch_size, 1)
        assert int(input_pos.max()) < self.max_seq_length
        return self.output(self.tok_embeddings(idx))
