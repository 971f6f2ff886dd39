"""Method of an input transform: how the matrices of layers with one input are found, and the basis that they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from compress.core.method import Need
from compress.core.statistics import Statistics
from runtime.formats.input_transform import InputTransform
from runtime.formats.representation import Tensors
from runtime.formats.scheme import Scheme


@dataclass(frozen=True)
class Layers:
    """Layers that read one input.

    Attributes:
        weights: `[out_i, in]` each, of any float dtype. scheme: what they are to become.
        samples: float32 `[tokens, in]`, some of the inputs, none where no token was seen; None where the method does not need them.
    """

    weights: list[torch.Tensor]
    scheme: Scheme
    samples: torch.Tensor | None


@dataclass(frozen=True)
class TransformMethod:
    """One method of `compress.quantize.transforms.METHODS`.

    Attributes:
        name: as a recipe says it (`input_transform: hadamard`). summary, paper: as of `compress.core.method.Method`.
        find: the matrices (`InputTransform.tensors`, in float32), finite and invertible; the same for the same layers.
        needs: what calibration must collect.
        by_group: one matrix for every group of columns of the weights' scheme, not one for a row.
        kind: class of the transforms.
    """

    name: str
    summary: str
    paper: str
    find: Callable[[Layers], Tensors]
    needs: frozenset[Need] = frozenset()
    by_group: bool = False
    kind: type[InputTransform] = InputTransform


@dataclass(frozen=True)
class Basis:
    """The basis that layers of one input are solved in."""

    transform: InputTransform
    tensors: Tensors

    def weight(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight `[out, in]` in it, float32."""
        return self.transform.to_weight(weight, self._on(weight.device))

    def statistics(self, statistics: Statistics) -> Statistics | None:
        """Statistics of the inputs in it, without drift, which is made up for before; None where ranges alone were collected."""
        if statistics.hessian is None and statistics.samples is None:
            return None
        return statistics.transformed(self.inputs)

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Inputs `[..., in]` in it."""
        return self.transform.of_inputs(x, self._on(x.device))

    def _on(self, device: torch.device) -> Tensors:
        return {name: tensor.to(device) for name, tensor in self.tensors.items()}
