"""Collection of what layers read over calibration text, of the hidden state and of values, for rotations that are learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from compress.core.statistics import SAMPLES, Statistics
from compress.model.couplings import input_dim
from compress.model.footprint import Footprint, ModelSize, Rows, Speed, tokens
from compress.model.hidden_states import HiddenStates
from compress.model.input_statistics import InputGroup, collect, find_groups, forwards
from compress.model.rewrite import Pass
from compress.model.streamed import Batch, StreamedModel
from compress.rotate.method import Site
from compress.rotate.rotation import HiddenRotation
from runtime.errors import CompressError, RequestError

#: Rows of the layers that read a site.
ROWS = 256
#: Float32 elements of the inputs of all sites, and of the rows of all, at most.
ELEMENTS = 1 << 25


def collect_sites(run: Pass[Any], hidden: HiddenRotation) -> list[Site]:
    """The sites of all blocks, in one pass over the model; tensors are on its device.

    Raises:
        CompressError: inputs hold NaN or Inf, or there are none. RequestError: nothing in the blocks reads the hidden state.
    """
    streamed, batches = run.streamed, run.batches
    size, generator = len(hidden.matrix), torch.Generator().manual_seed(0)
    most = max(1, ELEMENTS // (size * max(1, len(hidden.norms), 2 * len(streamed.blocks))))
    few, found = min(most, ROWS), list[Site]()

    def visit(index: int, states: HiddenStates) -> str:
        prefix, block = streamed.block_prefix(index), streamed.blocks[index]
        runs = forwards(streamed, index, states, batches)
        reads = hidden.readers(block, prefix, runs[0][0])
        linear = {
            name: norm for name, norm in reads.items() if input_dim(streamed.model.get_submodule(name)) is not None
        }
        read = {norm: [name for name, own in linear.items() if own == norm] for norm in hidden.norms_of(prefix)}
        # Norms without weights are not seen: what reads them reads the hidden state as it comes.
        bare = find_groups(
            block, runs[0][0], [name.removeprefix(prefix) for name in hidden.bare_readers(block, prefix, reads)]
        )
        groups = [InputGroup([norm.removeprefix(prefix)], size) for norm in read] + bare
        collected = collect(block, groups, runs, needs=("samples",), stop_early=False) if groups else []
        for group, statistics in zip(groups, collected, strict=True):
            norm = f"{prefix}{group.members[0]}"
            x = _some(_finite(statistics, norm), min(most, SAMPLES), generator)
            if norm in read:
                found.append(Site(hidden.given(norm, x), rows_of(read[norm]) * hidden.gain(norm)))
            else:
                found.append(Site(x.float(), rows_of([f"{prefix}{name}" for name in group.members])))
        for number, batch in enumerate(batches):
            states.put(number, streamed.advance(index, states.get(number), batch))
        return ""

    def rows_of(layers: list[str]) -> torch.Tensor:
        if not layers:  # routed experts in one tensor: every direction of what they read counts alike
            return torch.randn(few, size, generator=generator).to(streamed.device)
        weights = [weight_of(streamed.model.get_submodule(name)) for name in layers]
        return _some(torch.cat([_some(weight, few, generator).float() for weight in weights]), few, generator)

    run.visit("inputs of layers", batches, visit)
    if not found:
        raise RequestError("no linear layer reads the hidden state, so there is no rotation to learn; take hadamard")
    return found


def value_site(
    streamed: StreamedModel, index: int, states: HiddenStates, batches: Sequence[Batch], consumer: str
) -> Site:
    """What layer `consumer` of a block that is loaded reads, the values of all its heads.

    Raises:
        CompressError: inputs hold NaN or Inf, or there are none.
    """
    block, generator = streamed.blocks[index], torch.Generator().manual_seed(index)
    weight = weight_of(block.get_submodule(consumer))
    runs = forwards(streamed, index, states, batches)
    (statistics,) = collect(block, [InputGroup([consumer], weight.shape[1])], runs, needs=("samples",))
    inputs = _finite(statistics, f"{streamed.block_prefix(index)}{consumer}")
    return Site(inputs.float(), _some(weight, ROWS, generator).float())


def weight_of(module: nn.Module) -> torch.Tensor:
    """`[out, in]` of a linear layer."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach() if input_dim(module) == 1 else weight.detach().T


def _finite(statistics: Statistics, name: str) -> torch.Tensor:
    """The samples; CompressError where they are not finite, or there are none."""
    if not statistics.finite or statistics.samples is None or len(statistics.samples) == 0:
        raise CompressError(f"{name}: its calibration inputs hold NaN or Inf, or there are none")
    return statistics.samples


def footprint_of_learning(whole: ModelSize, rows: Rows, cost: float, speed: Speed, on_cpu: bool) -> Footprint:
    """Footprint of learning from sites: a pass that collects them, and another, which writes, that collects values.

    Args:
        cost: multiplications, see `RotateMethod.cost`. on_cpu: the model computes there.
    """
    # Inputs and rows of all sites, those of a block before some are drawn, and the matrices of the descent.
    memory = 8 * ELEMENTS + 16 * SAMPLES * whole.hidden + 192 * whole.hidden**2
    memory += whole.itemsize * (whole.outside + whole.block) + whole.forward(rows)
    seconds = (8.0 * whole.inside * tokens(rows) + cost) / speed.single  # each block runs twice in both passes
    return Footprint(
        memory=memory if on_cpu else 0, device=0 if on_cpu else memory, states=whole.states(rows), seconds=seconds
    )


def _some(rows: torch.Tensor, most: int, generator: torch.Generator) -> torch.Tensor:
    """At most so many of the rows, drawn at random."""
    return rows[torch.randperm(len(rows), generator=generator)[:most].to(rows.device)]
