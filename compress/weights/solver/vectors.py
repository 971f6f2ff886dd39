"""The column loop and its refinement for weights of any representation, whose parameters are fitted beforehand.

Vectors of columns take the place of columns: an error costs what the columns after the vector cannot make up for, with couplings inside of
it, and a vector that moves once more moves towards the values that are best given all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compress.core import file_matrix
from compress.quantize.objective import column_errors
from compress.weights.solver import loop
from compress.weights.solver.factor import Factor
from runtime.formats.representation import Representation, Tensors

#: Columns whose gradient is computed together.
BLOCK = 128


@dataclass
class VectorSolver:
    """For weights that share an input.

    Attributes:
        hessian: float32 `[in, in]`; `factor` is that of it in the visiting `order` `[in]`, which keeps vectors together.
        dtype: of the model.
        block: columns that look back together.
        sweeps: passes of refinement.
    """

    scheme: Representation
    hessian: torch.Tensor
    order: torch.Tensor
    factor: Factor
    dtype: torch.dtype
    block: int
    sweeps: int

    def fit(self, weight: torch.Tensor) -> Tensors:
        """Parameters for a weight `[out, in]`."""
        return self.scheme.fit(weight.float(), self.dtype, file_matrix.diagonal(self.hessian).clamp(min=0))

    def solve(self, target: torch.Tensor, parameters: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes of a target.

        Args:
            target: float32 `[rows, in]`.
            parameters: of these rows.

        Returns:
            Codes `[rows, in / vector]`, the output error of each row, which rounding to nearest would not make smaller, and in which rows
            (bool) it was the better start.
        """
        rounding = loop.VectorRounding(self.scheme, parameters, self.order)
        loop.run(target.T[self.order], self.factor, rounding, block=self.block)
        codes, nearest = rounding.codes, self.scheme.round(target, parameters)
        worse = self._lost(target, codes, parameters) > self._lost(target, nearest, parameters)
        codes = torch.where(worse[:, None], nearest, codes)
        if self.sweeps:
            moved = self._refine(target, codes, parameters)
            better = self._lost(target, moved, parameters) < self._lost(target, codes, parameters)
            codes = torch.where(better[:, None], moved, codes)
        return codes, self._lost(target, codes, parameters), worse

    def stored(self, codes: torch.Tensor, parameters: Tensors) -> torch.Tensor:
        """What the codes stand for in the model's dtype, float32."""
        return self.scheme.dequantize(codes, parameters, self.dtype).float()

    def _lost(self, target: torch.Tensor, codes: torch.Tensor, parameters: Tensors) -> torch.Tensor:
        return column_errors((target - self.stored(codes, parameters)).T, self.hessian)

    def _refine(self, target: torch.Tensor, codes: torch.Tensor, parameters: Tensors) -> torch.Tensor:
        """Codes of which each is, given the others, the best that the representation finds."""
        vector, codes = self.scheme.vector, codes.clone()
        values = self.scheme.dequantize(codes, parameters, torch.float32).T.contiguous()
        error = target.T - values
        for _ in range(self.sweeps):
            for here in file_matrix.panels(len(values), max(1, BLOCK // vector) * vector):
                corner, gradient = self.hessian[here, here], self.hessian[here] @ error
                file_matrix.let_go(self.hessian)
                for first in range(0, len(gradient), vector):
                    own = slice(first, first + vector)
                    place = here.start + first
                    metric = self._definite(corner[own, own])
                    wanted = torch.linalg.solve(metric, gradient[own])  # how far the values best move
                    there = slice(place, place + vector)
                    found, code = self.scheme.nearest(values[there] + wanted, parameters, place, metric)
                    move = found - values[there]
                    better = column_errors(move - wanted, metric) < column_errors(wanted, metric)
                    move *= better
                    codes[:, place // vector] = torch.where(better, code.to(codes.dtype), codes[:, place // vector])
                    values[there] += move
                    error[there] -= move
                    gradient -= corner[:, own] @ move
        return codes

    def _definite(self, metric: torch.Tensor) -> torch.Tensor:
        """With what the factor has on its diagonal."""
        return metric + self.factor.added * torch.eye(len(metric), device=metric.device)
