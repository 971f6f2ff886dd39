"""Masks and grids that training must not undo."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

from compress.core.files import written_beside
from compress.quantize.grid import Grid
from runtime.errors import ArtifactError
from runtime.formats.scheme import CompressedWeight, Scheme

HELD = "held.safetensors"
_MASK, _SCALE, _ZERO = "mask", "scale", "zero"


@dataclass(frozen=True)
class Held:
    """Of one layer.

    Attributes:
        mask: bool `[out, in]`, True: kept; None: nothing is removed.
        scheme: of the whole; its `weights` say what grid it is.
        scale, zero: of its grid, float32, as of `compress.quantize.grid.Grid`; None: it is not quantized.
    """

    mask: torch.Tensor | None = None
    scheme: Scheme = field(default_factory=Scheme)
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None

    @classmethod
    def of(cls, weight: CompressedWeight) -> Held:
        """Of what a solver gave. Without a mask of its own a weight that was pruned has one by its zeros."""
        mask = weight.mask
        if mask is None and weight.scheme.sparsity is not None:
            mask = weight.dequantize() != 0
        if weight.scheme.grid is None:
            return cls(mask, weight.scheme)
        assert weight.scale is not None
        scale = weight.scale.float().reshape(-1, weight.scale.shape[-1])
        zero = None if weight.zero_point is None else weight.zero_point.float().reshape(scale.shape)
        return cls(mask, weight.scheme, scale, zero)

    @property
    def grid(self) -> Grid | None:
        """The grid, or None."""
        if self.scale is None or self.scheme.grid is None:
            return None
        return Grid(self.scheme.grid, self.scale, self.zero)


def save(file: Path, held: dict[str, Held]) -> None:
    """Write them as safetensors; masks take a bit a weight."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for name, own in held.items():
        if own.mask is not None:
            tensors[f"{name}|{_MASK}"] = _packed(own.mask)
            tensors[f"{name}|shape"] = torch.tensor(own.mask.shape)
        if own.scale is not None:
            tensors[f"{name}|{_SCALE}"] = own.scale.cpu()
        if own.zero is not None:
            tensors[f"{name}|{_ZERO}"] = own.zero.cpu()
    schemes = {name: own.scheme.to_config() for name, own in held.items()}
    with written_beside(file) as temporary:
        save_file(tensors, temporary, metadata={"schemes": json.dumps(schemes, sort_keys=True)})


def load(file: Path) -> dict[str, Held]:
    """What `save` wrote; ArtifactError where it is damaged."""
    from safetensors import safe_open

    try:
        with safe_open(file, framework="pt") as stream:
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 - no mapping
            schemes = json.loads(stream.metadata()["schemes"])
    except Exception as error:  # safetensors raises its own type
        raise ArtifactError(f"{file} is damaged: {error}") from error
    found = {}
    for name, scheme in schemes.items():
        mask = tensors.get(f"{name}|{_MASK}")
        if mask is not None:
            rows, columns = tensors[f"{name}|shape"].tolist()
            mask = _unpacked(mask, rows, columns)
        found[name] = Held(
            mask, Scheme.from_config(scheme), tensors.get(f"{name}|{_SCALE}"), tensors.get(f"{name}|{_ZERO}")
        )
    return found


def _packed(mask: torch.Tensor) -> torch.Tensor:
    import numpy as np

    return torch.from_numpy(np.packbits(mask.cpu().numpy().reshape(-1)))


def _unpacked(bits: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    import numpy as np

    return torch.from_numpy(np.unpackbits(bits.numpy(), count=rows * columns).astype(bool)).view(rows, columns)
