"""Tensors of single experts, out of files that hold those of all experts of a layer in one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from runtime.checkpoint import Checkpoint
from runtime.errors import ArtifactError
from runtime.experts import Experts, Layout
from runtime.headers import TensorEntry

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Piece:
    """Where a tensor of one expert is.

    Attributes:
        whole: what the model would call the tensor of all experts. source: that tensor in the files.
        number, projection, bias: which one of it.
    """

    whole: str
    source: TensorEntry
    layout: Layout
    number: int
    projection: str
    bias: bool

    @property
    def home(self) -> str:
        """The module that holds the experts."""
        return self.whole.rpartition(".")[0]

    @property
    def published(self) -> str:
        """What an artifact calls it: there is no published name, so it is named as other families name theirs."""
        home, _, leaf = self.source.name.rpartition(".")
        if leaf != self.whole.rpartition(".")[2]:
            # A tensor that is published as a module's weight (Granite's output_linear.weight) says nothing of where experts are.
            home = self.home
        return f"{home}.{self.number}.{self.projection}.{'bias' if self.bias else 'weight'}"

    def read(self, files: Checkpoint) -> torch.Tensor:
        """The tensor; of the file nothing but this expert's part is read."""
        return self.layout.part(self.projection, files.get_item(self.source.name, self.number), self.bias)

    def entry(self, name: str) -> TensorEntry:
        """Its shape and size, at the place of the whole."""
        rows = self.layout.hidden if self.projection == "down_proj" else self.layout.inner
        columns = self.layout.inner if self.projection == "down_proj" else self.layout.hidden
        shape = (rows,) if self.bias else (rows, columns)
        size = torch.Size(shape).numel() * self.source.dtype.itemsize
        return TensorEntry(name, self.source.file, self.source.dtype, shape, self.source.offset, size)


def whole_names(model: PreTrainedModel) -> set[str]:
    """What the model would call the tensors of all experts of a layer, where it has its experts apart."""
    return {
        f"{name}.{module.layout.home(projection, bias)}"
        for name, module in model.named_modules()
        if isinstance(module, Experts)
        for projection in module.layout.projections
        for bias in ((False, True) if module.layout.bias else (False,))
    }


def find_pieces(model: PreTrainedModel, named: Mapping[str, TensorEntry]) -> dict[str, Piece]:
    """{the model's name: where it is} of the tensors of experts that are apart in the model and in one in the files.

    Args:
        named: {name that the model would give it with its experts in one: tensor in the files}.

    Raises:
        ArtifactError: a tensor of all experts has another shape than config.json says.
    """
    found: dict[str, Piece] = {}
    for name, module in model.named_modules():
        if not isinstance(module, Experts):
            continue
        layout = module.layout
        for projection in layout.projections:
            for bias in (False, True) if layout.bias else (False,):
                whole = f"{name}.{layout.home(projection, bias)}"
                if whole not in named:
                    continue
                if named[whole].shape != layout.shape(projection, bias):
                    raise ArtifactError(
                        f"{named[whole].file}: tensor {named[whole].name} has shape {list(named[whole].shape)}, config.json asks for "
                        f"{list(layout.shape(projection, bias))}"
                    )
                for number in range(layout.count):
                    own = f"{name}.{number}.{projection}.{'bias' if bias else 'weight'}"
                    found[own] = Piece(whole, named[whole], layout, number, projection, bias)
    return found
