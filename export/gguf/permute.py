"""The order of q and k rows: llama.cpp rotates neighbours, transformers the two halves of a head."""

from __future__ import annotations

import torch


def rows(count: int, heads: int) -> torch.Tensor:
    """int64 `[count]`: row i of the GGUF tensor is this row of transformers' q_proj or k_proj."""
    return torch.arange(count).view(heads, 2, count // heads // 2).transpose(1, 2).reshape(-1)
