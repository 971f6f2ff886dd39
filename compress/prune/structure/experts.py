"""Removal of routed experts, ranked by what the router of their block sends them; what follows sees the result."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compress.core.tensors import relative
from compress.model.couplings import Slices
from compress.model.module_hooks import hooks
from compress.model.streamed import Batch, StreamedModel
from compress.prune.structure.method import Routing
from compress.prune.structure.removal import Cut, Lines, Pass, Plan, Removal, Tensors, best, check_finite
from runtime.errors import CompressError, RequestError

#: What a cut layer gives may differ (relative) from what the whole one gives with the same experts: sums in another order, in 16 bits.
TOLERANCE = 3e-2

_CALL = 3  # what experts are handed: hidden states, indices, weights


@dataclass(frozen=True)
class Experts:
    """The routed experts of one layer: a module that is handed tokens, the experts that each is sent to, and their weights.

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


def experts_of(model: nn.Module, slices: Sequence[Slices], prefix: str) -> tuple[Experts, ...]:
    """The experts of one block; empty where it has none (a dense layer).

    Args:
        slices: of the whole model. prefix: of the block's tensors.

    Raises:
        RequestError: there are several sets of them, or who is sent to which cannot be seen.
    """
    own = tuple(s for s in slices if s.name.startswith(prefix))
    if not own:
        return ()
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
    return (Experts(holders[0], own),)


def add_routing(found: Routing, module: nn.Module, call: Call, mask: torch.Tensor | None, outputs: bool) -> None:
    """Add what the experts of a layer are sent in one call.

    Args:
        mask: bool `[b, s]`, which of its tokens are no padding.
        outputs: what they give is wanted too: each runs once more over its tokens.
    """
    hidden, index, weights = call.hidden.reshape(-1, call.hidden.shape[-1]), call.index, call.weights.float()
    if mask is not None:
        real = mask.reshape(-1).to(hidden.device)
        hidden, index, weights = hidden[real], index[real], weights[real]
    count = len(found.used)
    found.tokens += len(hidden)
    found.used += torch.bincount(index.reshape(-1), minlength=count).float().cpu()
    found.weight += torch.bincount(index.reshape(-1), weights.reshape(-1).double(), minlength=count).float().cpu()
    for expert in index.unique().tolist() if outputs else ():
        rows, places = torch.where(index == expert)
        alone = torch.full((len(rows), 1), expert, dtype=index.dtype, device=index.device)
        whole = torch.ones(len(rows), 1, dtype=call.weights.dtype, device=index.device)
        given = module.forward(hidden[rows], alone, whole, *call.rest, **call.keywords)
        found.output[expert] += float((weights[rows, places] * given.float().norm(dim=-1)).sum())


class ExpertRemoval(Removal):
    """Removes experts block by block, of each layer that has any as many."""

    def __init__(self, run: Pass) -> None:
        batches = run.batches if run.job.needs else []
        super().__init__(run, {"hidden": run.streamed}, [*batches, run.probe])

    @classmethod
    def complete(cls, plan: Plan, streamed: StreamedModel) -> Plan:
        """See `Removal.complete`."""
        return cls.complete_by_block(plan, streamed, experts_of)

    def block(self, index: int) -> tuple[Tensors, Lines, str]:
        """See `Removal.block`; the block in memory stays whole."""
        job, tensors = self.job, self.stored(self.whole.block_names(index))
        check_finite(tensors)
        if not job.units[index]:
            self.advance(index)
            return tensors, [], "no experts"
        (experts,) = job.units[index]
        routing = self._routing(index, experts) if "routing" in job.needs else None
        weights = (part.by_unit(self.loaded(part.name).float().cpu()) for part in experts.slices)
        what = f"the experts of {experts.module}"
        rank, _ = self.rank(what, job.size.count, job.kept, index, weights=weights, routing=routing)
        kept = best(rank, job.kept, job.size.groups)
        cut = Cut((part, kept) for part in experts.slices)
        block = self.cut_block(index, cut)
        self._check(index, experts, block, kept)
        line = {
            "name": experts.module, "units": job.size.count, "kept": len(kept), "error": self._advance(index, experts, block),
            "damping": None, "experts": kept.tolist(),
        }  # fmt: skip
        if routing is not None:
            share = routing.weight[kept].sum() / routing.weight.sum().clamp_min(1e-30)
            line["notes"] = {"routing_weight_kept": float(share)}
        return cut.all(tensors), [line], f"{len(kept)} of {job.size.count} experts stay"

    def _routing(self, index: int, experts: Experts) -> Routing:
        """What the whole block's router does over the calibration sequences."""
        found, outputs = Routing.none(self.job.size.count), "expert_outputs" in self.job.needs
        mask: torch.Tensor | None = None

        def look(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            add_routing(found, module, Call.of(module, arguments, keywords), mask, outputs)

        with hooks({self.whole.model.get_submodule(experts.module): look}, before=True, keywords=True):
            for number, batch in enumerate(self.batches[:-1]):
                mask = batch[1]
                self.whole.run_block(index, self.states["hidden"].get(number), batch)
        if not bool(torch.isfinite(torch.cat([found.weight, found.output])).all()):
            raise CompressError("routing weights or what experts give hold NaN or Inf")
        return found

    def _check(self, index: int, experts: Experts, block: nn.Module, kept: torch.Tensor) -> None:
        """The cut layer gives what the whole one gives when it is told to use the experts that the cut one's router chooses."""
        row, calls = self.first_row(), list[Call]()

        def reroute(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            calls.append(Call.of(module, arguments, keywords))
            if len(calls) == 1:  # the cut layer's
                return None
            index = calls[0].index
            return calls[1].sent(kept.to(index.device)[index], calls[0].weights)

        given = []
        for one in (block, self.whole.blocks[index]):
            holder = one.get_submodule(experts.module.removeprefix(self.whole.block_prefix(index)))
            with hooks({holder: reroute}, before=True, keywords=True):
                given.append(self._run(index, experts, one, *row)[1])
        difference = relative(*given)
        if not difference <= TOLERANCE:
            kind = type(self.whole.model).__name__
            raise RequestError(
                f"{experts.around} of a {kind} computes something else when experts are cut out (relative difference {difference:.1e}), "
                "so they cannot be removed"
            )

    def _advance(self, index: int, experts: Experts, block: nn.Module) -> float | None:
        """The states become what the cut block gives; how far its experts' layer moved on calibration sequences, relative, squared."""
        lost = whole = 0.0
        states = self.states["hidden"]
        for number, batch in enumerate(self.batches):
            state = states.get(number)
            result, after = self._run(index, experts, block, state, batch)
            if number < len(self.batches) - 1:  # not the probe
                _, before = self._run(index, experts, self.whole.blocks[index], state, batch)
                if batch[1] is not None:
                    mask = batch[1].reshape(-1).to(state.device)
                    before, after = before[mask], after[mask]
                lost += float((before - after).square().sum())
                whole += float(before.square().sum())
            states.put(number, self.whole.hand_over(index, result, batch))
        if len(self.batches) == 1:
            return None
        return lost / whole if whole > 0 else 0.0

    def _run(
        self, index: int, experts: Experts, block: nn.Module, state: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a block gives for a state, and what its layer around the experts gives: float32 `[tokens, hidden]`."""
        found: list[torch.Tensor] = []

        def look(_module: nn.Module, _arguments: Any, output: Any) -> None:
            value = output[0] if isinstance(output, (tuple, list)) else output
            found.append(value.reshape(-1, value.shape[-1]).float())

        around = f"{experts.around}.".removeprefix(self.whole.block_prefix(index)).removesuffix(".")
        with hooks({block.get_submodule(around): look}):
            result = self.whole.run_block(index, state, batch, block=block)
        return result, found[0]
