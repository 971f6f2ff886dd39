"""What calibration knows about the input of a linear layer; collected once, used by pruning and quantization alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from compress import mapped

#: Columns of the second moments that are accumulated together.
BLOCK = 512
#: Elements of the inputs that are held in float32.
ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Statistics:
    """Second moments and ranges of the inputs `x [tokens, in]` of a linear layer.

    Attributes:
        hessian: `[in, in]` float32, mean over tokens of `x x^T` (symmetric, positive semidefinite), in memory or in a file
            (`compress.mapped`); None if not collected.
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
        hessian = None
        if self.hessian is not None:
            hessian = mapped.empty_like(self.hessian)
            for rows in mapped.panels(self.columns, BLOCK):
                torch.div(self.hessian[rows], s[rows, None], out=hessian[rows]).div_(s[None, :])
                mapped.let_go(self.hessian)
                mapped.let_go(hessian)
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


@dataclass
class Sums:
    """What a collector has added up, before it becomes means. To join what several collectors saw, change the tensors in place.

    Attributes:
        hessian: `[in, in]` float32, sum of `x x^T`, only what is on the diagonal and above it, in memory or in a file; None: not wanted.
        absolute, square: `[in]` float32, sums of `|x|` and `x^2`.
        minimum, maximum: `[in]` float32; infinite before the first token.
        tokens, finite: as in `Statistics`.
    """

    hessian: torch.Tensor | None
    absolute: torch.Tensor
    square: torch.Tensor
    minimum: torch.Tensor
    maximum: torch.Tensor
    tokens: int = 0
    finite: bool = True

    def panels(self) -> Iterator[torch.Tensor]:
        """The Hessian, some whole rows at a time, to be changed in place; those of one in a file are resident only in turn."""
        if self.hessian is None:
            return
        for rows in mapped.panels(self.hessian.shape[0], BLOCK):
            yield self.hessian[rows]
            mapped.let_go(self.hessian)


class StatisticsCollector:
    """Accumulates `Statistics` batch by batch in float32; memory is one `[in, in]` matrix, whatever the number of tokens.

    Args:
        hessian: False skips the second moments (methods that only need ranges).
        directory: they are in a file there (CPU only); None: in memory.

    Attributes:
        sums: what was added so far.
    """

    def __init__(
        self,
        in_features: int,
        hessian: bool = True,
        device: torch.device | str = "cpu",
        directory: Path | None = None,
    ) -> None:
        self.in_features = in_features
        self.sums = Sums(
            mapped.zeros(in_features, in_features, device, directory) if hessian else None,
            torch.zeros(in_features, device=device),
            torch.zeros(in_features, device=device),
            torch.full((in_features,), torch.inf, device=device),
            torch.full((in_features,), -torch.inf, device=device),
        )

    @torch.no_grad()
    def add(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Add inputs `x [..., in]` of any float type; `mask [...]` (bool) tells which tokens are real, not padding."""
        x = x.reshape(-1, self.in_features)
        if mask is not None:
            x = x[mask.reshape(-1).to(x.device)]
        for part in x.split(max(1, ELEMENTS // self.in_features)):
            self._add(part.to(self.sums.absolute))

    def _add(self, x: torch.Tensor) -> None:
        """Inputs `[tokens, in]` in float32, where the sums are."""
        sums = self.sums
        if x.shape[0] == 0:
            return
        if sums.hessian is not None:
            # Symmetric: what lies above the diagonal is enough, and `finish` fills in the rest.
            for rows in mapped.panels(self.in_features, BLOCK):
                sums.hessian[rows, rows.start :].addmm_(x[:, rows].T, x[:, rows.start :])
                mapped.let_go(sums.hessian)
        sums.square += x.square().sum(0)
        low, high = torch.aminmax(x, dim=0)
        torch.minimum(sums.minimum, low, out=sums.minimum)
        torch.maximum(sums.maximum, high, out=sums.maximum)
        sums.absolute += x.abs().sum(0)
        sums.tokens += x.shape[0]
        # NaN and Inf both survive in the extremes, so two small reductions are enough.
        sums.finite = sums.finite and bool(torch.isfinite(low).all() and torch.isfinite(high).all())

    def finish(self) -> Statistics:
        """The means so far. The collector hands its buffers over and cannot be used afterwards."""
        sums, hessian = self.sums, self.sums.hessian
        tokens, none = max(sums.tokens, 1), sums.tokens == 0
        for rows in mapped.panels(self.in_features, BLOCK) if hessian is not None else ():
            assert hessian is not None
            hessian[rows, rows.start :] /= tokens
            corner = hessian[rows, rows]
            corner.copy_(corner.triu() + corner.triu(1).T)
            for below in mapped.panels(self.in_features - rows.stop, BLOCK):
                others = slice(rows.stop + below.start, rows.stop + below.stop)
                hessian[others, rows] = hessian[rows, others].T
                mapped.let_go(hessian)
        return Statistics(
            hessian=hessian,
            abs_mean=sums.absolute / tokens,
            minimum=torch.zeros_like(sums.minimum) if none else sums.minimum,
            maximum=torch.zeros_like(sums.maximum) if none else sums.maximum,
            square_mean=sums.square / tokens,
            tokens=sums.tokens,
            finite=sums.finite,
        )
