"""Taylor: units are ranked by what a loss says of their removal, to second order with the empirical Fisher matrix."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from compress.prune.structure.config import StructureConfig
from compress.prune.structure.method import StructureMethod


class TaylorConfig(StructureConfig):
    """Remove the units by which the loss changes least: the mean over rows of text of the squared derivative by a factor on the unit.

    No labels: language models have the text itself, encoders the change of their embeddings. The whole model with its activations of one
    batch is in memory.
    """

    method: Literal["taylor"] = Field("taylor", description="Name of the method.")


METHOD = StructureMethod(
    TaylorConfig,
    lambda view, _: view.sensitivity,
    summary="removes the units that the gradient of a loss says least of",
    paper="Molchanov et al., Importance Estimation for Neural Network Pruning, 2019, arXiv 1906.10771; of "
    "masks: Kwon et al., A Fast Post-Training Pruning Framework for Transformers, 2022, arXiv 2204.09656",
    removes={"ffn", "heads"},
    needs={"gradients"},
)
