"""Calibration statistics of the linear layers of one block, one collection for each distinct input.

q/k/v (and gate/up) read the same tensor, so they share one Hessian. Groups are observed, not looked up in a table: the layers of a group
are those that were given the very same tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.core.file_matrix import in_memory
from compress.core.processes import Team
from compress.core.statistics import Statistics, StatisticsCollector
from compress.model.module_hooks import hooks
from runtime.modeling.experts import Expert, expert_of

if TYPE_CHECKING:
    from compress.model.hidden_states import HiddenStates
    from compress.model.streamed import Batch, StreamedModel


@dataclass
class InputGroup:
    """Linear layers (names inside the block) that read the same input, in the order they ran.

    `source` is the name of the module whose output that input is, when it is exactly that (a norm, usually).
    """

    members: list[str]
    in_features: int
    source: str | None = None


Forwards = Sequence[tuple[Callable[[], Any], torch.Tensor | None]]
"""Runs of a block: each computes one batch, whose token mask is beside it (None: all are valid)."""


def forwards(
    streamed: StreamedModel,
    index: int,
    states: HiddenStates,
    batches: Sequence[Batch],
    numbers: Sequence[int] | None = None,
) -> Forwards:
    """Runs of block `index` over batches, whose hidden states enter it; `numbers` says which batches, None: all."""
    own = range(len(batches)) if numbers is None else numbers
    return [(partial(_run, streamed, index, states, number, batches[number]), batches[number][1]) for number in own]


def _run(streamed: StreamedModel, index: int, states: HiddenStates, number: int, batch: Batch) -> torch.Tensor:
    return streamed.run_block(index, states.get(number), batch)


def find_groups(block: nn.Module, run: Callable[[], Any], names: Iterable[str]) -> list[InputGroup]:
    """Run the block once (`run`) and group the linear layers `names` by the tensor they were given, in execution order."""
    wanted = set(names)
    groups: list[InputGroup] = []
    inputs: list[torch.Tensor] = []  # referenced so that an address is not used twice
    outputs: dict[int, tuple[str, torch.Tensor]] = {}

    def on_input(name: str, _module: nn.Module, args: tuple[Any, ...]) -> None:
        value = args[0]
        for group, seen in zip(groups, inputs, strict=True):
            if seen is value or (seen.data_ptr() == value.data_ptr() and seen.shape == value.shape):
                if name not in group.members:
                    group.members.append(name)
                return
        source, _ = outputs.get(id(value), (None, None))
        groups.append(InputGroup([name], value.shape[-1], source))
        inputs.append(value)

    def on_output(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            outputs[id(output)] = (name, output)

    modules = dict(block.named_modules())
    layers = {module: partial(on_input, name) for name, module in modules.items() if name in wanted}
    leaves = {
        module: partial(on_output, name) for name, module in modules.items() if name and not list(module.children())
    }
    with hooks(layers, before=True), hooks(leaves), torch.no_grad():
        run()
    return groups


class _CollectedError(Exception):
    """Stops a forward pass once the input that was wanted has been seen."""


def collect(
    block: nn.Module,
    groups: list[InputGroup],
    forwards: Forwards,
    hessian: bool = True,
    stop_early: bool = True,
    team: Team | None = None,
    place: Callable[[int], Path | None] = in_memory,
) -> list[Statistics]:
    """Statistics of each group's input over all `forwards` (a callable that runs one batch, and its token mask or None).

    Args:
        place: directory of the file that holds second moments of so many inputs; None: they are in memory.
        team: processes that read other batches and call this for the same groups.
        stop_early: leave each forward pass once the last group's input was seen; what comes after cannot change it.
    """
    device = next(block.parameters()).device
    collectors = [
        StatisticsCollector(group.in_features, hessian=hessian, device=device, directory=place(group.in_features))
        for group in groups
    ]
    mask: torch.Tensor | None = None

    def on_input(position: int, expert: Expert | None, _module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        routed = mask is not None and expert is not None and expert.tokens is not None
        collectors[position].add(args[0], mask.reshape(-1)[expert.tokens] if routed else mask)  # type: ignore[union-attr, index]
        if stop_early and position == len(groups) - 1:
            raise _CollectedError

    layers = {
        block.get_submodule(group.members[0]): partial(on_input, position, _expert(block, group))
        for position, group in enumerate(groups)
    }
    with hooks(layers, before=True), torch.no_grad():
        for run, mask in forwards:  # noqa: B007 - the hooks read `mask`
            with suppress(_CollectedError):
                run()
    if team is not None:
        for collector in collectors:
            team.add_up(collector)
    return [collector.finish() for collector in collectors]


def _expert(block: nn.Module, group: InputGroup) -> Expert | None:
    """The expert that the layers of a group belong to, which knows the tokens that were routed to it."""
    place = expert_of(block, group.members[0])
    return None if place is None else block.get_submodule(f"{place[0]}.{place[1]}")  # type: ignore[return-value]
