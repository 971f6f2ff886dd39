"""A trained draft as it is stored: in fewer bits than it was trained in, which is what its acceptance has to be measured on."""

from __future__ import annotations

from pathlib import Path

import torch

from compress.distill.checkpoint import trained_weights
from compress.distill.cut import cut_checkpoint
from compress.distill.student import Student


def read_back(student: Student, directory: Path) -> None:
    """Put the draft of a directory (`write_draft`, `compact`), dequantized to float32, in the place of the one that was trained."""
    # The model, not its numbers alone: a quantized head is no longer the embeddings that it was tied to.
    student.draft = cut_checkpoint(directory, None, device=student.draft.device)


@torch.no_grad()
def round_trained(student: Student, dtype: torch.dtype = torch.bfloat16) -> None:
    """Round what was trained as `write_heads` and `write_adapter` store it."""
    for weight in trained_weights(student).values():
        weight.copy_(weight.to(dtype))
