"""Tensor parallelism (Megatron-LM, Shoeybi et al., 2019, arXiv 1909.08053): each rank computes some heads and some channels of the MLP.

Of q, k, v, gate and up a rank has rows (outputs), of o and down the columns (inputs) that read them, so that it sums its results with
those of the others after o and after down: two all-reduces a layer. The head's rows are cut too, since with packed blocks it would be much of
what a rank reads, and its logits are gathered. Embeddings and norms are whole: they cost nothing, and rows of a table that is cut would
take another all-reduce. Tied to the embeddings, the head is computed from its rows of the whole table.

The rank's model is the program of a smaller Llama, whose modules sum and gather: the decoder, its graphs and its cache, which has the
rank's heads only, are those of one GPU. Inputs of o and down that are quantized with a scale for each token get one for each token and
rank, of the rank's own inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime.engines.blueprint import Blueprint
from runtime.engines.cuda.engine import CudaEngine, CudaGraphs
from runtime.engines.llama_structure import Program, read_program
from runtime.errors import RequestError
from runtime.formats.cut import Cut
from runtime.kernels.triton import gpu
from runtime.layers.partition import partition, unit
from runtime.modeling.skeleton import tied_names
from runtime.system.ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Bounds = Sequence[tuple[int, int]]  # (first, end) of each rank


def load(whole: Blueprint, size: int, *options: Any) -> CudaEngine:
    """Join the other ranks and read this one's part of a model.

    Args:
        whole: the model. size: how many ranks there must be.
        options: of the model that all ranks must have alike, beside those of the blueprint.

    Raises:
        RequestError: `Ranks.join`, `RankBlueprint`; or the ranks load different things.
    """
    ranks = Ranks.join(size, whole.device)
    ranks.check_same("what is loaded", (whole.artifact.checkpoint.fingerprint(), whole.kernels, str(whole.dtype), options))
    return RankBlueprint(whole, ranks).engine()


class RankBlueprint(Blueprint):
    """The part of a model that one rank computes, before its weights are read; other parts are never read.

    Attributes:
        ranks: that compute the model together. logits: of each rank, known with the skeleton.
    """

    def __init__(self, whole: Blueprint, ranks: Ranks) -> None:
        super().__init__(whole.artifact, whole.device, whole.kernels, whole.dtype, whole.trust_remote_code)
        self.ranks = ranks
        self.logits: Bounds = ()

    def build_skeleton(self) -> tuple[PreTrainedModel, frozenset[str]]:
        """The skeleton of the part.

        Raises:
            RequestError: the engine does not run the model, or it cannot be cut among so many ranks.
        """
        module, compressed = super().build_skeleton()
        program = read_program(module)
        if isinstance(program, str):
            raise RequestError(f"tensor_parallel: {program}, and no other engine divides a model among ranks")
        try:
            cuts, self.logits = cut_program(module, program, self.ranks.rank, self.ranks.size)
            first = self.ranks.rank == 0
            self.checkpoint = partition(module, self.artifact.checkpoint, compressed, cuts, adds_bias=first)
        except RequestError as error:
            raise RequestError(f"tensor_parallel={self.ranks.size}: {self.artifact.path}: {error}") from None
        return module, compressed

    def engine(self, capture: Any = None, **options: Any) -> CudaEngine:
        """The engine of this rank, its weights in memory; ranks must make it together.

        Args:
            capture, options: of `CudaEngine`; on a GPU decode steps are captured as CUDA graphs.
        """
        if self.device.type == "cuda":
            if gpu.capability(self.device) < (8, 0):
                raise RequestError("tensor_parallel: the GPU engine needs NVIDIA GPUs of compute capability 8.0 or later")
            capture = capture or CudaGraphs(self.device)
        engine = self.build()
        program = read_program(engine.module, fuse=True)
        assert isinstance(program, Program), program
        found = over_ranks(program, self.ranks, self.logits)
        return CudaEngine(engine, found, capture=capture, ranks=self.ranks, **options)


# ---------------------------------------------------------------- who computes what
def cut_program(model: PreTrainedModel, program: Program, rank: int, size: int) -> tuple[dict[str, Cut], Bounds]:
    """{linear layer: the part of it that a rank has} of a whole model, and the logits of each rank.

    Args:
        model: a skeleton. program: of it, its layers not joined.

    Raises:
        RequestError: it cannot be cut among `size` ranks.
    """
    names = {module: name for name, module in model.named_modules()}
    cuts: dict[str, Cut] = {}

    def cut(layer: nn.Module, axis: int, bounds: Bounds, scale: int = 1) -> None:
        """A layer, at `scale` times the bounds; of each rank, so that all refuse what one could not have."""
        every = [Cut(_shape(layer), axis, first * scale, end * scale) for first, end in bounds]
        step = _unit(layer, axis)
        reason = next((reason for each in every if (reason := each.why_not(step)) is not None), None)
        if reason is not None:
            raise RequestError(f"{names[layer]}: {reason}, and ranks would each have some of them")
        cuts[names[layer]] = every[rank]

    def _unit(layer: nn.Module, axis: int) -> int:
        try:
            return unit(layer, axis)
        except RequestError as error:
            raise RequestError(f"{names[layer]}: {error}") from None

    queries, keys = heads_of_ranks(program.heads, program.kv_heads, size)
    for block in program.blocks:
        q, k, v = block.qkv.layers
        for layer, bounds in ((q, queries), (k, keys), (v, keys)):
            cut(layer, 0, bounds, program.head_dim)
        cut(block.output, 1, queries, program.head_dim)
        gate, up = block.gate_up.layers
        step = lcm(_unit(gate, 0), _unit(up, 0), _unit(block.down, 1))
        channels = spread(_shape(block.down)[1], step, size, f"channels of {names[block.down]}")
        for layer, axis in ((gate, 0), (up, 0), (block.down, 1)):
            cut(layer, axis, channels)
    logits = spread(program.vocabulary, _unit(program.head, 0), size, "logits")
    if f"{names[program.head]}.weight" not in {name for pair in tied_names(model).items() for name in pair}:
        cut(program.head, 0, logits)
    return cuts, logits


def heads_of_ranks(heads: int, kv_heads: int, size: int) -> tuple[Bounds, Bounds]:
    """Query heads and key/value heads of each rank.

    Where there are fewer key/value heads than ranks, several ranks have a copy of one.

    Raises:
        RequestError: heads do not divide among the ranks.
    """
    shared = size % kv_heads == 0  # a head for several ranks, or for each
    if heads % size or not (shared or kv_heads % size == 0):
        fits = [n for n in range(2, 9) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        allowed = f"it can be cut among {', '.join(map(str, fits))}" if fits else "it cannot be cut at all"
        raise RequestError(f"{heads} query heads and {kv_heads} key/value heads do not divide among {size} ranks; {allowed}")
    queries = [(rank * heads // size, (rank + 1) * heads // size) for rank in range(size)]
    keys = [(rank * kv_heads // size, max(1, (rank + 1) * kv_heads // size)) for rank in range(size)]
    if shared:
        keys = [(first, first + 1) for first, _ in keys]
    return queries, keys


def spread(total: int, step: int, size: int, what: str) -> Bounds:
    """Bounds of each rank's part of `total`, at multiples of `step`, as even as those allow; RequestError where a rank would have none."""
    steps = -(-total // step)
    if steps < size:
        raise RequestError(f"{total} {what} are {steps} groups of {step} that stay together, fewer than ranks")
    return [(steps * rank // size * step, min(total, steps * (rank + 1) // size * step)) for rank in range(size)]


def _shape(layer: nn.Module) -> tuple[int, int]:
    return int(layer.out_features), int(layer.in_features)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the program of a rank
class SummedLinear(nn.Module):
    """A linear layer of which each rank has some inputs: its output is the sum over the ranks."""

    def __init__(self, layer: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.layer, self._ranks = layer, ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, out]`, the same bits on every rank."""
        return self._ranks.sum_(self.layer(x))


class GatheredHead(nn.Module):
    """A head of which each rank has some outputs: all logits on every rank.

    Args:
        layer: computes the outputs `bounds[ranks.rank]`, or with `whole` is a dense layer that has all.
    """

    def __init__(self, layer: nn.Module, ranks: Ranks, bounds: Bounds, whole: bool) -> None:
        super().__init__()
        first, end = bounds[ranks.rank]
        if whole:
            layer = _rows(layer, first, end)
        self.layer, self._ranks = layer, ranks
        self._widths = [end - first for first, end in bounds]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, vocabulary]`, the same bits on every rank."""
        own = self.layer(x)
        missing = max(self._widths) - own.shape[1]
        if missing:  # all send equally much
            own = nn.functional.pad(own, (0, missing))
        every = self._ranks.gather(own)
        return torch.cat([part[:, :width] for part, width in zip(every, self._widths, strict=True)], dim=1)


def _rows(layer: Any, first: int, end: int) -> nn.Linear:
    """Rows of a dense layer, which share its memory."""
    part = nn.Linear(layer.in_features, end - first, bias=False, device="meta")
    part.weight = nn.Parameter(layer.weight.detach()[first:end], requires_grad=False)
    if layer.bias is not None:
        part.bias = nn.Parameter(layer.bias.detach()[first:end], requires_grad=False)
    return part


def over_ranks(program: Program, ranks: Ranks, logits: Bounds) -> Program:
    """The program of a rank's part as one of the whole: it sums after each o and down, and gathers the logits."""
    blocks = [
        replace(block, output=SummedLinear(block.output, ranks), down=SummedLinear(block.down, ranks))
        for block in program.blocks
    ]
    vocabulary = logits[-1][1]
    whole = program.vocabulary == vocabulary
    head = GatheredHead(program.head, ranks, logits, whole)
    return replace(program, blocks=blocks, head=head, vocabulary=vocabulary)
