"""Footprint of parts of a run, from shapes: bytes of memory and disk, and seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from compress.model.streamed import StreamedModel
from runtime.layers.dense_products import is_slow, products
from runtime.modeling.linear_modules import sides

Rows = Sequence[tuple[int, ...]]
"""Shapes of batches of text, `(rows, tokens)`."""
#: Artifacts up to this size are also loaded whole, as `runtime.load` does it, and their kernels compared with the reference.
WHOLE_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Footprint:
    """Of a pass over a model, beside what the process holds anyway. What it holds one after the other counts once.

    Attributes:
        memory: bytes of the machine's memory. device: bytes of a GPU's, where one computes.
        states: bytes of hidden states of all rows, which are in memory or, where they spill, in files.
        disk: bytes in the work directory at the most, without the checkpoints that go in and come out. spilled: so many more where
            hidden states spill.
        seconds: that it takes, about.
        advice: what would take less memory, in words.
        parts: {phase: bytes of memory} where phases of a stage are told apart; empty: they are not.
    """

    memory: int = 0
    device: int = 0
    states: int = 0
    disk: int = 0
    spilled: int = 0
    seconds: float = 0.0
    advice: str = "use a machine with more"
    parts: dict[str, int] = field(default_factory=dict)

    def after(self, other: Footprint) -> Footprint:
        """Of this one and another that comes before it, whose files stay; what would help is what helps the larger."""
        larger = max(other, self, key=lambda one: one.memory + one.device + one.states)
        return Footprint(
            max(self.memory, other.memory), max(self.device, other.device), max(self.states, other.states), self.disk + other.disk,
            self.spilled + other.spilled, self.seconds + other.seconds, larger.advice,
        )  # fmt: skip


@dataclass(frozen=True)
class ModelSize:
    """A model in numbers.

    Attributes:
        total: parameters, tied ones once. outside: those that are in no block. block: those of the largest block.
        largest: numbers of the largest matrix.
        blocks, hidden, heads, vocabulary: as its config says them.
        linears: inputs and outputs of every linear layer of the blocks.
        stored: bytes of its tensors on the disk.
        itemsize: bytes of a number as it computes.
        widened: matrices become float32 when they are used, since the CPU has no products of their dtype.
        encoder: it says no next token.
        eager: its attention is written out.
    """

    total: int
    outside: int
    block: int
    largest: int
    blocks: int
    hidden: int
    heads: int
    vocabulary: int
    linears: tuple[tuple[int, int], ...] = field(repr=False)
    stored: int
    itemsize: int
    widened: bool
    encoder: bool
    eager: bool

    @classmethod
    def of(cls, streamed: StreamedModel) -> ModelSize:
        """Of a model whose weights need not be there."""
        config = streamed.config.get_text_config()
        blocks = [sum(p.numel() for p in block.parameters()) for block in streamed.blocks]
        total = sum(p.numel() for p in streamed.model.parameters())
        cpu = streamed.device.type == "cpu"
        return cls(
            total=total,
            outside=total - sum(blocks),
            block=max(blocks, default=0),
            largest=max((p.numel() for p in streamed.model.parameters() if p.dim() == 2), default=0),
            blocks=len(blocks),
            hidden=int(getattr(config, "hidden_size", 0)),
            heads=int(getattr(config, "num_attention_heads", 1)),
            vocabulary=int(getattr(config, "vocab_size", 0)),
            linears=tuple((shape[1], shape[0]) for module in streamed.blocks.modules() if (shape := sides(module))),
            stored=sum(streamed.checkpoint.held_bytes(name) for name in streamed.checkpoint.names()),
            itemsize=streamed.dtype.itemsize,
            widened=cpu and is_slow(streamed.dtype),
            encoder=streamed.kind == "encoder",
            eager=getattr(streamed.model.config.get_text_config(), "_attn_implementation", None) in (None, "eager"),
        )

    @property
    def inside(self) -> int:
        """Parameters of all blocks."""
        return self.total - self.outside

    @property
    def widest(self) -> int:
        """Inputs of the linear layer of the blocks that has the most."""
        return max((inputs for inputs, _ in self.linears), default=0)

    def states(self, rows: Rows) -> int:
        """Bytes of the hidden states of rows."""
        return tokens(rows) * self.hidden * self.itemsize

    @property
    def wide_copy(self) -> int:
        """Bytes of the float32 copy of the weight at hand, where products are widened."""
        return 4 * self.largest if self.widened else 0

    def forward(self, rows: Rows) -> int:
        """Bytes that running a block over one batch takes, beside its weights and the states."""
        batch = max((math.prod(shape) for shape in rows), default=0)
        # Attention that is written out holds a score for every pair of tokens; fused kernels do not.
        attention = max((shape[0] * shape[1] ** 2 * self.heads * 4 for shape in rows), default=0) if self.eager else 0
        return self.wide_copy + batch * (self.widest + self.hidden) * self.itemsize * 4 + min(attention, 2**30)


@dataclass(frozen=True)
class Speed:
    """Floating-point operations a second: in the model's dtype, in float32, and of solvers, which are run on the CPU in float64."""

    own: float
    single: float
    double: float

    @classmethod
    def measured(cls, streamed: StreamedModel) -> Speed:
        """By small products, where the model computes."""
        single = _flops(torch.float32, streamed.device)
        return cls(_flops(streamed.dtype, streamed.device), single, _flops(torch.float64, torch.device("cpu")))


def tokens(rows: Rows) -> int:
    """Tokens of all rows, padding included."""
    return sum(math.prod(shape) for shape in rows)


def one_row_at_a_time(rows: Rows) -> list[tuple[int, ...]]:
    """The batches as they would be with `batch_size: 1`."""
    return [(1, *shape[1:]) for shape in rows]


@cache
def _flops(dtype: torch.dtype, device: torch.device) -> float:
    """Of a square product, best of a few; measured once a process."""
    size = 512 if device.type == "cpu" else 4096
    generator = torch.Generator().manual_seed(0)  # a plan is no part of what a seed decides
    a, b = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    best = math.inf
    with products(a.device, a.dtype):
        for _ in range(5):
            start = time.perf_counter()
            torch.mm(a, b)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
