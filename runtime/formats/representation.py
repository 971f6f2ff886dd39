"""Representation of a weight matrix: the values it may take, how they are found, and the tensors that hold them on disk."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch

from runtime.config.plugins import entries
from runtime.config.settings import configure
from runtime.formats.cut import Axes
from runtime.formats.float8 import indexable

Shape = tuple[int, int]
Tensors = dict[str, torch.Tensor]
GROUP = "compress.formats"


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor on disk.

    Attributes:
        axes: which rows and columns of the matrix its dimensions hold, so that ranks of tensor parallelism can read a part of it; None:
            it cannot be cut.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: Axes | None = field(default=None, compare=False)

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return math.prod(self.shape) * self.dtype.itemsize


class Representation(ABC):
    """The values that a weight matrix `[out, in]` may take, and how they are stored.

    A subclass is a frozen dataclass. Its fields (numbers, strings, booleans) are what a recipe's `scheme` and `config.json` say beside
    `representation: NAME`; the constructor raises ValueError for fields that mean nothing. A package of its own registers the class under
    the entry-point group `compress.formats`.

    *Codes* are integers `[out, in / vector]`, one for every `vector` columns of a row. *Parameters* are tensors by name (scales, a
    codebook), fitted to one matrix and stored with it.

    Attributes:
        name: word of the recipe and of `config.json`, and name of the storage format made of `tensors`.
        bits: bits of code for each weight, parameters not counted.
        vector: consecutive columns that are rounded together.
        group_size: columns of a row that share a scale; None: there is no such number.
        seconds: single-core time to round one weight, beyond that of a grid; for the estimates of `compress plan`.
        refit_products: about how many products with the second moments `refit` takes, and the caller to see what it gained; likewise.
        row_by_row: the rows of every tensor on disk are those of the matrix, so that some of them need no decoding of all.
        lossless: it stores the weights of the model bit for bit, so that no method has anything to choose.
        counted: the tensor on disk whose length depends on the weights and not on their shape alone; None: there is none.
    """

    name: ClassVar[str]
    row_by_row: ClassVar[bool] = False
    lossless: ClassVar[bool] = False
    counted: ClassVar[str | None] = None
    seconds: ClassVar[float] = 0.0
    refit_products: ClassVar[int] = 0
    bits: float
    vector: int = 1
    group_size: int | None = None

    @property
    def rows_apart(self) -> bool:
        """Whether rows share no parameters: every parameter is then `[out, ...]`, and rows can be solved separately."""
        return self.row_by_row

    def why_not(self, shape: Shape) -> str | None:
        """The reason a matrix of this shape (out, in) cannot be represented; None when it can."""
        return f"rows of {shape[1]} weights are not whole vectors of {self.vector}" if shape[1] % self.vector else None

    def why_not_dtype(self, dtype: torch.dtype) -> str | None:
        """The reason weights of a model of this dtype cannot be represented; None when they can."""
        return None

    def why_not_cut(self) -> str | None:
        """The reason why ranks of tensor parallelism cannot read parts of it, for users; None: the axes of `tensors` tell."""
        return None

    def for_weight(self, weight: torch.Tensor) -> Representation:
        """This with the options that suit one matrix `[out, in]` of any float dtype, such as the width of codes."""
        return self

    @abstractmethod
    def describe(self) -> str:
        """In a few words, for plans and reports: "int4 g128"."""

    @abstractmethod
    def fit(self, weight: torch.Tensor, dtype: torch.dtype, importance: torch.Tensor | None = None) -> Tensors:
        """Parameters for `weight` float32 `[out, in]`, as they will be stored.

        Args:
            dtype: of the model.
            importance: `[in]` weights of the squared error, the mean square of each input; None: all alike.
        """

    @abstractmethod
    def nearest(
        self, columns: torch.Tensor, parameters: Tensors, first: int, metric: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Round some columns of all rows; the column loop of GPTQ calls it once for every `vector` columns.

        Args:
            columns: float32 `[vector, rows]`: transposed, so that a column of the matrix is contiguous.
            first: number of the first of them in the matrix.
            metric: float32 `[vector, vector]`, positive definite: an error `e` of the columns costs `e^T metric e` (None: `e^T e`). It may
                be ignored, at some loss of quality.

        Returns:
            The nearest values, float32 `[vector, rows]`, and their codes `[rows]`.
        """

    @abstractmethod
    def dequantize(self, codes: torch.Tensor, parameters: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """The matrix `[out, in]` that codes stand for, in `dtype`."""

    @abstractmethod
    def tensors(self, shape: Shape, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Tensors on disk of a matrix of this shape in a model of `dtype`, by their names inside the module; with `axes`, where tensor
        parallelism shall be able to cut them."""

    def expected_count(self, shape: Shape) -> int | None:
        """About how long the tensor `counted` is; None where there is none."""
        return None

    def tensors_for_count(self, shape: Shape, dtype: torch.dtype, count: int) -> dict[str, TensorSpec]:
        """`tensors`, of which `counted` has `count` elements; without it they are those that `tensors` expects."""
        return self.tensors(shape, dtype)

    @abstractmethod
    def encode(self, codes: torch.Tensor, parameters: Tensors) -> Tensors:
        """The tensors that hold codes and parameters, bit for bit: exactly those of `tensors`."""

    @abstractmethod
    def decode(self, tensors: Tensors, shape: Shape) -> tuple[torch.Tensor, Tensors]:
        """Codes and parameters back; the inverse of `encode`."""

    def select_rows(self, tensors: Tensors, shape: Shape, rows: torch.Tensor) -> Tensors:
        """The tensors of the matrix made of these rows (int64 `[n]`) only."""
        if self.row_by_row:
            return {name: rows_of(tensor, rows) for name, tensor in tensors.items()}
        codes, parameters = self.decode(tensors, shape)
        return self.encode(rows_of(codes, rows), self.rows(parameters, rows))

    def find_corruption(self, tensors: Tensors, shape: Shape) -> tuple[str, str] | None:
        """Name of a tensor that contradicts itself or another, and what is wrong; None where all agree. Shapes and dtypes are right."""
        return None

    def round(self, weight: torch.Tensor, parameters: Tensors) -> torch.Tensor:
        """Nearest codes `[out, in / vector]` of float32 `weight [out, in]`."""
        columns, step = weight.T.contiguous(), self.vector
        codes = [self.nearest(columns[j : j + step], parameters, j)[1] for j in range(0, len(columns), step)]
        return torch.stack(codes, dim=1)

    def refit(
        self,
        weight: torch.Tensor,
        codes: torch.Tensor,
        parameters: Tensors,
        moments: Callable[[torch.Tensor], torch.Tensor],
        energy: torch.Tensor,
    ) -> tuple[torch.Tensor, Tensors] | None:
        """Parameters that suit codes better, and the codes under them; where nothing is gained, those given. None means only that the
        representation has no way to. Asked of representations with `rows_apart` only: a row may then keep what it had.

        Args:
            weight: float32 `[rows, in]`.
            codes, parameters: of these rows.
            moments: `e [rows, in]` times the second moments of the inputs, H: errors `e` of the rows cost `e H e^T`.
            energy: `[in]` diagonal of H.
        """
        return None

    def rows(self, parameters: Tensors, index: torch.Tensor | slice) -> Tensors:
        """Parameters of these rows (int64 `[n]` or a slice); all parameters unchanged where rows share them."""
        return {name: p[index] for name, p in parameters.items()} if self.rows_apart else parameters

    def join_rows(self, parts: Sequence[Tensors]) -> Tensors:
        """Parameters of a matrix from those of its rows, in order; the inverse of `rows`."""
        if not self.rows_apart:
            return parts[0]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def to_config(self) -> dict[str, Any]:
        """What `config.json` says."""
        return {"representation": self.name, **asdict(self)}  # type: ignore[call-overload]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Representation:
        """Inverse of `to_config`; ValueError, naming the field, for fields that are missing, unknown or mean nothing."""
        return configure(cls, {key: value for key, value in config.items() if key != "representation"})


def rows_of(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some rows (int64 `[n]`) of a matrix of any dtype."""
    return indexable(matrix)[rows].view(matrix.dtype)


def plugins() -> list[type[Any]]:
    """What other packages register: classes of representations, and of storage formats."""
    return [load() for load in entries(GROUP).values()]


def find(name: Any) -> type[Representation]:
    """The representation called `name`, of another package; ValueError where none is installed that has it."""
    known = {kind.name: kind for kind in plugins() if issubclass(kind, Representation)}
    if name not in known:
        listed = f"installed are {', '.join(sorted(known))}" if known else "no installed package adds one"
        raise ValueError(f"representation {name!r} is unknown ({listed})")
    return known[name]
