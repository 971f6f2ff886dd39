"""What a method is to the rest of the house: a name, the configuration a recipe may give it, and what the solver needs from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

Need = Literal["hessian", "ranges"]


def _never(config: Any) -> bool:
    return False


@dataclass(frozen=True)
class Method:
    """One method of a folder's registry (`compress.quantize.METHODS`, `compress.prune.METHODS`).

    Attributes:
        name: as a recipe says it (`method: gptq`).
        config: pydantic class whose fields are the recipe's fields; its docstring is what `compress methods show` prints.
        summary: one line.
        paper: title, year and arXiv number of the source.
        needs: what calibration must collect: `hessian` (mean of x x^T), `ranges` (per-channel means, minima, maxima).
        transforms: True when the method changes the model before it is quantized (scales folded into neighbours).
        compensates: whether, with this configuration, the method changes the remaining weights to make up for the error (the
            column loop with the Hessian).
        score: `(weight [out, in], statistics) -> importance [out, in]` of pruning methods that choose their mask beforehand;
            None for those that choose it inside the column loop.
        per_row: the mask is balanced row by row (unstructured pruning), as Wanda does.
    """

    name: str
    config: type[BaseModel]
    summary: str
    paper: str
    needs: frozenset[Need] = frozenset()
    transforms: bool = False
    compensates: Callable[[Any], bool] = _never
    score: Callable[..., Any] | None = None
    per_row: bool = False
