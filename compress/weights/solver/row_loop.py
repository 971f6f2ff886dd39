"""Row loop: what rows that are solved lose at the model's output is made up for in the rows to come.

With `H` the output Hessian of a layer (`compress.model.output_hessians`) and `G` the second moments of its inputs, an error
`E [out, in]` of its weight raises the KL divergence to the original by about `tr(H E G E^T) / 2`. With the rows in visiting order and
`H = T^T T` (`compress.weights.solver.factor`) that is a sum over rows, whose term j is least where row j's error is
`-sum_{k<j} T_jk / T_jj e_k`, whatever G is: the column loop again, over rows. So a stretch of rows is solved for its weights and what
makes up for the errors before it, by any solver that keeps outputs.

Source: Tseng et al., Model-Preserving Adaptive Rounding (YAQA), 2025, arXiv 2505.22988 (feedback on both sides); whole stretches of rows
are solved at a time here, so that a solver works on many rows together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compress.core import file_matrix
from compress.weights.solver.columns import Chunk, rows_at_a_time
from compress.weights.solver.factor import Factor, factorize

#: Stretches that the rows of a weight are solved in.
STRETCHES = 32
#: Added to the diagonal of output Hessians, as a fraction of its mean.
DAMPING = 0.05


@dataclass
class RowLoop:
    """The rows of weights with one input, in visiting order.

    Attributes:
        orders: row of each weight that is visited when, `[out_i]`: those whose errors cost most first.
        factors: of the output Hessians, in that order.
        errors: of the rows that are solved, float32 `[out_i, in]` in that order.
    """

    orders: list[torch.Tensor]
    factors: list[Factor]
    errors: list[torch.Tensor]

    @classmethod
    def of(cls, weights: Sequence[torch.Tensor], hessians: Sequence[torch.Tensor], names: Sequence[str]) -> RowLoop:
        """For weights `[out_i, in]` and output Hessians `[out_i, out_i]`.

        Raises:
            CompressError: an output Hessian that cannot be factored.
        """
        orders = [
            file_matrix.diagonal(h).argsort(descending=True, stable=True).to(w.device)
            for w, h in zip(weights, hessians, strict=True)
        ]
        found = zip(hessians, orders, names, strict=True)
        factors = [factorize(hessian, order, DAMPING, name) for hessian, order, name in found]
        return cls(orders, factors, [torch.zeros(w.shape, device=w.device) for w in weights])

    def visited(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors `[out_i, ...]` of each weight in visiting order."""
        return [each[order] for each, order in zip(rows, self.orders, strict=True)]

    def chunks(self) -> list[Chunk]:
        """Stretches in the order in which they are solved; those of several weights together."""
        limit, found = rows_at_a_time(self.errors[0].shape[1]), list[Chunk]()
        steps = [min(limit, -(-len(order) // STRETCHES)) for order in self.orders]
        for turn in range(max(-(-len(order) // step) for order, step in zip(self.orders, steps, strict=True))):
            parts: list[tuple[int, int, int]] = []
            for index, (order, step) in enumerate(zip(self.orders, steps, strict=True)):
                start, end = turn * step, min(len(order), (turn + 1) * step)
                if start >= end:
                    continue
                if sum(stop - begin for _, begin, stop in parts) + end - start > limit:
                    found.append(Chunk(tuple(parts)))
                    parts = []
                parts.append((index, start, end))
            found.append(Chunk(tuple(parts)))
        return found

    def wanted(self, chunk: Chunk) -> torch.Tensor:
        """What is to be added to the weights of a stretch, `[in, rows]`, so that they make up for the rows before."""
        parts = [self._shift(index, start, end) for index, start, end in chunk.parts]
        return torch.cat(parts).T.contiguous()

    def _shift(self, index: int, start: int, end: int) -> torch.Tensor:
        errors, factor = self.errors[index], self.factors[index]
        if start == 0:
            return torch.zeros_like(errors[:end])
        before = factor.panel(start, end) @ errors[:start]
        return torch.linalg.solve_triangular(factor.corner(start, end), before, upper=False)

    def note(self, chunk: Chunk, error: torch.Tensor) -> None:
        """What a stretch lost: weights less what is stored, `[in, rows]`."""
        chunk.unstack(error, self.errors)
