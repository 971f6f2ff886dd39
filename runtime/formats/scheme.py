"""Scheme of a compressed layer: representation of its weights, grid of its activations, sparsity pattern. Formats say how it is stored.

The dictionary form (`to_config` / `from_config`) uses the vocabulary of the compressed-tensors `quantization_config`, so that a group of
ours reads the same in `config.json`; `sparsity`, `representation` inside `weights`, and `outliers` inside `input_activations` are our
additions to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from runtime.formats import representation
from runtime.formats.activation_scheme import ActivationScheme
from runtime.formats.block_float import BlockFloat
from runtime.formats.dfloat11 import DFloat11
from runtime.formats.float8_block import Float8Block
from runtime.formats.grid import GridScheme
from runtime.formats.input_transform import InputTransform
from runtime.formats.k_quant import KQuant
from runtime.formats.representation import Representation, Tensors
from runtime.formats.row_codebook import RowCodebook
from runtime.formats.ternary_dictionary import TernaryDictionary
from runtime.formats.trellis import Trellis


def own_kind(arguments: Mapping[str, Any]) -> Representation | None:
    """The representation other than a grid that the `QuantizationArgs` of compressed-tensors mean for weights; ValueError where they
    contradict themselves."""
    return BlockFloat.from_arguments(arguments) or Float8Block.from_arguments(arguments)


def representation_of(config: Mapping[str, Any]) -> Representation:
    """The representation that `config["representation"]` names, with its fields; ValueError for a name or fields that mean nothing."""
    name = config["representation"]
    if not isinstance(name, str):
        raise ValueError(f"representation is {name!r}, expected a name")
    kinds: tuple[type[Representation], ...] = (KQuant, DFloat11, Trellis, RowCodebook, TernaryDictionary)
    own = {kind.name: kind for kind in kinds}
    return (own.get(name) or representation.find(name)).from_config(config)


@dataclass(frozen=True)
class Scheme:
    """Everything about one compressed linear layer. `weights=None`: values stay float and only zeros are removed.

    `sparsity` is None, `"unstructured"`, `"N:M"` (at most N non-zeros in each M consecutive columns), or `"block:RxC"`. With a `transform`
    weights and activations are those of another basis of the inputs.
    """

    weights: Representation | None = None
    activations: ActivationScheme | None = None
    sparsity: str | None = None
    transform: InputTransform | None = None

    @property
    def grid(self) -> GridScheme | None:
        """`weights` where they are on a grid with plain scales, which most kernels and other engines read; None otherwise."""
        return self.weights if type(self.weights) is GridScheme else None

    @property
    def has_global_scale(self) -> bool:
        """Whether the grid wants a global scale of the weights, and has none yet."""
        return (
            isinstance(self.weights, BlockFloat) and self.weights.scales == "e4m3" and self.weights.global_scale is None
        )

    def for_weights(self, weights: Sequence[torch.Tensor]) -> Scheme:
        """The scheme with the global scale of these weights `[out_i, in]`; itself where it has none, or has it already."""
        grid = self.weights
        return replace(self, weights=grid.with_global_scale(weights)) if isinstance(grid, GridScheme) else self

    def to_config(self) -> dict[str, Any]:
        """The `config_groups` entry without `targets` and `format`."""
        config: dict[str, Any] = {"weights": None, "input_activations": None, "output_activations": None}
        if self.weights is not None:
            config["weights"] = self.weights.to_config()
        if self.activations is not None:
            config["input_activations"] = self.activations.to_config()
        if self.sparsity is not None:
            config["sparsity"] = self.sparsity
        if self.transform is not None:
            config["input_transform"] = self.transform.to_config()
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Scheme:
        """Read one `config_groups` entry (ours or one that compressed-tensors wrote, with what it lets out filled in).

        Raises:
            ValueError: a representation that no installed package has, or fields that it does not take; scales of an unknown dtype.
        """
        weights: Representation | None = None
        w, a = config.get("weights"), config.get("input_activations")
        if w and "representation" in w:
            weights = representation_of(w)
        elif w and (found := own_kind(w)) is not None:
            weights = found
        elif w:
            group = w.get("group_size") if w["strategy"] == "group" else None
            weights = GridScheme(w["num_bits"], w["type"], w["symmetric"], w["strategy"], group)
        transform = config.get("input_transform")
        return cls(
            weights,
            ActivationScheme.from_arguments(a) if a else None,
            config.get("sparsity"),
            None if transform is None else InputTransform.from_config(transform),
        )


@dataclass
class CompressedWeight:
    """A solved weight, before bits are laid out. Solvers make it, formats pack and unpack it.

    Attributes:
        values: codes, `[out, in]` int8 (int grids), float8_e4m3fn (float grids), or as another representation has them; the weight
            itself where `scheme.weights` is None. Pruned positions hold the code of zero (`zero_point` or 0).
        scale, zero_point: parameters of a grid, see `GridScheme`; None for other weights.
        mask: bool `[out, in]`, True = kept; None when dense.
        dtype: dtype of the dequantized weight.
        own: parameters of block floats, or of another representation than a grid.
    """

    values: torch.Tensor
    scale: torch.Tensor | None
    zero_point: torch.Tensor | None
    mask: torch.Tensor | None
    scheme: Scheme
    dtype: torch.dtype
    own: Tensors = field(default_factory=dict)

    @classmethod
    def of(
        cls, codes: torch.Tensor, parameters: Tensors, mask: torch.Tensor | None, scheme: Scheme, dtype: torch.dtype
    ) -> CompressedWeight:
        """From codes and parameters of `scheme.weights`, whatever representation it is."""
        if scheme.grid is None:
            return cls(codes, None, None, mask, scheme, dtype, parameters)
        return cls(codes, parameters["scale"], parameters.get("zero_point"), mask, scheme, dtype)

    @property
    def parameters(self) -> Tensors:
        """Parameters of `scheme.weights`, by name."""
        if self.scheme.grid is None or self.scale is None:
            return self.own
        return {"scale": self.scale, **({} if self.zero_point is None else {"zero_point": self.zero_point})}

    @property
    def on_grid(self) -> tuple[GridScheme, torch.Tensor]:
        """Grid and scales of a weight that lies on a grid."""
        assert self.scheme.grid is not None
        assert self.scale is not None
        return self.scheme.grid, self.scale

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the matrix."""
        vector = 1 if self.scheme.weights is None else self.scheme.weights.vector
        return self.values.shape[0], self.values.shape[1] * vector

    def dequantize(self) -> torch.Tensor:
        """`[out, in]` in `dtype`. Pruned positions hold the code of zero, so they need no masking here."""
        if self.scheme.weights is None:
            return self.values.to(self.dtype)
        return self.scheme.weights.dequantize(self.values, self.parameters, self.dtype)
