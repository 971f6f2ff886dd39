"""The column loop with representations that are not grids, and what is refitted or refined after it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compress.core import file_matrix
from compress.core.method import ColumnLoop
from compress.quantize.objective import column_errors
from compress.weights.solver import loop
from compress.weights.solver.factor import Factor
from compress.weights.solver.refine import refine_vectors
from runtime.formats.representation import Representation, Tensors


@dataclass
class Solved:
    """Codes `[rows, in / vector]`, parameters and output error `[rows]` of some rows."""

    codes: torch.Tensor
    parameters: Tensors
    lost: torch.Tensor

    def improve(self, codes: torch.Tensor, parameters: Tensors, lost: torch.Tensor) -> None:
        """Take other codes and parameters for the rows that lose less with them."""
        better = lost < self.lost
        self.codes, self.lost = torch.where(better[:, None], codes, self.codes), torch.minimum(self.lost, lost)
        if parameters is not self.parameters:
            pairs = ((name, parameters[name], old) for name, old in self.parameters.items())
            self.parameters = {
                name: torch.where(better.view(-1, *[1] * (old.dim() - 1)), new, old) for name, new, old in pairs
            }


@dataclass
class VectorSolver:
    """The column loop with any other representation, for weights that share an input; vectors take the place of columns.

    Attributes:
        hessian: float32 `[in, in]`, in the order of the weight's columns.
        order: visiting order `[in]`, in which the columns of a vector stay together.
        factor: of the Hessian in that order.
        dtype: of the model.
        options: only `block_size` and `sweeps` are used.
    """

    scheme: Representation
    hessian: torch.Tensor
    order: torch.Tensor
    factor: Factor
    dtype: torch.dtype
    options: ColumnLoop

    def fit(self, weight: torch.Tensor) -> Tensors:
        """Parameters for a weight `[out, in]`."""
        return self.scheme.fit(weight.float(), self.dtype, file_matrix.diagonal(self.hessian).clamp(min=0))

    def solve(
        self, target: torch.Tensor, parameters: Tensors
    ) -> tuple[torch.Tensor, Tensors, torch.Tensor, torch.Tensor]:
        """Codes of a target, and parameters that are refitted to them where the representation has a way to.

        Args:
            target: float32 `[rows, in]`.
            parameters: of these rows.

        Returns:
            Codes `[rows, in / vector]`; parameters; output error of each row `[rows]`, never above that of rounding to nearest; bool
            `[rows]`, True where rounding to nearest beat the column loop.
        """
        rounding = loop.VectorRounding(self.scheme, parameters, self.order)
        loop.run(target.T[self.order], self.factor, rounding, block=self.options.block_size)
        codes, nearest = rounding.codes, self.scheme.round(target, parameters)
        lost, least = self._lost(target, codes, parameters), self._lost(target, nearest, parameters)
        worse = lost > least
        found = Solved(codes, parameters, lost)
        found.improve(nearest, parameters, least)
        added, sweeps = self.factor.added, self.options.sweeps
        refits = bool(added) and self._refit(target, found)  # without inputs there is nothing to gain
        for _ in range(0 if not added else sweeps if refits else 1):  # in turn
            if sweeps:
                form, own = self.scheme, found.parameters
                refined = refine_vectors(target, found.codes, form, own, self.hessian, added, 1 if refits else sweeps)
                found.improve(refined, own, self._lost(target, refined, own))
            if refits:
                self._refit(target, found)
        return found.codes, found.parameters, found.lost, worse

    def _refit(self, target: torch.Tensor, found: Solved) -> bool:
        """Refit the parameters to the codes, in place; whether the representation has a way to."""
        energy = file_matrix.diagonal(self.hessian).clamp(min=0)
        better = self.scheme.refit(
            target, found.codes, found.parameters, lambda error: file_matrix.product(self.hessian, error.T).T, energy
        )
        if better is None:
            return False
        if not self.scheme.rows_apart:  # a choice for each row would mix parameters that all rows share
            raise TypeError(f"representation {self.scheme.name} refits parameters, and its rows share them")
        found.improve(*better, self._lost(target, *better))
        return True

    def stored(self, codes: torch.Tensor, parameters: Tensors) -> torch.Tensor:
        """What the codes stand for in the model's dtype, float32."""
        return self.scheme.dequantize(codes, parameters, self.dtype).float()

    def _lost(self, target: torch.Tensor, codes: torch.Tensor, parameters: Tensors) -> torch.Tensor:
        return column_errors((target - self.stored(codes, parameters)).T, self.hessian)
