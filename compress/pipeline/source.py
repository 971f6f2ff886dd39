"""The source checkpoint under the names that the model gives its tensors, and what of it the model has no place for."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from compress.pipeline.converted import Converted, find_converted
from compress.pipeline.pieces import find_pieces, whole_names
from runtime.checkpoint import Checkpoint
from runtime.errors import ArtifactError
from runtime.headers import TensorEntry
from runtime.naming import match_names, without_place
from runtime.published import Published
from runtime.skeleton import model_kind, tied_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_POSITIONS = re.compile(r"(^|\.)position_ids$")


class SourceCheckpoint(Checkpoint):
    """A checkpoint whose tensors go by the model's names.

    Attributes:
        renamed: {the model's name: the name in the files} where the two differ; of a tensor that the files hold in parts, the first.
        pieces: {the model's name: where it is} of tensors of single experts that the files hold in one.
        converted: {the model's name: how it is made} of tensors that the files hold in parts (experts one by one).
        dropped: {name: why} of tensors that no artifact needs.

    Raises:
        ArtifactError: an encoder's checkpoint holds something that config.json does not describe.
    """

    def __init__(self, checkpoint: Checkpoint, model: PreTrainedModel, places: Collection[str]) -> None:
        self.__dict__.update(copy.copy(checkpoint.__dict__))
        self.renamed = {new: old for new, old in match_names(model, checkpoint.names(), places).items() if new != old}
        self.converted: dict[str, Converted] = {}
        self._files = checkpoint
        self._published = Published(model)
        back = {old: new for new, old in self.renamed.items()}
        wholes = whole_names(model)
        for name in checkpoint.names() if wholes else ():
            if name not in back and (place := self._published.place(name)) in wholes:
                back[name] = place
        named = {back.get(name, name): checkpoint.entry(name) for name in checkpoint.names()}
        self.pieces = find_pieces(model, named)
        for name in {piece.whole for piece in self.pieces.values()}:
            del named[name]
        for name, piece in self.pieces.items():
            named[name] = piece.entry(name)
            self.renamed[name] = piece.source.name
        if not set(places) - _shared(model) <= named.keys() and not set(named) <= set(places):
            self._convert(checkpoint, model, places, named)
        self._tensors = dict(sorted(named.items()))
        self.dropped: dict[str, str] = dict(getattr(checkpoint, "folded", {}))
        if model_kind(model.config) != "encoder":
            return
        for name in sorted(self._tensors.keys() - set(places)):
            reason = "the model computes it" if _POSITIONS.search(name) else without_place(model, name)
            if not reason:
                raise ArtifactError(f"{checkpoint.path}: {type(model).__name__} has no place for tensor {name}")
            self.dropped[name] = reason

    def _convert(
        self,
        checkpoint: Checkpoint,
        model: PreTrainedModel,
        places: Collection[str],
        named: dict[str, TensorEntry],
    ) -> None:
        """Put tensors that transformers would rename, or make out of several, into `named`, in the place of those in the files."""
        renamed, self.converted = find_converted(model, checkpoint, places)
        for name, stored in renamed.items():
            named.pop(stored, None)
            named[name] = checkpoint.entry(stored)
            self.renamed[name] = stored
        for name, made in self.converted.items():
            entries = [checkpoint.entry(stored) for stored in made.sources]
            for stored in made.sources:
                named.pop(stored, None)
            form = made.build(
                lambda stored: torch.empty(self._files.shape(stored), dtype=self._files.dtype(stored), device="meta")
            )
            size = form.numel() * form.element_size()
            named[name] = TensorEntry(name, entries[0].file, form.dtype, tuple(form.shape), entries[0].offset, size)
            self.renamed[name] = made.sources[0]

    def get(self, name: str) -> torch.Tensor:
        """One tensor, put together where the files hold it in parts, or taken out of theirs; see `Checkpoint.get`."""
        if name in self.pieces:
            return self.pieces[name].read(self._files)
        made = self.converted.get(name)
        return self._files.get(self.entry(name).name) if made is None else made.build(self._files.get)

    def nbytes(self, name: str) -> int:
        """Bytes of the tensor in its file, or files."""
        return self.entry(name).nbytes if self.has(name) else self._files.nbytes(name)

    def whole(self, name: str) -> torch.Tensor:
        """What the files hold in one of which tensor `name` is a piece."""
        return self._files.get(self.pieces[name].source.name)

    # ---------------------------------------------------------------- what artifacts call them
    def published(self, name: str) -> str:
        """What an artifact calls a tensor of the model: as the files do where transformers knows that name."""
        stored = self.renamed.get(name)
        if name in self.pieces:
            return self.pieces[name].published
        if stored is None or name in self.converted:
            return name
        return stored if self._published.place(stored) == name else name

    def published_module(self, name: str) -> str:
        """As `published`, of a module with a weight."""
        return self.published(f"{name}.weight").removesuffix(".weight")


def _shared(model: PreTrainedModel) -> set[str]:
    """Names that need no tensor of their own, since one that they are tied to may be stored."""
    return {name for pair in tied_names(model).items() for name in pair}
