"""Calibration statistics of the linear layers of one block, one collection for each distinct input.

q/k/v (and gate/up) read the same tensor, so they share one Hessian. Groups are observed, not looked up in a table: the layers of a group
are those that were given the very same tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from compress.core.file_matrix import in_memory
from compress.core.processes import Team
from compress.core.statistics import SAMPLES, Statistics, StatisticsCollector
from compress.model.module_hooks import hooks
from runtime.modeling.experts import Expert, expert_of
from runtime.modeling.linear_modules import get_matrix

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


class Original(NamedTuple):
    """A block of the original model, and its runs over the same batches.

    `residual_layers`: those that add to the residual stream, each with a module that reads it before ("": the block).
    """

    block: nn.Module
    forwards: Forwards
    residual_layers: Mapping[str, str]


def forwards(
    streamed: StreamedModel,
    index: int,
    states: HiddenStates,
    batches: Sequence[Batch],
    numbers: Sequence[int] | None = None,
    block: nn.Module | None = None,
    first: int = 0,
) -> Forwards:
    """Runs of block `index` over batches, whose hidden states enter it.

    Args:
        numbers: which batches; None: all.
        block: computes in its place.
        first: of `states`: number of those of batch 0.
    """

    def run(number: int) -> torch.Tensor:
        return streamed.run_block(index, states.get(first + number), batches[number], block=block)

    own = range(len(batches)) if numbers is None else numbers
    return [(partial(run, number), streamed.counted(batches[number])) for number in own]


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
    needs: Collection[str] = ("hessian",),
    stop_early: bool = True,
    team: Team | None = None,
    place: Callable[[int], Path | None] = in_memory,
    original: Original | None = None,
) -> list[Statistics]:
    """Statistics of each group's input over all `forwards` (a callable that runs one batch, and its token mask or None).

    Args:
        original: the block as it is in the original model; the drift of inputs is collected, but of those of routed experts, since
            other tokens may be routed there.
        place: directory of the file that holds second moments of so many inputs; None: they are in memory.
        team: processes that read other batches and call this for the same groups.
        needs: of `Need`, beside ranges: "hessian", "samples".
        stop_early: leave each forward pass once the last group's input was seen; what comes after cannot change it.
    """
    device = next(block.parameters()).device
    experts = [_expert(block, group) for group in groups]
    drifts = [original is not None and expert is None for expert in experts]
    firsts = [group.members[0] for group in groups]
    sums = {} if original is None else {
        position: original.residual_layers[name]
        for position, (name, group) in enumerate(zip(firsts, groups, strict=True))
        if drifts[position] and name in original.residual_layers and len(group.members) == 1
    }  # fmt: skip
    collectors = [
        StatisticsCollector(
            group.in_features, "hessian" in needs, device, place(group.in_features), drift,
            get_matrix(block.get_submodule(group.members[0])).shape[0] if position in sums else 0,
            SAMPLES if "samples" in needs else 0,
        )
        for position, (group, drift) in enumerate(zip(groups, drifts, strict=True))
    ]  # fmt: skip
    mask: torch.Tensor | None = None
    before: dict[int, torch.Tensor] = {}
    streams: dict[tuple[bool, str], torch.Tensor] = {}  # of the block, or of the original one

    def on_input(position: int, expert: Expert | None, _module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        routed = mask is not None and expert is not None and expert.tokens is not None
        known = mask.reshape(-1)[expert.tokens] if routed else mask  # type: ignore[union-attr, index]
        stream = None
        if position in sums:
            theirs, ours = (streams.get((which, sums[position])) for which in (True, False))
            assert theirs is not None, "modules that read the residual stream run before what is added to it"
            assert ours is not None
            stream = theirs - ours
        collectors[position].add(args[0], known, before.get(position), stream)
        stop(position)

    def on_original(position: int, _module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        before[position] = args[0]
        stop(position)

    def stop(position: int) -> None:
        if stop_early and position == len(groups) - 1:
            raise _CollectedError

    def on_stream(which: tuple[bool, str], _module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        streams[which] = args[0]

    readers = {
        one.get_submodule(name): partial(on_stream, (theirs, name))
        for theirs, one in ((False, block), (True, original.block if original is not None else block))
        for name in sums.values()
    }
    layers = {
        block.get_submodule(name): partial(on_input, position, experts[position])
        for position, name in enumerate(firsts)
    }
    others: dict[nn.Module, Callable[..., Any]] = {}
    runs: Forwards = []
    if original is not None and any(drifts):
        wanted = [position for position, drift in enumerate(drifts) if drift]
        others = {original.block.get_submodule(firsts[p]): partial(on_original, p) for p in wanted}
        runs = original.forwards
    with hooks(readers, before=True), hooks(layers, before=True), hooks(others, before=True), torch.no_grad():
        for number, (run, mask) in enumerate(forwards):  # noqa: B007 - the hooks read `mask`
            with suppress(_CollectedError):
                if runs:
                    runs[number][0]()
            with suppress(_CollectedError):
                run()
            before.clear()
            streams.clear()
    if team is not None:
        for collector in collectors:
            team.add_up(collector)
    return [collector.finish() for collector in collectors]


def _expert(block: nn.Module, group: InputGroup) -> Expert | None:
    """The expert that the layers of a group belong to, which knows the tokens that were routed to it."""
    place = expert_of(block, group.members[0])
    return None if place is None else block.get_submodule(f"{place[0]}.{place[1]}")  # type: ignore[return-value]
