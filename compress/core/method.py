"""Method of a registry: name, configuration, and the hooks that the solver and the block pass call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import torch
from pydantic import BaseModel

from compress.core.statistics import Statistics
from runtime.config.plugins import entries, merge
from runtime.formats.scheme import CompressedWeight, Scheme

Need = Literal["hessian", "ranges", "drift", "gradients", "samples"]


@dataclass(frozen=True)
class ColumnLoop:
    """Settings of the column loop; see the fields of `GPTQConfig` and `SparseGPTConfig`."""

    damping: float = 0.01
    order: Literal["activation", "group", "natural"] = "activation"
    block_size: int = 128
    scales: Literal["mse", "minmax", "hessian", "positive"] = "mse"
    static_groups: bool = False
    mask_search: Literal["exact", "greedy"] = "exact"
    reconstruction: int = 10
    swaps: int = 0
    sweeps: int = 0
    refit_scales: bool = False
    joint: bool = True


DEFAULTS = ColumnLoop()


@dataclass
class Problem:
    """Weights that read the same input, and what they are to become.

    Attributes:
        weights: `[out_i, in]` each, any float dtype; not changed.
        statistics: of their common input; None where no method needs any.
        prune, quantize: configurations of the methods; None: not pruned, or values stay float.
        scheme: what `quantize` and `prune` mean.
        dtype: of scales and of the dequantized weight.
        names: of the layers, for messages.
        sparsity: of each weight, where an allocation differs from `prune.sparsity`.
        constraints: of each weight, settled masks and grids (`compress.quantize.weight_constraint.WeightConstraint`); weights are zero
            there, and on the grids, already.
        masks: of each weight, bool `[out, in]`, True = kept, as the pruning method chose them before; None: dense.
        output_hessians: of each weight, float32 `[out_i, out_i]` (`compress.model.output_hessians`), where the loss of the model counts and
            not the error of the output.
        basis: of the inputs, in which weights are rounded (`compress.quantize.transforms.Basis`); None: the one they come in.
    """

    weights: list[torch.Tensor]
    statistics: Statistics | None
    prune: Any
    quantize: Any
    scheme: Scheme
    dtype: torch.dtype
    names: list[str] = field(default_factory=list)
    sparsity: list[float] | None = None
    constraints: list[Any] | None = None
    masks: list[torch.Tensor] | None = None
    output_hessians: list[torch.Tensor] | None = None
    basis: Any = None


@dataclass(frozen=True)
class Method:
    """One method of a folder's registry (`compress.quantize.METHODS`, `compress.prune.METHODS`).

    Attributes:
        name: as a recipe says it (`method: gptq`).
        config: pydantic class whose fields are the recipe's fields; its docstring is what `compress methods show` prints.
        summary: one line.
        paper: title, year and arXiv number of the source.
        needs: what calibration must collect: `hessian` (mean of x x^T), `ranges` (per-channel means, minima, maxima), `samples` (some
            inputs).
        scales: of methods that transform the model before they round: `(weights, statistics, scheme, config) -> scale [in]` for
            weights that share an input; columns are multiplied by it, the input is divided by it.
        solve: of quantization methods that find the codes themselves: `(problem) -> a compressed weight for each`, zero where
            `problem.masks` says so; None: the column loop where the configuration has one (`column_loop`), else rounding to nearest.
        score: of pruning methods that choose their mask beforehand: `(weight [out, in], statistics) -> importance [out, in]`;
            None for those that choose it inside the column loop.
        per_row: the mask is balanced row by row (unstructured pruning), as Wanda does.
    """

    name: str
    config: type[BaseModel]
    summary: str
    paper: str
    needs: frozenset[Need] = frozenset()
    scales: Callable[..., torch.Tensor] | None = None
    solve: Callable[[Problem], list[CompressedWeight]] | None = None
    score: Callable[..., torch.Tensor] | None = None
    per_row: bool = False


class Named(Protocol):
    """An entry of a registry."""

    @property
    def name(self) -> str:
        """Key of the entry."""


Entry = TypeVar("Entry", bound=Named)


def registry(group: str, *built_in: Entry) -> dict[str, Entry]:
    """Methods by name: those given, then those that other packages add under the entry-point group."""
    added: list[Entry] = [load() for load in entries(group).values()]
    own = {method.name: method for method in built_in}
    return merge("method", group, own, ((method.name, method) for method in added))
