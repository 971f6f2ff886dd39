"""Where a layer holds its routed experts: one module that is handed tokens, the experts that each is sent to, and their weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compress.model.couplings import Slices
from compress.prune.structure.view import Routing
from runtime.errors import CompressError, RequestError

_CALL = 3  # what experts are handed: hidden states, indices, weights


@dataclass(frozen=True)
class Experts:
    """The experts of one layer.

    Attributes:
        module: name of the module that holds them. slices: what each has of which tensors, the router's among them.
    """

    module: str
    slices: tuple[Slices, ...]

    @property
    def around(self) -> str:
        """Name of the module whose output theirs is part of."""
        return self.module.rpartition(".")[0]


@dataclass(frozen=True)
class Call:
    """What experts were called with: hidden states `[n, hidden]`, int64 indices and weights `[n, chosen]`; `rest` follows them."""

    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    rest: tuple[Any, ...]
    keywords: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Call:
        """What a hook was given, in the order of the signature; CompressError where it is something else."""
        bound = inspect.signature(module.forward).bind(*arguments, **keywords)
        given = bound.args[:_CALL]
        good = len(given) == _CALL and all(isinstance(value, torch.Tensor) for value in given)
        if not good or given[1].is_floating_point() or given[1].shape != given[2].shape:
            kind = type(module).__name__
            raise CompressError(f"a {kind} was called with something else than hidden states, indices and weights")
        return cls(given[0], given[1], given[2], bound.args[_CALL:], dict(bound.kwargs))

    def sent(self, index: torch.Tensor, weights: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keywords of a call that sends the same tokens elsewhere."""
        return (self.hidden, index, weights, *self.rest), self.keywords


def experts_of(model: nn.Module, slices: Sequence[Slices], prefix: str) -> Experts | None:
    """The experts of one block; None where it has none (a dense layer).

    Args:
        slices: of the whole model. prefix: of the block's tensors.

    Raises:
        RequestError: there are several sets of them, or who is sent to which cannot be seen.
    """
    own = tuple(s for s in slices if s.name.startswith(prefix))
    if not own:
        return None
    layer = prefix.removesuffix(".")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    # A router has a row or a number of each expert, an expert has matrices.
    holders = sorted({s.name.rpartition(".")[0] for s in own if tensors[s.name].ndim > 2})
    if len(holders) != 1:
        found = f"in {len(holders)} modules ({holders[0]}, {holders[1]})" if holders else "in no module of their own"
        raise RequestError(f"{layer} holds its experts {found}, so that whom the router chose cannot be followed")
    holder = model.get_submodule(holders[0])
    if len(inspect.signature(holder.forward).parameters) < _CALL:
        raise RequestError(
            f"{holders[0]} (a {type(holder).__name__}) is not told which experts a token is sent to, so they cannot be removed"
        )
    return Experts(holders[0], own)


class RoutingCollector:
    """Adds up what the experts of a layer are sent.

    Args:
        count: experts. outputs: what they give is wanted too: each runs once more over its tokens.
    """

    def __init__(self, count: int, outputs: bool) -> None:
        self._outputs = outputs
        self._found = Routing(0, torch.zeros(count), torch.zeros(count), torch.zeros(count))

    def add(self, module: nn.Module, call: Call, mask: torch.Tensor | None) -> None:
        """One call; `mask` (bool `[b, s]`) says which of its tokens are no padding."""
        hidden, index, weights = call.hidden.reshape(-1, call.hidden.shape[-1]), call.index, call.weights.float()
        if mask is not None:
            real = mask.reshape(-1).to(hidden.device)
            hidden, index, weights = hidden[real], index[real], weights[real]
        found, count = self._found, len(self._found.used)
        found.tokens += len(hidden)
        found.used += torch.bincount(index.reshape(-1), minlength=count).float().cpu()
        found.weight += torch.bincount(index.reshape(-1), weights.reshape(-1).double(), minlength=count).float().cpu()
        for expert in index.unique().tolist() if self._outputs else ():
            rows, places = torch.where(index == expert)
            alone = torch.full((len(rows), 1), expert, dtype=index.dtype, device=index.device)
            whole = torch.ones(len(rows), 1, dtype=call.weights.dtype, device=index.device)
            given = module.forward(hidden[rows], alone, whole, *call.rest, **call.keywords)
            found.output[expert] += float((weights[rows, places] * given.float().norm(dim=-1)).sum())

    def finish(self) -> Routing:
        """All that was added; CompressError where it holds NaN or Inf."""
        for value in (self._found.weight, self._found.output):
            if not bool(torch.isfinite(value).all()):
                raise CompressError("routing weights or what experts give hold NaN or Inf")
        return self._found


def chosen(importance: torch.Tensor, kept: int, groups: int) -> torch.Tensor:
    """The experts that stay, ascending, int64 `[kept]`: the most important, of each of `groups` as many."""
    each = len(importance) // groups
    order = importance.view(groups, each).argsort(dim=1, descending=True, stable=True)[:, : kept // groups]
    return (order + torch.arange(groups)[:, None] * each).reshape(-1).sort().values
