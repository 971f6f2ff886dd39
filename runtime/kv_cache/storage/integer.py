"""Integers of 2, 4 or 8 bits: keys on a grid a channel, values on grids a token (KIVI)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.config.settings import Natural, Settings
from runtime.kv_cache.storage.base import Axis, Codec, Packed, StateError, pack_codes, unpack_codes

#: Ranges that are tried, as shares of the whole one; narrower ones clip outliers and round the rest finer.
_SHRINK = {2: (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6), 4: (1.0, 0.95, 0.9, 0.85), 8: (1.0,)}
_SCALE = torch.float16
_LARGEST = torch.finfo(_SCALE).max


@dataclass(frozen=True)
class Integer(Settings, Codec):
    """x = zero + scale * code, asymmetric, range chosen by squared error (KIVI, arXiv 2402.02750).

    Parts: `codes` uint8 (see `pack_codes`), `scale` and `zero` float16: axis "channel": `[pages, size]`, one grid a channel of a page;
    axis "token": `[pages, PAGE, groups]`, one grid for `group` channels of a token.

    Attributes:
        bits: 2, 4 or 8.
        axis: what shares a grid.
        group: channels on one grid with axis "token"; 0: all of them.
    """

    bits: int
    axis: Axis
    group: Natural = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in _SHRINK:
            raise ValueError(f"{self.name}.bits must be one of {', '.join(map(str, _SHRINK))}, not {self.bits}")
        if self.axis not in ("token", "channel"):
            raise ValueError(f"{self.name}.axis must be token or channel, not {self.axis!r}")

    @property
    def name(self) -> str:
        """`int` and the number of bits."""
        return f"int{self.bits}"

    def groups(self, size: int) -> int:
        """Grids of a token (axis "token")."""
        return -(-size // self.group) if self.group else 1

    def encode(self, states: torch.Tensor) -> Packed:
        """Raises StateError where a state is not finite or beyond float16's largest."""
        exact = states.float()
        if not bool((exact.abs() <= _LARGEST).all()):
            text = f"a key or value is not finite or beyond {_LARGEST:.0f}, which {self.name} cannot hold"
            raise StateError(f"{text}; take keys: fp8 or plain (values likewise) where it is only large")
        pages, page, size = exact.shape
        if self.axis == "channel":
            rows = exact.transpose(1, 2)  # [pages, size, PAGE], a grid each
        else:
            count = self.groups(size)
            width = self.group or size
            padded = torch.nn.functional.pad(exact, (0, count * width - size), mode="constant")
            if count * width != size:  # what pads the last group must not widen its range
                padded[..., size:] = exact[..., -1:]
            rows = padded.view(pages, page, count, width)
        scale, zero = self._grid(rows)
        codes = self._round(rows, scale, zero)
        codes = codes.transpose(1, 2) if self.axis == "channel" else codes.flatten(-2)[..., :size]
        return Packed({"codes": pack_codes(codes, self.bits), "scale": scale.squeeze(-1), "zero": zero.squeeze(-1)})

    def decode(self, parts: dict[str, torch.Tensor], size: int, dtype: torch.dtype) -> torch.Tensor:
        """Codes times scale plus zero point, `[..., size]`."""
        codes = unpack_codes(parts["codes"], self.bits, size).float()
        scale, zero = parts["scale"].float(), parts["zero"].float()
        if self.axis == "channel":
            scale, zero = scale.unsqueeze(1), zero.unsqueeze(1)
        elif self.groups(size) > 1:
            scale, zero = (g.repeat_interleave(self.group, -1)[..., :size] for g in (scale, zero))
        return (codes * scale + zero).to(dtype)

    def _round(self, rows: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        step = scale.float()
        places = (rows - zero.float()) / step.masked_fill(step == 0, 1.0)
        return places.round().clamp(0, 2**self.bits - 1)

    def _grid(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero `[..., 1]` in float16 of the range with the least squared error."""
        low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
        best = [torch.full_like(low, float("inf")), low.to(_SCALE), low.to(_SCALE)]
        for share in _SHRINK[self.bits]:
            cut = (high - low) * (1 - share) / 2
            zero = (low + cut).to(_SCALE)
            # To the nearest float16, which is off by 2 ** -11 of it at most: the top of the range may be missed by an eighth of a step
            # of 8 bits, and less of fewer. Codes are then rounded on the grid as stored.
            scale = ((high - low) * share / (2**self.bits - 1)).to(_SCALE)
            restored = self._round(rows, scale, zero) * scale.float() + zero.float()
            error = (restored - rows).square().sum(-1, keepdim=True)
            better = error < best[0]
            best = [torch.where(better, new, old) for new, old in zip((error, scale, zero), best, strict=True)]
        return best[1], best[2]
