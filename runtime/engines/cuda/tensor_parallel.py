"""Tensor parallelism (Megatron-LM, Shoeybi et al., 2019, arXiv 1909.08053): each rank computes some heads and some channels of the MLP.

- q, k, v, gate and up are cut by outputs, o and down by the inputs that the rank's own heads and channels give. Their outputs are summed
  over the ranks: two all-reduces a layer, in the captured step.
- The head is cut by outputs, and logits are gathered: beside packed blocks it would be much of what a rank reads. Tied to the embeddings,
  it is computed from its rows of the whole table.
- Embeddings and norms are whole. They take next to no time, and a table in parts would need a third all-reduce.
- Where there are fewer key/value heads than ranks, several ranks hold a copy of one.

What a rank computes is the program of a smaller Llama, some of whose modules sum or gather. Decoder, graphs and cache, which holds the
rank's heads, know nothing of ranks. Ranks read only their parts from the files.

Where inputs are quantized with a scale for each token (W8A8), those of o and down get one for each token and rank, of what the rank has,
as in vLLM: no rank rounds more coarsely than one process would, but results are not those of one process.
"""

from __future__ import annotations

import atexit
import copy
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime import formats
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.checkpoint.headers import TensorEntry
from runtime.engines.blueprint import Blueprint
from runtime.engines.cuda.engine import CudaEngine
from runtime.engines.cuda.steps import CudaGraphs
from runtime.engines.llama_structure import Block, FeedForward, Program, read_program
from runtime.errors import RequestError
from runtime.formats.cut import COLUMNS, ROWS, Cut, Index
from runtime.kernels.triton import gpu
from runtime.layers.compressed_linear import CompressedLinear
from runtime.modeling.skeleton import tied_names
from runtime.modeling.weights import Filling
from runtime.system.ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Bounds = Sequence[tuple[int, int]]  # (first, end) of each rank
ALIGNED = 64  # outputs and inputs of layers, as tensor cores and vector loads like them
_log = logging.getLogger("compress.engine")


def load(whole: Blueprint, size: int, *options: Any) -> CudaEngine:
    """Join the other ranks and read this one's part of a model.

    Args:
        whole: the model. size: how many ranks there must be.
        options: of the model that all ranks must have alike, beside those of the blueprint.

    Raises:
        RequestError: `Ranks.join`, `RankBlueprint`; or the ranks load different things.
    """
    ranks = Ranks.join(size, whole.device)
    asked = (whole.artifact.checkpoint.fingerprint(), whole.kernels, str(whole.dtype), options)
    ranks.check_same("what is loaded", asked)
    blueprint = RankBlueprint(whole, ranks)
    if ranks.rank == 0 and any(_rounds_tokens(module) for module in blueprint.module.modules()):
        _log.warning(
            "inputs of o and down are rounded with a scale for each token and rank, so results differ from those of one process"
        )
    return blueprint.engine()


def _rounds_tokens(layer: nn.Module) -> bool:
    """Whether a layer's inputs are rounded with scales of all that there are of a token, found in each step."""
    scheme = layer.entry.scheme if isinstance(layer, CompressedLinear) else None
    return (
        scheme is not None
        and scheme.activations is not None
        and scheme.activations.dynamic is True
        and (scheme.activations.group_size is None)
    )


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
        program = read_program(module, mixtures=False)
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
                raise RequestError(
                    "tensor_parallel: the GPU engine needs NVIDIA GPUs of compute capability 8.0 or later"
                )
            if capture is None:
                capture = CudaGraphs(self.device)
                atexit.register(capture.reset)  # before `Ranks` closes its connections
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
            raise RequestError(f"{names[layer]}: {reason}, and ranks would each have some of them; take fewer ranks")
        cuts[names[layer]] = every[rank]

    def _unit(layer: nn.Module, axis: int) -> int:
        try:
            return layer_unit(layer, axis)
        except RequestError as error:
            raise RequestError(f"{names[layer]}: {error}") from None

    queries, keys = heads_of_ranks(program.heads, program.kv_heads, size)
    for block in program.blocks:
        q, k, v = block.qkv.layers
        for layer, bounds in ((q, queries), (k, keys), (v, keys)):
            cut(layer, 0, bounds, program.head_dim)
        cut(block.output, 1, queries, program.head_dim)
        mlp = _feed_forward(block)
        (gate, up), down = mlp.gate_up.layers, mlp.down
        step = math.lcm(_unit(gate, 0), _unit(up, 0), _unit(down, 1))
        channels = spread(_shape(down)[1], step, size, f"channels of {names[down]}")
        for layer, axis in ((gate, 0), (up, 0), (down, 1)):
            cut(layer, axis, channels)
    logits = spread(program.vocabulary, _unit(program.head, 0), size, "logits")
    if f"{names[program.head]}.weight" not in {name for pair in tied_names(model).items() for name in pair}:
        cut(program.head, 0, logits)
    return cuts, logits


def _feed_forward(block: Block) -> FeedForward:
    assert isinstance(block.mlp, FeedForward), "mixtures are refused before"
    return block.mlp


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
        raise RequestError(
            f"{heads} query heads and {kv_heads} key/value heads do not divide among {size} ranks; {allowed}"
        )
    queries = [(rank * heads // size, (rank + 1) * heads // size) for rank in range(size)]
    keys = [(rank * kv_heads // size, max(1, (rank + 1) * kv_heads // size)) for rank in range(size)]
    if shared:
        keys = [(first, first + 1) for first, _ in keys]
    return queries, keys


def spread(total: int, step: int, size: int, what: str) -> Bounds:
    """Bounds of each rank's part of `total`, at multiples of `step`, as even as those allow.

    Large totals that do not divide evenly are cut at multiples of `ALIGNED`.

    Raises:
        RequestError: a rank would have none.
    """
    aligned = math.lcm(step, ALIGNED)
    if total % (size * step) and total >= 16 * size * aligned:
        step = aligned
    steps = -(-total // step)
    if steps < size:
        raise RequestError(
            f"{total} {what} are {steps} groups of {step} that stay together, fewer than {size} ranks; take fewer ranks"
        )
    return [(steps * rank // size * step, min(total, steps * (rank + 1) // size * step)) for rank in range(size)]


def _shape(layer: nn.Module) -> tuple[int, int]:
    return int(layer.out_features), int(layer.in_features)  # type: ignore[arg-type]


# ---------------------------------------------------------------- reading a part
def layer_unit(layer: nn.Module, axis: int) -> int:
    """Rows (`axis` 0) or columns (1) of a linear layer's weight that stay together where it is cut.

    Raises:
        RequestError: its format, or a layer of its class, cannot be cut.
    """
    if isinstance(layer, CompressedLinear):
        return formats.get(layer.entry.format).unit(layer.entry.scheme, layer.shape, layer.stored_dtype, axis)
    if type(layer) is not nn.Linear:
        raise RequestError(f"a {type(layer).__name__} cannot be cut, only linear layers can")
    return 1


class PartCheckpoint(Checkpoint):
    """A checkpoint that has only a part of some tensors.

    Args:
        checkpoint: the files.
        parts: {stored name: where in the tensor its part lies}.
        values: {stored name: what is read in the place of the tensor}.
    """

    def __init__(self, checkpoint: Checkpoint, parts: Mapping[str, Index], values: Mapping[str, torch.Tensor]) -> None:
        self.__dict__.update(copy.copy(checkpoint.__dict__))
        self._files, self._parts, self._values = checkpoint, parts, values
        entries = {name: checkpoint.entry(name) for name in checkpoint.names()}
        for name, index in parts.items():
            entries[name] = _part_entry(entries[name], index)
        self._tensors: dict[str, TensorEntry] = entries
        self.total_bytes = sum(entry.nbytes for entry in entries.values())

    def get(self, name: str) -> torch.Tensor:
        """One tensor, or the part of it that this checkpoint has; nothing else is read."""
        if name in self._values:
            return self._values[name]
        return self._files.get_part(name, self._parts[name]) if name in self._parts else self._files.get(name)

    def get_item(self, name: str, index: int) -> torch.Tensor:
        """Item `index` of a tensor along its first dimension."""
        changed = name in self._values or name in self._parts
        return self.get(name)[index] if changed else self._files.get_item(name, index)


def _part_entry(entry: TensorEntry, index: Index) -> TensorEntry:
    shape = tuple(len(range(*each.indices(size))) for each, size in zip(index, entry.shape, strict=True))
    return replace(entry, shape=shape, nbytes=math.prod(shape) * entry.dtype.itemsize)


def partition(
    model: PreTrainedModel, checkpoint: Checkpoint, compressed: frozenset[str], cuts: Mapping[str, Cut], adds_bias: bool
) -> Checkpoint:
    """Replace linear layers of a skeleton by parts of them, still on meta; the checkpoint that has just what the skeleton then needs.

    Args:
        model: the whole skeleton, its compressed layers installed.
        checkpoint: of the whole model.
        compressed: names of those layers.
        cuts: {layer: its part}.
        adds_bias: whether layers cut along their inputs keep their bias, which is zero otherwise: one part of each sum has it.

    Raises:
        RequestError: the format of a layer cannot be cut so. ArtifactError: the checkpoint is not that of the model.
    """
    filling = Filling(model, checkpoint, model.dtype, torch.device("cpu"), compressed)  # also checks the whole
    if filling.foreign:
        raise RequestError(
            f"{checkpoint.path} names its tensors in another way than {type(model).__name__}, and cannot be read in parts"
        )
    parts: dict[str, Index] = {}
    values: dict[str, torch.Tensor] = {}
    for name, cut in cuts.items():
        layer = model.get_submodule(name)
        try:
            part, index = _part(layer, cut)
        except RequestError as error:
            raise RequestError(f"{name}: {error}") from None
        for leaf, where in index.items():
            stored = filling.names[f"{name}.{leaf}"]
            if leaf == "weight_shape":
                values[stored] = torch.tensor(cut.shape, dtype=torch.int64)
            elif leaf == "bias" and cut.axis == 1 and not adds_bias:
                values[stored] = torch.zeros(checkpoint.shape(stored), dtype=checkpoint.dtype(stored))
            else:
                parts[stored] = where
        model.set_submodule(name, part)
    return PartCheckpoint(checkpoint, parts, values)


def _part(layer: nn.Module, cut: Cut) -> tuple[nn.Module, dict[str, Index]]:
    """The empty layer, and where in each tensor of the whole its own lies."""
    rows, columns = cut.shape
    bias = getattr(layer, "bias", None) is not None
    part: nn.Module
    if isinstance(layer, CompressedLinear):
        storage = formats.get(layer.entry.format)
        index = storage.cut(layer.entry.scheme, layer.stored_dtype, cut)
        part = CompressedLinear(layer.entry, cut.shape, bias, layer.stored_dtype)
    else:
        layer_unit(layer, cut.axis)
        index = {"weight": cut.index((ROWS, COLUMNS))}
        part = nn.Linear(columns, rows, bias, device="meta", dtype=layer.weight.dtype)
    if bias:
        index["bias"] = cut.index((ROWS,))
    return part.eval().requires_grad_(False), index


# ---------------------------------------------------------------- the program of a rank
class SummedLinear(nn.Module):
    """A linear layer of which each rank has some inputs: its output is the sum over the ranks."""

    def __init__(self, layer: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.layer, self._ranks = layer, ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, out]`, the same bits on every rank."""
        return self._ranks.all_reduce(self.layer(x))


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
        every = self._ranks.all_gather(own)
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
    blocks = []
    for block in program.blocks:
        mlp = _feed_forward(block)
        summed = replace(mlp, down=SummedLinear(mlp.down, ranks))
        blocks.append(replace(block, output=SummedLinear(block.output, ranks), mlp=summed))
    vocabulary = logits[-1][1]
    whole = program.vocabulary == vocabulary
    head = GatheredHead(program.head, ranks, logits, whole)
    return replace(program, blocks=blocks, head=head, vocabulary=vocabulary)
