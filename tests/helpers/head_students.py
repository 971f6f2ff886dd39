"""Heads in training, by the name of their method."""

from __future__ import annotations

from typing import Any

import torch

from compress.distill.draft.features import Features
from compress.distill.draft.heads import HeadStudent
from compress.distill.draft.medusa import MedusaConfig, MedusaStudent
from compress.distill.draft.mtp import MTPConfig, MTPStudent

KINDS = ("medusa", "mtp")


def head_student(
    name: str, features: Features, tokens: int, kept: torch.Tensor | None = None, **fields: Any
) -> HeadStudent:
    """Heads for so many tokens ahead; `fields` of the method's config."""
    if name == "medusa":
        return MedusaStudent(features, MedusaConfig(tokens=tokens, **fields), kept)
    return MTPStudent(features, MTPConfig(tokens=tokens, **fields), kept)
