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
        grid: its parameters float32; None: it is not quantized.
    """

    mask: torch.Tensor | None = None
    scheme: Scheme = field(default_factory=Scheme)
    grid: Grid | None = None

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
        return cls(mask, weight.scheme, Grid(weight.scheme.grid, scale, zero))

    def restricted(self, mask: bool, grid: bool) -> WeightConstraint:
        """Only the mask, only the grid, or both."""
        return replace(self, mask=self.mask if mask else None, grid=self.grid if grid else None)

    def to(self, device: torch.device) -> WeightConstraint:
        """The same on a device."""
        mask = None if self.mask is None else self.mask.to(device)
        return replace(self, mask=mask, grid=None if self.grid is None else self.grid.map(lambda p: p.to(device)))


def save_constraints(file: Path, constraints: dict[str, WeightConstraint]) -> None:
    """Write {layer: constraint} as safetensors; a mask takes one bit a weight."""
    tensors: dict[str, torch.Tensor] = {}
    for name, own in constraints.items():
        if own.mask is not None:
            tensors[f"{name}|mask"] = torch.from_numpy(np.packbits(own.mask.cpu().numpy().reshape(-1)))
            tensors[f"{name}|shape"] = torch.tensor(own.mask.shape)
        if own.grid is not None:
            tensors[f"{name}|scale"] = own.grid.scale.cpu()
        if own.grid is not None and own.grid.zero is not None:
            tensors[f"{name}|zero"] = own.grid.zero.cpu()
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
    for name, config in schemes.items():
        mask, scale, zero = (tensors.get(f"{name}|{key}") for key in ("mask", "scale", "zero"))
        if mask is not None:
            rows, columns = tensors[f"{name}|shape"].tolist()
            bits = np.unpackbits(mask.numpy(), count=rows * columns)
            mask = torch.from_numpy(bits.astype(bool)).view(rows, columns)
        scheme = Scheme.from_config(config)
        grid = None if scheme.grid is None or scale is None else Grid(scheme.grid, scale, zero)
        found[name] = WeightConstraint(mask, scheme, grid)
    return found
