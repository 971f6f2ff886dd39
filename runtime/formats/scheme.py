"""What a compressed weight *is*: number grid, activation grid, sparsity pattern. Formats say how it is stored.

The dictionary form (`to_config` / `from_config`) uses the vocabulary of the compressed-tensors `quantization_config`,
so that a group of ours reads the same in `config.json`; `sparsity` is our one addition to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from runtime.formats.float8 import widen

WeightStrategy = Literal["tensor", "channel", "group"]
NumberType = Literal["int", "float"]

_SLICE = 1 << 18  # weights dequantized at once on a CPU


@dataclass(frozen=True)
class WeightScheme:
    """Grid of a weight matrix `[out, in]`.

    `int`: `2 <= bits <= 8`, signed codes in `[-2^(bits-1), 2^(bits-1) - 1]`. `float`: `bits == 8`, float8 e4m3
    (maximum 448). `group_size` columns share one scale when `strategy == "group"`; the last group of a row may be
    shorter (ragged).
    """

    bits: int
    type: NumberType = "int"
    symmetric: bool = True
    strategy: WeightStrategy = "group"
    group_size: int | None = None

    def groups(self, columns: int) -> int:
        """How many scales one row of `columns` weights has."""
        if self.strategy == "group":
            assert self.group_size is not None
            return -(-columns // self.group_size)
        return 1

    @property
    def code_range(self) -> tuple[int, int]:
        """Smallest and largest integer code (int grids only)."""
        return -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1


@dataclass(frozen=True)
class ActivationScheme:
    """Grid of the input of a linear layer: `token` = one scale a token, made at run time; `tensor` = one scale,
    dynamic or static.
    """

    bits: int = 8
    type: NumberType = "int"
    symmetric: bool = True
    dynamic: bool = True
    strategy: Literal["token", "tensor"] = "token"


@dataclass(frozen=True)
class Scheme:
    """Everything about one compressed linear layer. `weights=None`: values stay float and only zeros are removed.

    `sparsity` is None, `"unstructured"`, `"N:M"` (at most N non-zeros in each M consecutive columns), or `"block:RxC"`.
    """

    weights: WeightScheme | None = None
    activations: ActivationScheme | None = None
    sparsity: str | None = None

    def to_config(self) -> dict[str, Any]:
        """The `config_groups` entry without `targets` and `format`."""
        config: dict[str, Any] = {"weights": None, "input_activations": None, "output_activations": None}
        if self.weights is not None:
            config["weights"] = {
                "num_bits": self.weights.bits, "type": self.weights.type, "symmetric": self.weights.symmetric,
                "strategy": self.weights.strategy, "group_size": self.weights.group_size, "dynamic": False,
            }  # fmt: skip
        if self.activations is not None:
            config["input_activations"] = {
                "num_bits": self.activations.bits, "type": self.activations.type, "symmetric":
                self.activations.symmetric, "strategy": self.activations.strategy, "dynamic":
                self.activations.dynamic, "group_size": None,
            }  # fmt: skip
        if self.sparsity is not None:
            config["sparsity"] = self.sparsity
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Scheme:
        """Read one `config_groups` entry (ours or one that compressed-tensors wrote)."""
        weights = activations = None
        if config.get("weights"):
            w = config["weights"]
            weights = WeightScheme(
                w["num_bits"], w.get("type", "int"), w.get("symmetric", True), w["strategy"], w.get("group_size")
            )
            if weights.strategy != "group":
                weights = WeightScheme(weights.bits, weights.type, weights.symmetric, weights.strategy, None)
        if config.get("input_activations"):
            a = config["input_activations"]
            activations = ActivationScheme(
                a["num_bits"],
                a.get("type", "int"),
                a.get("symmetric", True),
                bool(a.get("dynamic", False)),
                a["strategy"],
            )
        return cls(weights, activations, config.get("sparsity"))


@dataclass
class CompressedWeight:
    """A solved weight, before bits are laid out. Solvers make it, formats pack and unpack it.

    Attributes:
        values: `[out, in]`; int8 codes (int grids), float8_e4m3fn (float grids) or the weight itself (`scheme.weights
        is None`).
            Pruned positions hold the code of zero (`zero_point` or 0).
        scale: `[out, groups]` (`[out, 1]` for channel, `[1]` for tensor), in the model's dtype; None for float values.
        zero_point: int8, shape of `scale`, in the signed code range; None when symmetric.
        mask: bool `[out, in]`, True = kept; None when dense.
        dtype: dtype of the dequantized weight.
    """

    values: torch.Tensor
    scale: torch.Tensor | None
    zero_point: torch.Tensor | None
    mask: torch.Tensor | None
    scheme: Scheme
    dtype: torch.dtype

    def dequantize(self) -> torch.Tensor:
        """`[out, in]` in `dtype`: `(values - zero_point) * scale`, computed in `scale.dtype` as compressed-tensors does, or in
        `dtype` where that is wider.

        Pruned positions hold the code of zero, so they need no masking here.
        """
        if self.scheme.weights is None:
            return self.values.to(self.dtype)
        rows, columns = self.values.shape
        # On a CPU in slices that stay in the cache, which is several times faster; elsewhere at once.
        step = max(1, _SLICE // max(1, columns)) if self.values.device.type == "cpu" else max(1, rows)
        out = torch.empty(rows, columns, dtype=self.dtype, device=self.values.device)
        for start in range(0, rows, step):
            out[start : start + step] = self._dequantize_rows(slice(start, start + step))
        return out

    def _dequantize_rows(self, part: slice) -> torch.Tensor:
        weights, values = self.scheme.weights, self.values[part]
        assert weights is not None
        assert self.scale is not None
        scale, zero = self.scale.to(torch.promote_types(self.scale.dtype, self.dtype)), self.zero_point
        if weights.strategy != "tensor":
            scale, zero = scale[part], None if zero is None else zero[part]
        rows, columns = values.shape
        dense = widen(values, scale.dtype) if weights.type == "float" else values.to(scale.dtype)
        if weights.strategy == "group":
            group = weights.group_size
            assert group is not None
            if columns % group == 0:  # broadcasting is several times faster than spreading the scales
                dense, scale = dense.view(rows, columns // group, group), scale.unsqueeze(-1)
                zero = None if zero is None else zero.unsqueeze(-1)
            else:
                scale = scale.repeat_interleave(group, 1)[:, :columns]
                zero = None if zero is None else zero.repeat_interleave(group, 1)[:, :columns]
        if zero is not None:
            dense = dense - zero.to(scale.dtype)
        return (dense * scale).view(rows, columns)
