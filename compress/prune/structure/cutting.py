"""What every way of removing structure is given, and what a cut of single blocks has in hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from compress.core.progress import Reporter
from compress.model.hidden_states import HiddenStates
from compress.model.streamed import Batch, StreamedModel
from compress.prune.structure.job import StructureJob
from runtime.errors import CompressError


@dataclass(frozen=True)
class Cutting:
    """A stage `structure` that is being carried out.

    Attributes:
        job: what goes, and how much.
        streamed: the whole model.
        batches: calibration text. probe: ids that follow the model through, to be compared with what was written.
        output: for the smaller checkpoint. work: for what an interrupted call goes on from.
        spill: hidden states are held on the disk.
        reporter: of progress.
    """

    job: StructureJob
    streamed: StreamedModel
    batches: Sequence[Batch]
    probe: Batch
    output: Path
    work: Path
    spill: bool
    reporter: Reporter

    def states(self, count: int, name: str = "hidden") -> HiddenStates:
        """For the states of so many batches; on the disk under this name, where they spill."""
        return HiddenStates(count, self.scratch(name))

    def scratch(self, name: str = "hidden") -> Path | None:
        """Where states spill to; None: they stay in memory."""
        return self.work / f"{name}-next" if self.spill else None


def check_finite(tensors: dict[str, torch.Tensor]) -> None:
    """CompressError that names the tensor with NaN or Inf."""
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise CompressError(f"{name}: the weight holds NaN or Inf; repair the checkpoint")


def check_ranks(rank: torch.Tensor, what: str, method: str) -> torch.Tensor:
    """The ranks; CompressError where one is no number. `what`: "the experts of layer 3"."""
    if not bool(torch.isfinite(rank).all()):
        raise CompressError(f"{what} cannot be ranked: {method} gives NaN or Inf")
    return rank


def best(rank: torch.Tensor, count: int) -> torch.Tensor:
    """Which units stay, ascending: int64 `[count]`; of equals the first."""
    return rank.argsort(descending=True, stable=True)[:count].sort().values
