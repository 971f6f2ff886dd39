"""The source checkpoint under the names that the model gives its tensors, and what of it the model has no place for."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from runtime.checkpoint import Checkpoint
from runtime.errors import ArtifactError
from runtime.naming import match_names, without_place
from runtime.skeleton import model_kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_POSITIONS = re.compile(r"(^|\.)position_ids$")


class SourceCheckpoint(Checkpoint):
    """A checkpoint whose tensors go by the model's names.

    Attributes:
        renamed: {the model's name: the name in the files} where the two differ.
        dropped: {name: why} of tensors that no artifact needs.

    Raises:
        ArtifactError: an encoder's checkpoint holds something that config.json does not describe.
    """

    def __init__(self, checkpoint: Checkpoint, model: PreTrainedModel, places: Collection[str]) -> None:
        self.__dict__.update(copy.copy(checkpoint.__dict__))
        self.renamed = {new: old for new, old in match_names(model, checkpoint.names(), places).items() if new != old}
        back = {old: new for new, old in self.renamed.items()}
        self._tensors = dict(sorted((back.get(name, name), checkpoint.entry(name)) for name in checkpoint.names()))
        self.dropped: dict[str, str] = {}
        if model_kind(model.config) != "encoder":
            return
        for name in sorted(self._tensors.keys() - set(places)):
            reason = "the model computes it" if _POSITIONS.search(name) else without_place(model, name)
            if not reason:
                raise ArtifactError(f"{checkpoint.path}: {type(model).__name__} has no place for tensor {name}")
            self.dropped[name] = reason
