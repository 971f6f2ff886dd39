"""Which layer of the teacher a layer of the model in recovery answers to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def followed(stacks: Sequence[int], passes: Sequence[Mapping[str, Any]]) -> list[int]:
    """For each block of the model, over all stacks, the number of the teacher's block that it was.

    Args:
        stacks: layers of each stack of the teacher. passes: what earlier stages have done, as their facts say it.
    """
    kept = [list(range(depth)) for depth in stacks]
    for facts in passes:
        if facts.get("remove") == "layers":
            kept = [[own[index] for index in chosen] for own, chosen in zip(kept, facts["kept"], strict=True)]
    found, first = [], 0
    for own, depth in zip(kept, stacks, strict=True):
        found += [first + index for index in own]
        first += depth
    return found
