"""Calibration statistics of a linear layer's input, collected once for pruning and quantization alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from compress.core import file_matrix

#: Columns of the second moments that are accumulated together.
BLOCK = 512
#: Inputs that are kept where a method asks for samples.
SAMPLES = 2048
#: Elements of the inputs that are converted to float32 at a time.
ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Statistics:
    """Second moments and ranges of the inputs `x [tokens, in]` of a linear layer.

    Attributes:
        hessian: `[in, in]` float32, mean over tokens of `x x^T` (symmetric, positive semidefinite), in memory or in a file
            (`compress.core.file_matrix`); None if not collected.
        abs_mean: `[in]` float32, mean of `|x|`.
        minimum: `[in]` float32, smallest value of every channel.
        maximum: `[in]` float32, largest value of every channel.
        square_mean: `[in]` float32, mean of `x^2` (the diagonal of the Hessian, available without it).
        drift: `[in, in]` float32, mean of `x (o - x)^T`, where `o` is what the layer reads in the original model, at the same place as the
            Hessian; None if not collected. `drifted`: `[in]` float32, mean of `(o - x)^2`.
        residual: `[out, in]` float32, mean of `(p - r) x^T`, where the layer's output is added to `r`, and to `p` in the original model;
            None if not collected. `residual_square`: `[out]` float32, mean of `(p - r)^2`.
        samples: `[n, in]` float32, some of the inputs, drawn at random; None if not collected.
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
    drift: torch.Tensor | None = None
    drifted: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    residual_square: torch.Tensor | None = None
    samples: torch.Tensor | None = None

    @property
    def columns(self) -> int:
        """Width of the input."""
        return self.abs_mean.shape[0]

    def scaled(self, s: torch.Tensor) -> Statistics:
        """Statistics of `x / s` for positive `s [in]`: what the layer sees after scales moved into its weights."""
        s = s.to(self.abs_mean)
        found: dict[str, Any] = {name: getattr(self, name) / s for name in ("abs_mean", "minimum", "maximum")}
        found |= {name: _scaled(getattr(self, name), s) for name in ("hessian", "drift")}
        drifted = None if self.drifted is None else self.drifted / s.square()
        residual, samples = (None if each is None else each / s for each in (self.residual, self.samples))
        return replace(
            self,
            square_mean=self.square_mean / s.square(),
            drifted=drifted,
            residual=residual,
            samples=samples,
            **found,
        )

    def transformed(self, transform: Callable[[torch.Tensor], torch.Tensor]) -> Statistics:
        """Statistics of `x T`, where `transform` gives `rows T` for rows `[n, in]`, without drift and residual.

        Ranges and means are those of the samples; NaN where none were kept.
        """
        hessian = None if self.hessian is None else _transformed(self.hessian, transform)
        samples = None if self.samples is None else transform(self.samples)
        seen = torch.full_like(self.abs_mean, torch.nan)[None] if samples is None else samples
        if len(seen) == 0:
            seen = torch.zeros_like(self.abs_mean)[None]
        square = seen.square().mean(0) if hessian is None else hessian.diagonal().clone()
        return Statistics(
            hessian, seen.abs().mean(0), seen.amin(0), seen.amax(0), square, self.tokens, self.finite, samples=samples
        )

    def to(self, device: torch.device | str) -> Statistics:
        """The same on a device."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in tensors.items()}
        return replace(self, **moved)


class StatisticsCollector:
    """Accumulates `Statistics` batch by batch in float32; memory is one `[in, in]` matrix, whatever the number of tokens.

    Args:
        hessian: False skips the second moments (methods that only need ranges).
        directory: they are in a file there (CPU only); None: in memory.
        drift: collect it too; every `add` is then given the original model's inputs.
        outputs: of the layer, where the drift of what its output is added to is collected too; 0: it is not.
        samples: inputs that are kept, at most.
    """

    def __init__(
        self,
        in_features: int,
        hessian: bool = True,
        device: torch.device | str = "cpu",
        directory: Path | None = None,
        drift: bool = False,
        outputs: int = 0,
        samples: int = 0,
    ) -> None:
        self.in_features = in_features
        self._drift = file_matrix.zeros(in_features, in_features, device, directory) if drift else None
        self._drifted = torch.zeros(in_features, device=device)
        self._residual = file_matrix.zeros(outputs, in_features, device, directory) if outputs else None
        self._residual_square = torch.zeros(outputs, device=device)
        self._hessian = file_matrix.zeros(in_features, in_features, device, directory) if hessian else None
        self._abs = torch.zeros(in_features, device=device)
        self._square = torch.zeros(in_features, device=device)
        self._minimum = torch.full((in_features,), torch.inf, device=device)
        self._maximum = torch.full((in_features,), -torch.inf, device=device)
        self._tokens = 0
        self._finite = True
        self._most = samples
        self._samples = torch.zeros(0, in_features, device=device)
        self._draws = torch.zeros(0, device=device)
        self._generator = torch.Generator().manual_seed(in_features)

    @torch.no_grad()
    def add(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        original: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> None:
        """Add inputs `x [..., in]` of any float type; `mask [...]` (bool) tells which tokens are real, not padding; `original`: what the
        layer reads in their place in the original model; `residual [..., out]`: how far what its output is added to is from that there.
        """
        x, others = self._tokens_of(x, mask), None if original is None else self._tokens_of(original, mask)
        sums = None if residual is None else self._tokens_of(residual, mask)
        step = max(1, ELEMENTS // self.in_features)
        for start in range(0, x.shape[0], step):
            part = x[start : start + step].to(self._abs)
            self._add(part)
            if self._most:
                self._add_samples(part)
            if self._drift is not None:
                assert others is not None
                self._add_drift(part, others[start : start + step].to(self._abs))
            if self._residual is not None:
                assert sums is not None
                self._add_residual(part, sums[start : start + step].to(self._abs))

    def _tokens_of(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = x.reshape(-1, x.shape[-1])
        return x if mask is None else x[mask.reshape(-1).to(x.device)]

    def _add_samples(self, x: torch.Tensor, draws: torch.Tensor | None = None) -> None:
        """Keep the inputs with the largest random numbers `draws` (None: new ones): any is among them as likely as any other."""
        if draws is None:
            draws = torch.rand(len(x), generator=self._generator).to(self._draws)
        draws = torch.cat([self._draws, draws])
        kept = draws.topk(min(self._most, len(draws))).indices.sort().values
        self._samples, self._draws = torch.cat([self._samples, x])[kept], draws[kept]

    def _pool_samples(self, reduce: Callable[[torch.Tensor, str], None], rank: int, size: int) -> None:
        """Keep the same of the samples of all processes in each of them."""
        own, draws = self._samples, self._draws
        self._samples, self._draws = own[:0], draws[:0]
        for other in range(size):
            sent = torch.zeros(self._most, self.in_features + 1, device=own.device)
            if other == rank:
                sent[: len(own), :-1], sent[: len(own), -1] = own, 1 + draws
            reduce(sent, "sum")
            there = sent[:, -1] > 0
            self._add_samples(sent[there, :-1], sent[there, -1] - 1)

    def _add_drift(self, x: torch.Tensor, original: torch.Tensor) -> None:
        assert self._drift is not None
        moved = original - x
        self._drifted += moved.square().sum(0)
        self._finite = self._finite and bool(torch.isfinite(self._drifted.sum()))
        for rows in file_matrix.panels(self.in_features, BLOCK):
            self._drift[rows].addmm_(x[:, rows].T, moved)
            file_matrix.let_go(self._drift)

    def _add_residual(self, x: torch.Tensor, moved: torch.Tensor) -> None:
        assert self._residual is not None
        self._residual_square += moved.square().sum(0)
        self._finite = self._finite and bool(torch.isfinite(self._residual_square.sum()))
        for rows in file_matrix.panels(moved.shape[1], BLOCK):
            self._residual[rows].addmm_(moved[:, rows].T, x)
            file_matrix.let_go(self._residual)

    def _add(self, x: torch.Tensor) -> None:
        """Inputs `[tokens, in]` in float32, where the sums are."""
        if self._hessian is not None:
            # Symmetric: what lies above the diagonal is enough, and `finish` fills in the rest.
            for rows in file_matrix.panels(self.in_features, BLOCK):
                self._hessian[rows, rows.start :].addmm_(x[:, rows].T, x[:, rows.start :])
                file_matrix.let_go(self._hessian)
        self._square += x.square().sum(0)
        low, high = x.amin(0), x.amax(0)  # several times faster than torch.aminmax along a dimension
        torch.minimum(self._minimum, low, out=self._minimum)
        torch.maximum(self._maximum, high, out=self._maximum)
        self._abs += x.abs().sum(0)
        self._tokens += x.shape[0]
        # NaN and Inf both survive in the extremes, so two small reductions are enough.
        self._finite = self._finite and bool(torch.isfinite(low).all() and torch.isfinite(high).all())

    def pool(self, reduce: Callable[[torch.Tensor, str], None], rank: int, size: int) -> None:
        """Add up what several collectors have seen, each in a process of its own.

        Args:
            reduce: makes a tensor, in place, the "sum", "min" or "max" of those that the processes call it with; all call it with
                tensors of the same shapes in the same order.
            rank, size: number of this process, and of all.
        """
        if self._hessian is not None:
            for start in range(0, self.in_features, BLOCK):
                end = min(start + BLOCK, self.in_features)
                panel = self._hessian[start:end, start:].contiguous()
                reduce(panel, "sum")
                self._hessian[start:end, start:] = panel
                file_matrix.let_go(self._hessian)
        for moments in (self._drift, self._residual):
            if moments is None:
                continue
            for rows in file_matrix.panels(moments.shape[0], BLOCK):
                panel = moments[rows].contiguous()
                reduce(panel, "sum")
                moments[rows] = panel
                file_matrix.let_go(moments)
        reduce(self._residual_square, "sum")
        sums = torch.stack([self._abs, self._square, self._drifted])
        reduce(sums, "sum")
        self._abs, self._square, self._drifted = sums
        reduce(self._minimum, "min")
        reduce(self._maximum, "max")
        counts = torch.tensor([self._tokens, int(not self._finite)], device=self._abs.device)
        reduce(counts, "sum")
        self._tokens, self._finite = int(counts[0]), not bool(counts[1])
        if self._most:
            self._pool_samples(reduce, rank, size)

    def finish(self) -> Statistics:
        """The means so far. The collector hands its buffers over and cannot be used afterwards."""
        tokens = max(self._tokens, 1)
        if self._hessian is not None:
            for rows in file_matrix.panels(self.in_features, BLOCK):
                self._hessian[rows, rows.start :] /= tokens
                corner = self._hessian[rows, rows]
                corner.copy_(corner.triu() + corner.triu(1).T)
                for below in file_matrix.panels(self.in_features - rows.stop, BLOCK):
                    others = slice(rows.stop + below.start, rows.stop + below.stop)
                    self._hessian[others, rows] = self._hessian[rows, others].T
                    file_matrix.let_go(self._hessian)
        for moments in (self._drift, self._residual):
            for rows in file_matrix.panels(0 if moments is None else moments.shape[0], BLOCK):
                assert moments is not None
                moments[rows] /= tokens
                file_matrix.let_go(moments)
        none = self._tokens == 0
        return Statistics(
            hessian=self._hessian,
            abs_mean=self._abs / tokens,
            minimum=torch.zeros_like(self._abs) if none else self._minimum,
            maximum=torch.zeros_like(self._abs) if none else self._maximum,
            square_mean=self._square / tokens,
            tokens=self._tokens,
            finite=self._finite,
            drift=self._drift,
            drifted=None if self._drift is None else self._drifted / tokens,
            residual=self._residual,
            residual_square=None if self._residual is None else self._residual_square / tokens,
            samples=self._samples if self._most else None,
        )


def _transformed(hessian: torch.Tensor, transform: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Second moments `T^T H T` of `x T`."""
    half, found = file_matrix.empty_like(hessian), file_matrix.empty_like(hessian)
    for source, target in ((hessian, half), (half, found)):
        for rows in file_matrix.panels(len(hessian), BLOCK):
            target[rows] = transform(source[:, rows].T.contiguous())
            for matrix in (source, target):
                file_matrix.let_go(matrix)
    return found


def _scaled(moments: torch.Tensor | None, s: torch.Tensor) -> torch.Tensor | None:
    """Second moments `[in, in]` of `x / s`."""
    if moments is None:
        return None
    found = file_matrix.empty_like(moments)
    for rows in file_matrix.panels(len(s), BLOCK):
        torch.div(moments[rows], s[rows, None], out=found[rows]).div_(s[None, :])
        file_matrix.let_go(moments)
        file_matrix.let_go(found)
    return found
