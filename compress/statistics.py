"""What calibration knows about the input of a linear layer; collected once, used by pruning and quantization alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

#: Columns of the second moments that are accumulated together.
BLOCK = 512


@dataclass(frozen=True)
class Statistics:
    """Second moments and ranges of the inputs `x [tokens, in]` of a linear layer.

    Attributes:
        hessian: `[in, in]` float32, mean over tokens of `x x^T` (symmetric, positive semidefinite); None if not collected.
        abs_mean: `[in]` float32, mean of `|x|`.
        minimum: `[in]` float32, smallest value of every channel.
        maximum: `[in]` float32, largest value of every channel.
        square_mean: `[in]` float32, mean of `x^2` (the diagonal of the Hessian, available without it).
        tokens: how many tokens were seen.
        finite: False when a NaN or Inf was among the inputs.
    """

    hessian: torch.Tensor | None
    abs_mean: torch.Tensor
    minimum: torch.Tensor
    maximum: torch.Tensor
    square_mean: torch.Tensor
    tokens: int
    finite: bool = True

    @property
    def columns(self) -> int:
        """Width of the input."""
        return self.abs_mean.shape[0]

    def scaled(self, s: torch.Tensor) -> Statistics:
        """Statistics of `x / s` for positive `s [in]`: what the layer sees after scales moved into its weights."""
        s = s.to(self.abs_mean)
        hessian = None if self.hessian is None else self.hessian / s[:, None] / s[None, :]
        return replace(
            self,
            hessian=hessian,
            abs_mean=self.abs_mean / s,
            minimum=self.minimum / s,
            maximum=self.maximum / s,
            square_mean=self.square_mean / s.square(),
        )

    def to(self, device: torch.device | str) -> Statistics:
        """The same on a device."""
        return replace(
            self,
            hessian=None if self.hessian is None else self.hessian.to(device),
            abs_mean=self.abs_mean.to(device),
            minimum=self.minimum.to(device),
            maximum=self.maximum.to(device),
            square_mean=self.square_mean.to(device),
        )


class StatisticsCollector:
    """Accumulates `Statistics` batch by batch in float32; memory is one `[in, in]` matrix, whatever the number of tokens.

    `hessian=False` skips the second moments (methods that only need ranges).
    """

    def __init__(self, in_features: int, hessian: bool = True, device: torch.device | str = "cpu") -> None:
        self.in_features = in_features
        self._hessian = torch.zeros(in_features, in_features, device=device) if hessian else None
        self._abs = torch.zeros(in_features, device=device)
        self._square = torch.zeros(in_features, device=device)
        self._minimum = torch.full((in_features,), torch.inf, device=device)
        self._maximum = torch.full((in_features,), -torch.inf, device=device)
        self._tokens = 0
        self._finite = True

    @torch.no_grad()
    def add(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Add inputs `x [..., in]` of any float type; `mask [...]` (bool) tells which tokens are real, not padding."""
        x = x.reshape(-1, self.in_features)
        if mask is not None:
            x = x[mask.reshape(-1).to(x.device)]
        if x.shape[0] == 0:
            return
        x = x.to(self._abs)
        if self._hessian is not None:
            # Symmetric: what lies above the diagonal is enough, and `finish` fills in the rest.
            for start in range(0, self.in_features, BLOCK):
                end = min(start + BLOCK, self.in_features)
                self._hessian[start:end, start:].addmm_(x[:, start:end].T, x[:, start:])
        self._square += x.square().sum(0)
        low, high = torch.aminmax(x, dim=0)
        torch.minimum(self._minimum, low, out=self._minimum)
        torch.maximum(self._maximum, high, out=self._maximum)
        self._abs += x.abs().sum(0)
        self._tokens += x.shape[0]
        # NaN and Inf both survive in the extremes, so two small reductions are enough.
        self._finite = self._finite and bool(torch.isfinite(low).all() and torch.isfinite(high).all())

    def pool(self, reduce: Callable[[torch.Tensor, str], None]) -> None:
        """Add up what several collectors have seen, each in a process of its own.

        Args:
            reduce: makes a tensor, in place, the "sum", "min" or "max" of those that the processes call it with; all call it with
                tensors of the same shapes in the same order.
        """
        if self._hessian is not None:
            for start in range(0, self.in_features, BLOCK):
                end = min(start + BLOCK, self.in_features)
                panel = self._hessian[start:end, start:].contiguous()
                reduce(panel, "sum")
                self._hessian[start:end, start:] = panel
        sums = torch.stack([self._abs, self._square])
        reduce(sums, "sum")
        self._abs, self._square = sums[0], sums[1]
        reduce(self._minimum, "min")
        reduce(self._maximum, "max")
        counts = torch.tensor([self._tokens, int(not self._finite)], device=self._abs.device)
        reduce(counts, "sum")
        self._tokens, self._finite = int(counts[0]), not bool(counts[1])

    def finish(self) -> Statistics:
        """The means so far. The collector hands its buffers over and cannot be used afterwards."""
        tokens = max(self._tokens, 1)
        if self._hessian is not None:
            self._hessian /= tokens
            for start in range(0, self.in_features, BLOCK):
                end = min(start + BLOCK, self.in_features)
                corner = self._hessian[start:end, start:end]
                corner.copy_(corner.triu() + corner.triu(1).T)
                self._hessian[end:, start:end] = self._hessian[start:end, end:].T
        none = self._tokens == 0
        return Statistics(
            hessian=self._hessian,
            abs_mean=self._abs / tokens,
            minimum=torch.zeros_like(self._abs) if none else self._minimum,
            maximum=torch.zeros_like(self._abs) if none else self._maximum,
            square_mean=self._square / tokens,
            tokens=self._tokens,
            finite=self._finite,
        )
