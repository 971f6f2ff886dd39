"""Remove experts, block by block: ranked by what the router of the block sends them; what follows sees the result."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from compress.core.tensors import relative
from compress.model.hidden_states import HiddenStates
from compress.prune.structure.by_block import OpenBlock, write_by_block
from compress.prune.structure.cutting import Cutting, check_finite, check_ranks
from compress.prune.structure.expert_layout import Call, Experts, RoutingCollector, chosen
from compress.prune.structure.view import Routing, View
from runtime.errors import RequestError
from runtime.modeling.skeleton import set_tensor

# What a cut layer gives may differ from what the whole one gives when told to use the same experts: sums in another order, in 16 bits.
TOLERANCE = 3e-2


def remove_experts(cutting: Cutting) -> tuple[dict[str, Any], torch.Tensor]:
    """Write the smaller model; errors as of `remove_channels`.

    Returns:
        {"layers": a line for each layer with experts, which stay among it}, JSON-able; and the state after the last block that the
        smaller model should give for the probe.
    """
    every = [*cutting.batches, cutting.probe] if cutting.job.needs else [cutting.probe]

    def opened(smaller: nn.Module, index: int, states: HiddenStates) -> _Block:
        return _Block(cutting, smaller, index, states, every)

    layers, state = write_by_block(cutting, every, cutting.streamed.dtype, opened)
    return {"layers": layers}, state


class _Block(OpenBlock):
    """One block on its way to fewer experts."""

    def cut(self) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]], str]:
        """See `OpenBlock`; the block in memory stays whole."""
        tensors, facts = self._cut()
        return tensors, facts, f"{facts[0]['kept']} of {facts[0]['units']} experts stay" if facts else "no experts"

    def _cut(self) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
        """The block's tensors without the experts, by name, and its line; the states become what the cut block gives."""
        source = self.streamed.checkpoint
        tensors = {name: source.get(name) for name in self.streamed.block_names(self.index)}
        check_finite(tensors)
        experts = self.job.experts[self.index]
        if experts is None:
            for number, batch in enumerate(self.batches):
                self.states.put(number, self.streamed.advance(self.index, self.states.get(number), batch))
            return tensors, []
        routing = self._routing(experts) if "routing" in self.job.needs else None
        method = self.job.method
        rank = method.rank(self._view(experts, routing), self.job.settings)
        check_ranks(rank, f"the experts of {experts.module}", method.name)
        kept = chosen(rank, self.job.kept, self.job.size.groups)
        block = self._without(experts, kept)
        self._check(experts, block, kept)
        error = self._advance(experts, block)
        for part in experts.slices:
            tensors[part.name] = part.cut(tensors[part.name], kept, self.job.size.count)
        share = None if routing is None else float(routing.weight[kept].sum() / routing.weight.sum().clamp_min(1e-30))
        return tensors, [
            {
                "name": experts.module, "units": self.job.size.count, "kept": len(kept), "error": error, "damping": None,
                "experts": kept.tolist(), **({} if share is None else {"notes": {"routing_weight_kept": share}}),
            }
        ]  # fmt: skip

    def _routing(self, experts: Experts) -> Routing:
        """What the whole block's router does over the calibration text."""
        collector = RoutingCollector(self.job.size.count, "expert_outputs" in self.job.needs)
        mask: torch.Tensor | None = None

        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            collector.add(module, Call.of(module, arguments, keywords), mask)

        handle = self.module(experts.module).register_forward_pre_hook(hook, with_kwargs=True)
        try:
            for number, batch in enumerate(self.batches[:-1]):
                mask = batch[1]
                self.streamed.run_block(self.index, self.states.get(number), batch)
        finally:
            handle.remove()
        return collector.finish()

    def _view(self, experts: Experts, routing: Routing | None) -> View:
        count = self.job.size.count
        return View(
            count=count,
            kept=self.job.kept,
            generator=torch.Generator().manual_seed(self.job.settings.seed + self.index),
            weights=[part.by_unit(self.held(part.name).float().cpu(), count) for part in experts.slices]
            if self.job.method.name == "magnitude"
            else [],
            routing=routing,
        )

    def _without(self, experts: Experts, kept: torch.Tensor) -> nn.Module:
        """The block with these experts alone."""
        parts = {part.name: part for part in experts.slices}
        block = copy.deepcopy(self.smaller)
        for name, _ in [*block.named_parameters(), *block.named_buffers()]:
            value = self.held(self.prefix + name)
            part = parts.get(self.prefix + name)
            set_tensor(block, name, value if part is None else part.cut(value, kept, self.job.size.count))
        return block

    def _check(self, experts: Experts, block: nn.Module, kept: torch.Tensor) -> None:
        """The cut layer gives what the whole one gives when it is told to use the experts that the cut one's router chooses."""
        ids, mask = self.batches[0]
        batch = (ids[:1], None if mask is None else mask[:1])
        state = self.states.get(0)[:1]
        calls: list[Call] = []

        def listen(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            calls.append(Call.of(module, arguments, keywords))

        def tell(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            told = calls[0]
            return Call.of(module, arguments, keywords).sent(kept.to(told.index.device)[told.index], told.weights)

        found = []
        for one, hook in ((block, listen), (self.block, tell)):
            handle = self.module(experts.module, one).register_forward_pre_hook(hook, with_kwargs=True)
            try:
                with self._output(one, experts) as given:
                    self.streamed.run_block(self.index, state, batch, block=one)
            finally:
                handle.remove()
            found.append(given[0])
        difference = relative(found[0], found[1])
        if not difference <= TOLERANCE:
            kind = type(self.streamed.model).__name__
            raise RequestError(
                f"{experts.around} of a {kind} computes something else when experts are cut out (relative difference {difference:.1e}), "
                "so they cannot be removed"
            )

    def _advance(self, experts: Experts, block: nn.Module) -> float | None:
        """The states become what the cut block gives; how far its experts' layer moved over the calibration text, relative, squared."""
        lost = whole = 0.0
        for number, batch in enumerate(self.batches):
            state = self.states.get(number)
            with self._output(block, experts) as after:
                result = self.streamed.run_block(self.index, state, batch, block=block)
            if number < len(self.batches) - 1:  # not the probe
                with self._output(self.block, experts) as before:
                    self.streamed.run_block(self.index, state, batch)
                mask = None if batch[1] is None else batch[1].reshape(-1).to(state.device)
                one, other = (value if mask is None else value[mask] for value in (before[0], after[0]))
                lost += float((one - other).square().sum())
                whole += float(one.square().sum())
            self.states.put(number, self.streamed.hand_over(self.index, result, batch))
        if len(self.batches) == 1:
            return None
        return lost / whole if whole > 0 else 0.0

    @contextmanager
    def _output(self, block: nn.Module, experts: Experts) -> Iterator[list[torch.Tensor]]:
        """What the layer around the experts gives inside: float32 `[tokens, hidden]` of every call."""
        found: list[torch.Tensor] = []

        def hook(_module: nn.Module, _arguments: Any, output: Any) -> None:
            value = output[0] if isinstance(output, (tuple, list)) else output
            found.append(value.reshape(-1, value.shape[-1]).float())

        handle = self.module(experts.around, block).register_forward_hook(hook)
        try:
            yield found
        finally:
            handle.remove()
