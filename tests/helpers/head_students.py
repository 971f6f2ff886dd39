"""Heads in training, by the name of their method."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from compress.distill.draft.features import Features
from compress.distill.draft.heads import HeadStudent
from compress.distill.draft.medusa import MedusaConfig, MedusaStudent
from compress.distill.draft.mtp import MTPConfig, MTPStudent
from compress.distill.draft.write import write_tensors

KINDS = ("medusa", "mtp")


def head_student(
    name: str, features: Features, tokens: int, kept: torch.Tensor | None = None, **fields: Any
) -> HeadStudent:
    """Heads for so many tokens ahead; `fields` of the method's config."""
    if name == "medusa":
        return MedusaStudent(features, MedusaConfig(tokens=tokens, **fields), kept)
    return MTPStudent(features, MTPConfig(tokens=tokens, **fields), kept)


def write_heads(
    directory: Path, student: HeadStudent, content: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16
) -> None:
    """The directory of heads as they are; `content` of draft.json, with "rates"."""
    write_tensors(directory, student.file, student.tensors(), {**content, **student.content}, dtype)
