"""Short samples of prose, code and conversation, on which every draft's acceptance is reported whatever it was trained on."""

from __future__ import annotations

from importlib import resources
from typing import Any

import torch

KINDS = ("text", "code", "chat")
LENGTH = 64  # tokens of a row, half of which are continued
_LEAST = 2


def sample_rows(tokenizer: Any, longest: int = LENGTH) -> dict[str, torch.Tensor]:
    """{kind: int64 `[n, s]`}, s at most 64; kinds that a tokenizer makes less than two rows of are left out.

    Args:
        tokenizer: of the target.
        longest: tokens of a row at most.
    """
    length = min(LENGTH, longest)
    found = {}
    for kind in KINDS:
        text = resources.files(__package__).joinpath(f"{kind}.txt").read_text(encoding="utf-8")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        count = len(ids) // length
        if count >= _LEAST:
            found[kind] = torch.tensor(ids[: count * length], dtype=torch.int64).reshape(count, length)
    return found
