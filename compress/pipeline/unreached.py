"""What of a model's blocks no method can compress, since it is in no linear layer that is known as one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from compress.assign import Left
from compress.nearest import listing
from compress.pipeline.partial import PartialModel
from runtime.matrices import is_matrix

#: Share of the checkpoint's bytes from which on it is worth a sentence.
WORTH = 0.01
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass
class _Like:
    """Tensors of one name but for their numbers."""

    shape: tuple[int, ...]
    count: int = 0
    bytes: int = 0


def unreached(model: PartialModel, size: Callable[[float], str]) -> list[str]:
    """A sentence for each kind of tensor in the blocks that has two or more dimensions and belongs to no linear layer.

    Args:
        size: bytes for people.
    """
    checkpoint, extra = model.checkpoint, set(model.extra)
    found: dict[str, _Like] = {}
    for index in range(len(model.blocks)):
        for name in model.block_names(index):
            shape = checkpoint.shape(name)
            home, _, leaf = name.rpartition(".")
            if len(shape) < 2 or name in extra or (leaf == "weight" and is_matrix(model.model.get_submodule(home))):
                continue
            like = found.setdefault(_NUMBER.sub("*", name), _Like(shape))
            like.count += 1
            like.bytes += checkpoint.nbytes(name)
    total = sum(checkpoint.nbytes(name) for name in checkpoint.names())
    sentences = []
    for name, like in sorted(found.items(), key=lambda item: -item[1].bytes):
        if like.bytes >= WORTH * total:
            part = model.model.get_submodule(_a_home(model, name))
            kind = type(part).__name__
            experts = len(like.shape) == 3 and not isinstance(part, nn.Conv1d)
            why = "holds experts in a way that it does not say" if experts else "is no linear layer"
            sentences.append(
                f"{name} {list(like.shape)} stays as it is ({like.count} tensors, {size(like.bytes)}, {like.bytes / total:.0%} of the "
                f"weights): its module {kind} {why}"
            )
    return sentences


def _a_home(model: PartialModel, name: str) -> str:
    """A module whose tensor goes by a name with stars."""
    pattern = re.compile(re.escape(name).replace(r"\*", r"\d+"))
    return next(own for own in model.checkpoint.names() if pattern.fullmatch(own)).rpartition(".")[0]


def left_alone(left: Sequence[Left]) -> list[str]:
    """The sentence for layers that default targets mean and that stay as they are; none without any."""
    alike = Counter((_NUMBER.sub("*", one.name), one.why) for one in left)
    if not alike:
        return []
    told = [f"{name} ({why}{f'; {count} layers' if count > 1 else ''})" for (name, why), count in alike.items()]
    return [f"what cannot be compressed as the other layers are stays as it is: {listing(told)}"]
