"""Constraints of compressed weights, masks and grids, that training and later stages must keep."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from compress.core.files import written_beside
from compress.quantize.grid import Grid
from runtime.errors import ArtifactError
from runtime.formats.scheme import CompressedWeight, Scheme

CONSTRAINTS = "held.safetensors"
"""File of a checkpoint that recovery has written: the constraints of its layers."""


@dataclass(frozen=True)
class WeightConstraint:
    """Mask and grid of one layer.

    Attributes:
        mask: bool `[out, in]`, True = kept; None: dense.
        scheme: of the compressed weight.
        scale, zero: of its grid, float32, as of `compress.quantize.grid.Grid`; None: it is not quantized.
    """

    mask: torch.Tensor | None = None
    scheme: Scheme = field(default_factory=Scheme)
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None

    @classmethod
    def of(cls, weight: CompressedWeight) -> WeightConstraint:
        """The constraint of a solved weight. A pruned weight without a mask is masked where it is zero."""
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

    def restricted(self, mask: bool, grid: bool) -> WeightConstraint:
        """Only the mask, only the grid, or both."""
        found = self if mask else replace(self, mask=None)
        return found if grid else replace(found, scale=None, zero=None)

    def to(self, device: torch.device) -> WeightConstraint:
        """The same on a device."""
        tensors = {key: getattr(self, key) for key in ("mask", "scale", "zero")}
        return replace(self, **{key: value.to(device) for key, value in tensors.items() if value is not None})


def save_constraints(file: Path, constraints: dict[str, WeightConstraint]) -> None:
    """Write {layer: constraint} as safetensors; a mask takes one bit a weight."""
    tensors: dict[str, torch.Tensor] = {}
    for name, own in constraints.items():
        if own.mask is not None:
            tensors[f"{name}|mask"] = torch.from_numpy(np.packbits(own.mask.cpu().numpy().reshape(-1)))
            tensors[f"{name}|shape"] = torch.tensor(own.mask.shape)
        for key, value in (("scale", own.scale), ("zero", own.zero)):
            if value is not None:
                tensors[f"{name}|{key}"] = value.cpu()
    schemes = {name: own.scheme.to_config() for name, own in constraints.items()}
    with written_beside(file) as temporary:
        save_file(tensors, temporary, metadata={"schemes": json.dumps(schemes, sort_keys=True)})


def load_constraints(directory: Path) -> dict[str, WeightConstraint]:
    """{layer: constraint} of a checkpoint, empty where it has none; ArtifactError where the file is damaged."""
    file = directory / CONSTRAINTS
    if not file.is_file():
        return {}
    try:
        with safe_open(file, framework="pt") as stream:
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 - no mapping
            schemes = json.loads(stream.metadata()["schemes"])
    except Exception as error:  # safetensors raises its own type
        raise ArtifactError(f"{file} is damaged: {error}") from error
    found = {}
    for name, scheme in schemes.items():
        mask, scale, zero = (tensors.get(f"{name}|{key}") for key in ("mask", "scale", "zero"))
        if mask is not None:
            rows, columns = tensors[f"{name}|shape"].tolist()
            bits = np.unpackbits(mask.numpy(), count=rows * columns)
            mask = torch.from_numpy(bits.astype(bool)).view(rows, columns)
        found[name] = WeightConstraint(mask, Scheme.from_config(scheme), scale, zero)
    return found
