"""A model with fewer dimensions whose tensors are cut out of the whole one's as they are read: nothing is written, nothing is held."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from compress.model.couplings import Slices
from compress.model.source import SourceCheckpoint
from compress.model.streamed import StreamedModel
from compress.prune.structure.cutting import check_finite
from compress.prune.structure.hidden_statistics import Norm
from compress.prune.structure.job import StructureJob, outline
from runtime.checkpoint.checkpoint import Checkpoint


@dataclass
class Cut:
    """What becomes of a tensor.

    Attributes:
        slices: what dimensions have of which tensors. kept: int64, ascending, which of `count` stay.
        norms: by name. gains: {norm: what its output is multiplied by}.
        scales: {tensor: what it is multiplied by}.
    """

    slices: tuple[Slices, ...]
    kept: torch.Tensor
    count: int
    norms: dict[str, Norm]
    gains: dict[str, float]
    scales: dict[str, float] = field(default_factory=dict)

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the smaller model has it, in its own dtype; CompressError where it holds NaN or Inf."""
        check_finite({name: tensor})
        for part in self.slices:
            if part.name == name:
                tensor = part.cut(tensor, self.kept, self.count)
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module in self.norms:
            tensor = self.norms[module].scaled(tensor, self.gains.get(module, 1.0))
        scale = self.scales.get(name, 1.0)
        return tensor if scale == 1.0 else (tensor.float() * scale).to(tensor.dtype)


class CutCheckpoint(SourceCheckpoint):
    """The tensors of the smaller model.

    Args:
        form: names, shapes and dtypes.
        whole: where they are cut out of.
    """

    def __init__(self, form: SourceCheckpoint, whole: Checkpoint, cut: Cut) -> None:
        self.__dict__.update(form.__dict__)
        self._whole, self._cut = whole, cut

    def get(self, name: str) -> torch.Tensor:
        """One tensor; see `Cut`."""
        return self._cut(name, self._whole.get(name))


def cut_model(job: StructureJob, streamed: StreamedModel, cut: Cut, directory: Path) -> StreamedModel:
    """The smaller model, which streams as any other; what `cut` says may change until its tensors are read.

    Args:
        directory: for its config and its outline.
    """
    smaller = StreamedModel(outline(directory, streamed, job), streamed.device, dtype=streamed.dtype)
    smaller.checkpoint = CutCheckpoint(smaller.checkpoint, streamed.checkpoint, cut)
    smaller.ties = dict(streamed.ties)  # zeros are all alike, so the outline cannot say which are tied
    return smaller
