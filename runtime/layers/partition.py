"""Partition of a model's linear layers: of some only a part, rows or columns of the weight, is built and read from the files."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from runtime import formats
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.checkpoint.headers import TensorEntry
from runtime.errors import RequestError
from runtime.formats.cut import COLUMNS, ROWS, Cut, Index
from runtime.layers.compressed_linear import CompressedLinear
from runtime.modeling.weights import Filling

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def unit(layer: nn.Module, axis: int) -> int:
    """Rows (`axis` 0) or columns (1) of a linear layer's weight that stay together where it is cut.

    Raises:
        RequestError: its format, or a layer of its class, cannot be cut.
    """
    if isinstance(layer, CompressedLinear):
        return formats.get(layer.entry.format).unit(layer.entry.scheme, layer.shape, layer.stored_dtype, axis)
    if type(layer) is not nn.Linear:
        raise RequestError(f"a {type(layer).__name__} cannot be cut, only linear layers can")
    return 1


class PartCheckpoint(Checkpoint):
    """A checkpoint that has only a part of some tensors.

    Args:
        checkpoint: the files.
        parts: {stored name: where in the tensor its part lies}.
        values: {stored name: what is read in the place of the tensor}.
    """

    def __init__(
        self, checkpoint: Checkpoint, parts: Mapping[str, Index], values: Mapping[str, torch.Tensor]
    ) -> None:
        self.__dict__.update(copy.copy(checkpoint.__dict__))
        self._files, self._parts, self._values = checkpoint, parts, values
        entries = {name: checkpoint.entry(name) for name in checkpoint.names()}
        for name, index in parts.items():
            entries[name] = _part_entry(entries[name], index)
        self._tensors: dict[str, TensorEntry] = entries
        self.total_bytes = sum(entry.nbytes for entry in entries.values())

    def get(self, name: str) -> torch.Tensor:
        """One tensor, or the part of it that this checkpoint has; nothing else is read."""
        if name in self._values:
            return self._values[name]
        return self._files.get_part(name, self._parts[name]) if name in self._parts else self._files.get(name)

    def get_item(self, name: str, index: int) -> torch.Tensor:
        """Item `index` of a tensor along its first dimension."""
        changed = name in self._values or name in self._parts
        return self.get(name)[index] if changed else self._files.get_item(name, index)


def _part_entry(entry: TensorEntry, index: Index) -> TensorEntry:
    shape = tuple(len(range(*each.indices(size))) for each, size in zip(index, entry.shape, strict=True))
    return replace(entry, shape=shape, nbytes=math.prod(shape) * entry.dtype.itemsize)


def partition(
    model: PreTrainedModel, checkpoint: Checkpoint, compressed: frozenset[str], cuts: Mapping[str, Cut], adds_bias: bool
) -> Checkpoint:
    """Replace linear layers of a skeleton by parts of them, still on meta; the checkpoint that has just what the skeleton then needs.

    Args:
        model: the whole skeleton, its compressed layers installed.
        checkpoint: of the whole model.
        compressed: names of those layers.
        cuts: {layer: its part}.
        adds_bias: whether layers cut along their inputs keep their bias, which is zero otherwise: one part of each sum has it.

    Raises:
        RequestError: the format of a layer cannot be cut so. ArtifactError: the checkpoint is not that of the model.
    """
    filling = Filling(model, checkpoint, model.dtype, torch.device("cpu"), compressed)  # also checks the whole
    if filling.foreign:
        raise RequestError(f"{checkpoint.path} names its tensors in another way than {type(model).__name__}, and cannot be read in parts")
    parts: dict[str, Index] = {}
    values: dict[str, torch.Tensor] = {}
    for name, cut in cuts.items():
        layer = model.get_submodule(name)
        try:
            part, index = _part(layer, cut)
        except RequestError as error:
            raise RequestError(f"{name}: {error}") from None
        for leaf, where in index.items():
            stored = filling.names.get(f"{name}.{leaf}")
            if stored is None:  # of tied weights only one is stored, and checks have passed
                continue
            if leaf == "weight_shape":
                values[stored] = torch.tensor(cut.shape, dtype=torch.int64)
            elif leaf == "bias" and cut.axis == 1 and not adds_bias:
                values[stored] = torch.zeros(checkpoint.shape(stored), dtype=checkpoint.dtype(stored))
            else:
                parts[stored] = where
        model.set_submodule(name, part)
    return PartCheckpoint(checkpoint, parts, values)


def _part(layer: nn.Module, cut: Cut) -> tuple[nn.Module, dict[str, Index]]:
    """The empty layer, and where in each tensor of the whole its own lies."""
    rows, columns = cut.shape
    bias = getattr(layer, "bias", None) is not None
    part: nn.Module
    if isinstance(layer, CompressedLinear):
        storage = formats.get(layer.entry.format)
        index = storage.cut(layer.entry.scheme, layer.stored_dtype, cut)
        part = CompressedLinear(layer.entry, cut.shape, bias, layer.stored_dtype)
    else:
        unit(layer, cut.axis)
        index = {"weight": cut.index((ROWS, COLUMNS))}
        part = nn.Linear(columns, rows, bias, device="meta", dtype=layer.weight.dtype)
    if bias:
        index["bias"] = cut.index((ROWS,))
    return part.eval().requires_grad_(False), index
