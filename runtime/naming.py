"""Which tensor of a checkpoint is which of a model, where the two were written by different classes or versions."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from runtime.published import Published
from runtime.skeleton import model_kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What norms' parameters were called in checkpoints that were converted from TensorFlow.
_OLD = {"gamma": "weight", "beta": "bias"}


def match_names(model: PreTrainedModel, stored: Collection[str], places: Collection[str]) -> dict[str, str]:
    """{name in the model: name in the checkpoint} for every tensor of `places` that is stored under some name.

    Checkpoints of a bare base model lack its prefix ("transformer."), those of a model with a head have it where a bare model
    has none, old ones say gamma and beta, and some families are published with other names than transformers' (`Published`).
    """
    names: dict[str, str] = {}
    there = set(stored)
    for name in sorted(there):
        found = next((candidate for candidate in _candidates(model, name) if candidate in places), None)
        # A tensor stored under the very name of a place wins over one that has to be renamed.
        if found is not None and (found == name or (found not in there and found not in names)):
            names[found] = name
    left = there - set(names.values())
    if left and set(places) - names.keys():
        published = Published(model)
        for name in sorted(left):
            found = published.place(name)
            if found in places and found not in names:
                names[found] = name
    return names


def without_place(model: PreTrainedModel, name: str) -> str:
    """Why `name`, which is stored but has no place in `model`, may be left out; empty when it may not.

    Encoders only: a pooler, or a head that the class named in config.json does not have. Anything inside of the encoder
    that has no place means that config.json describes another model.
    """
    if model_kind(model.config) != "encoder":
        return ""
    base = model.base_model
    local = name.removeprefix(f"{model.base_model_prefix}.")
    first = local.partition(".")[0]
    if first == "pooler" and getattr(base, "pooler", None) is None:
        return f"{type(model).__name__} has no pooler"
    if hasattr(base, first) or hasattr(model, first):
        # "cls" is a child of BertForMaskedLM, whose own head is complete: what else is stored below it is another head's.
        return "" if hasattr(base, first) or "." not in local else _second_head(model, local)
    return f"{type(model).__name__} has no {first}"


def _second_head(model: PreTrainedModel, local: str) -> str:
    first, second = local.split(".")[:2]
    if hasattr(getattr(model, first), second):
        return ""
    return f"{type(model).__name__} has no {first}.{second}"


def _candidates(model: PreTrainedModel, name: str) -> Iterator[str]:
    prefix = f"{model.base_model_prefix}."
    head, _, leaf = name.rpartition(".")
    for spelled in (name, f"{head}.{_OLD[leaf]}" if leaf in _OLD else name):
        yield spelled
        yield prefix + spelled
        if spelled.startswith(prefix):
            yield spelled.removeprefix(prefix)
