"""Names of what a draft in the making leaves on the disk: each part is named after all that decides it.

So a run that is continued finds what it needs and nothing else, also after the recipe's draft section was corrected: what the teacher
wrote is used again where it still is what is asked for, and a training with other settings begins anew.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from compress.distill.config import DraftConfig
from compress.distill.rows import digest_of

#: Fields of a draft section that matter only when training is over.
_AFTERWARDS = {"quantize", "accept_head"}


def part(work: Path, name: str, decided_by: Sequence[Any], suffix: str = "") -> Path:
    """The place of a part; the directory that it lies in is there.

    Args:
        work: for all parts.
        decided_by: tensors, and plain data.
    """
    plain = [digest_of(value) if isinstance(value, torch.Tensor) else value for value in decided_by]
    digest = sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
    work.mkdir(parents=True, exist_ok=True)
    return work / f"{name}-{digest}{suffix}"


def training(work: Path, config: DraftConfig, decided_by: Sequence[Any]) -> Path:
    """The directory of a training's checkpoints. Those of other settings are removed: they are several times as large as the draft."""
    fields = config.model_dump(mode="json", exclude=_AFTERWARDS)
    own = part(work, "training", [fields, *decided_by])
    for other in work.glob("training-*"):
        if other != own:
            shutil.rmtree(other, ignore_errors=True)
    return own
