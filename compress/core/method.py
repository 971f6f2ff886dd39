"""What a method is to the rest of the house: a name, its configuration, and what the solver and the pipeline act on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel

Need = Literal["hessian", "ranges"]


@dataclass(frozen=True)
class Method:
    """One method of a folder's registry (`compress.quantize.METHODS`, `compress.prune.METHODS`).

    Attributes:
        name: as a recipe says it (`method: gptq`).
        config: pydantic class whose fields are the recipe's fields; its docstring is what `compress methods show` prints.
        summary: one line.
        paper: title, year and arXiv number of the source.
        needs: what calibration must collect: `hessian` (mean of x x^T), `ranges` (per-channel means, minima, maxima).
        transforms: the method changes the model before it is quantized (scales folded into neighbours).
        compensates: the method changes the remaining weights to make up for the error (the column loop with the Hessian).
        scales: of methods that transform: `(weights, statistics, scheme, config) -> scale [in]` for weights that share an
            input; columns are multiplied by it, the input is divided by it.
        score: of pruning methods that choose their mask beforehand: `(weight [out, in], statistics) -> importance [out, in]`;
            None for those that choose it inside the column loop.
        per_row: the mask is balanced row by row (unstructured pruning), as Wanda does.
    """

    name: str
    config: type[BaseModel]
    summary: str
    paper: str
    needs: frozenset[Need] = frozenset()
    transforms: bool = False
    compensates: bool = False
    scales: Callable[..., torch.Tensor] | None = None
    score: Callable[..., torch.Tensor] | None = None
    per_row: bool = False
