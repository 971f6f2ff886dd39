"""Collection of what layers read of the hidden state over calibration text, for rotations that are learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from compress.core.statistics import SAMPLES, Statistics
from compress.model.couplings import input_dim
from compress.model.hidden_states import HiddenStates
from compress.model.input_statistics import InputGroup, collect, forwards
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
        CompressError: inputs hold NaN or Inf, or there are none. RequestError: no linear layer reads a norm.
    """
    streamed, batches = run.streamed, run.batches
    size, generator = len(hidden.matrix), torch.Generator().manual_seed(0)
    most = max(1, ELEMENTS // (size * max(1, len(hidden.norms))))
    found: list[Site] = []

    def visit(index: int, states: HiddenStates) -> str:
        prefix, block = streamed.block_prefix(index), streamed.blocks[index]
        runs = forwards(streamed, index, states, batches)
        read: dict[str, list[str]] = {}
        for name, norm in hidden.readers(block, prefix, runs[0][0]).items():
            if input_dim(block.get_submodule(name.removeprefix(prefix))) is not None:
                read.setdefault(norm, []).append(name)
        groups = [InputGroup([norm.removeprefix(prefix)], size) for norm in read]
        collected = collect(block, groups, runs, needs=("samples",), stop_early=False) if groups else []
        for (norm, layers), statistics in zip(read.items(), collected, strict=True):
            x = _some(_finite(statistics, norm), min(most, SAMPLES), generator)
            found.append(Site(hidden.given(norm, x), rows_of(norm, layers)))
        for number, batch in enumerate(batches):
            states.put(number, streamed.advance(index, states.get(number), batch))
        return ""

    def rows_of(norm: str, layers: list[str]) -> torch.Tensor:
        weights = [weight_of(streamed.model.get_submodule(name)) for name in layers]
        rows = torch.cat([_some(weight, min(most, ROWS), generator).float() for weight in weights])
        return _some(rows, min(most, ROWS), generator) * hidden.gain(norm)

    run.visit("inputs of layers", batches, visit)
    if not found:
        raise RequestError(
            "no linear layer reads the hidden state, so there is nothing to learn a rotation from; take hadamard"
        )
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


def _some(rows: torch.Tensor, most: int, generator: torch.Generator) -> torch.Tensor:
    """At most so many of the rows, drawn at random."""
    return rows[torch.randperm(len(rows), generator=generator)[:most].to(rows.device)]
