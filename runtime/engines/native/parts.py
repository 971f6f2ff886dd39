"""Structures of program.h, made of the program of a decoder: what C cannot compute is a reason, not a guess."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime.engines.program import operations as typed
from runtime.engines.program.activations import ACTIVATIONS
from runtime.engines.program.leaves import apply_norm, norm_parameters
from runtime.engines.program.operations import NormWeights, Program, UnknownError
from runtime.engines.program.read import read
from runtime.engines.program.tables import embed, rotation_tables
from runtime.kernels.cpu import decoder, library
from runtime.kernels.cpu.attention import MOST_CHANNELS, PAGE
from runtime.kernels.cpu.decoder import (
    MOST_BUFFERS,
    OPS,
    SKIP_ATTENTION,
    SKIP_MLP,
    Block,
    Decoder,
    HeadsOp,
    MixtureOp,
    NormOp,
    Op,
    Span,
)
from runtime.kernels.cpu.experts import GATES, SCORES, Reading, Router
from runtime.kernels.cpu.library import TYPES, Linear
from runtime.layers.native_experts import CLinears, read_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HALVES = {None: 0, "attention": SKIP_ATTENTION, "mlp": SKIP_MLP}

_COMPLETE = ("add", "weigh")  # operations of which there is no more to say than what each has


class Buffers:
    """Numbers of the buffers that operations name, and their widths; one is used again once nobody reads what is in it."""

    def __init__(self, program: Program) -> None:
        self._queries, self._values = program.heads * program.head_dim, program.heads * program.value_dim
        self._hidden = program.hidden
        self._widths = [program.hidden, program.vocabulary]

    def place(self, operations: Sequence[typed.Operation]) -> dict[str, int]:
        """Names to numbers, of a layer or the tail."""
        found = {typed.STREAM: decoder.STREAM, typed.LOGITS: decoder.LOGITS}
        ends = {name: at for at, each in enumerate(operations) for name in (*typed.reads(each), *typed.writes(each))}
        free = set(range(len(found), len(self._widths)))
        for at, operation in enumerate(operations):
            for name in typed.writes(operation):
                if name not in found:
                    found[name] = self._take(free, self._width(operation))
            free |= {
                found[name] for name, end in ends.items() if end == at and name not in (typed.STREAM, typed.LOGITS)
            }
        return found

    def _take(self, free: set[int], width: int) -> int:
        number = next((each for each in sorted(free) if self._widths[each] == width), None)
        if number is None:
            number = len(self._widths)
            self._widths.append(width)
        free.discard(number)
        return number

    def _width(self, operation: typed.Operation) -> int:
        if isinstance(operation, typed.Linear):
            return operation.outputs
        if isinstance(operation, typed.Norm | typed.Mixture):
            return operation.width
        return self._values if isinstance(operation, typed.Attend) else self._queries

    def widths(self) -> list[int]:
        """Of all buffers, and of one more for the rows whose logits are wanted."""
        return [*self._widths, self._hidden]


class Structures(CLinears):
    """Operations and modules in the structures of program.h; UnknownError where it cannot compute one.

    Attributes:
        arrays: of structures.
    """

    def __init__(self, buffers: Buffers, root: nn.Module, prefix: str = "") -> None:
        """`root`: has the modules that operations name; `prefix` is taken off their names."""
        super().__init__()
        self.arrays: list[Any] = []
        self._buffers, self._root, self._prefix = buffers, root, prefix

    def module(self, name: str) -> Any:
        """By the name that operations call it."""
        return self._root.get_submodule(name.removeprefix(self._prefix))

    def block(self, layer: typed.Layer) -> Block:
        """A layer, without a cache."""
        ops = self.ops(layer.operations)
        return Block(ops=ops, count=len(ops))

    def ops(self, operations: Sequence[typed.Operation]) -> Any:
        """An array of them."""
        slots = self._buffers.place(operations)
        found = (Op * len(operations))(*(self._op(each, slots) for each in operations))
        self.arrays.append(found)
        return found

    def _op(self, operation: typed.Operation, slots: dict[str, int]) -> Op:
        kind = type(operation).__name__.lower()
        if kind not in OPS:
            raise UnknownError(f"no operation in C is a {kind}")
        found = Op(kind=OPS.index(kind), half=_HALVES[operation.half], add=getattr(operation, "add", False))
        found.count, found.scale = getattr(operation, "width", 0), getattr(operation, "scale", 1.0)
        for field, place in (("from", getattr(operation, "source", None)), ("to", getattr(operation, "target", None))):
            if place is not None:
                setattr(found, "from_" if field == "from" else "to", slots[place.buffer])
                setattr(found, f"{field}_at", place.at)
        if kind not in _COMPLETE:
            getattr(self, f"_{kind}")(found, operation, slots)
        return found

    def _norm(self, op: Op, operation: typed.Norm, slots: dict[str, int]) -> None:
        weight, bias, _ = self.norm(operation.weights)
        op.norm = NormOp(weight, bias, operation.weights.eps, operation.weights.layer)

    def _linear(self, op: Op, operation: typed.Linear, slots: dict[str, int]) -> None:
        op.linear = self.linear(self.module(operation.module), operation.module)

    def _heads(self, op: Op, operation: typed.Heads, slots: dict[str, int]) -> None:
        spans = [self._span(each, slots) for each in (operation.query, operation.key, operation.value)]
        turned, rest = operation.turned, operation.key_rest
        heads = HeadsOp(*spans, rotary=turned.rotary, rotation=turned.rotation, pairs=turned.pairs, rotary_at=turned.at)
        heads.rest = Span(buffer=-1) if rest is None else self._span(rest, slots)
        for side, norm in (("query", operation.query_norm), ("key", operation.key_norm)):
            if norm is None:
                continue
            weight, bias, apart = self.norm(norm)
            if bias is not None or weight is None:
                raise UnknownError(f"{norm.module}, a norm of heads, has a bias, or no weight")
            setattr(heads, f"{side}_norm", weight)
            setattr(heads, f"{side}_apart", apart)
            heads.eps, heads.layer = norm.eps, norm.layer
        found = [each for each in (operation.query_norm, operation.key_norm) if each is not None]
        if len({(each.eps, each.layer) for each in found}) > 1:
            raise UnknownError(f"{found[0].module} and {found[1].module} are norms of different kinds")
        op.heads = heads

    def _attend(self, op: Op, operation: typed.Attend, slots: dict[str, int]) -> None:
        op.attend.window = operation.window
        op.attend.scale, op.attend.softcap = operation.scale, operation.softcap
        if operation.sinks is not None:
            parent, _, leaf = operation.sinks.rpartition(".")
            op.attend.sinks = self.vector(getattr(self.module(parent), leaf))

    def _gate(self, op: Op, operation: typed.Gate, slots: dict[str, int]) -> None:
        other = operation.other
        op.gate.activation = list(ACTIVATIONS).index(operation.activation)
        op.gate.other, op.gate.other_at = (-1, 0) if other is None else (slots[other.buffer], other.at)

    def _cap(self, op: Op, operation: typed.Cap, slots: dict[str, int]) -> None:
        op.cap = operation.cap

    def _mixture(self, op: Op, operation: typed.Mixture, slots: dict[str, int]) -> None:
        rule = operation.routing
        module = self.module(rule.module)
        bias, correction = (None if n is None else getattr(module, n).detach() for n in (rule.bias, rule.correction))
        logits = self.dense(module.weight.detach().contiguous(), bias, rule.module)
        home = self.module(operation.experts)
        experts = read_experts(home, operation.layout, operation.gate, self, operation.experts)
        if isinstance(logits, str) or isinstance(experts, str):
            raise UnknownError(next(each for each in (logits, experts) if isinstance(each, str)))
        if not 0 < rule.chosen <= experts.count or experts.count % rule.groups:
            raise UnknownError(
                f"{rule.module} chooses {rule.chosen} of {experts.count} experts in {rule.groups} groups"
            )
        router = Router(
            logits, SCORES[rule.score], rule.chosen, rule.groups, rule.best, rule.normalize, rule.epsilon, rule.scale,
            None if correction is None else self.vector(correction),
        )  # fmt: skip
        self.arrays += [router, experts]
        op.mixture = MixtureOp(ctypes.pointer(router), ctypes.pointer(experts))

    def _span(self, span: typed.Span, slots: dict[str, int]) -> Span:
        return Span(slots[span.buffer], span.group, span.at, span.step, span.group_step)

    def norm(self, weights: NormWeights) -> tuple[int | None, int | None, int]:
        """Addresses of weight and bias, and how far one head's weight is from the next (0: all have one)."""
        weight, bias = norm_parameters(self.module(weights.module))
        apart = weight.shape[-1] if weight is not None and weight.dim() == 2 else 0
        return (
            None if weight is None else self.vector(weight.float() + weights.shift if weights.shift else weight),
            None if bias is None else self.vector(bias),
            apart,
        )

    def linear(self, module: nn.Module, name: str) -> Linear:
        """The layer as C reads it; a dense one as it lies in memory."""
        found = self.of(module, name)
        if isinstance(found, str):
            raise UnknownError(found)
        return found


class Parts(Structures):
    """A program in the structures of program.h."""

    def __init__(self, program: Program, model: nn.Module, dtype: torch.dtype) -> None:
        self.program, self.model = program, model
        self.buffers = Buffers(program)
        super().__init__(self.buffers, model)
        self.vocabulary = program.vocabulary
        self.kv_heads, self.head_dim, self.value_dim = program.kv_heads, program.head_dim, program.value_dim
        if dtype not in TYPES:
            raise UnknownError(f"its dtype is {dtype}")
        if max(self.head_dim, self.value_dim) > MOST_CHANNELS:
            raise UnknownError(f"its heads have more than {MOST_CHANNELS} channels")
        self.cache_dtype = dtype
        self.blocks = [self.block(layer) for layer in program.layers]
        tail = self.ops(program.tail)
        widths = self.buffers.widths()
        if len(widths) > MOST_BUFFERS:
            raise UnknownError(f"it has rows of {len(widths)} different widths")
        self.decoder = Decoder(
            layers=len(self.blocks),
            hidden=program.hidden,
            heads=program.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            buffers=len(widths),
            tail_count=len(tail),
            cache_type=TYPES[self.cache_dtype],
            widths=(ctypes.c_int64 * len(widths))(*widths),
            tail=tail,
        )

    @property
    def inputs(self) -> list[Linear | Reading]:
        """Structures that hold `digits` and `rounding`: those of linear layers, and of each layer's experts together."""
        parts = [(block.ops, block.count) for block in self.blocks] + [(self.decoder.tail, self.decoder.tail_count)]
        every = [each for ops, count in parts for each in linears(ops, count)]
        experts = [op.mixture.experts.contents for op, _, share in every if share < 1.0]
        return [*(each for _, each, _ in every), *(x for each in experts for x in (each.first, each.second))]

    @contextmanager
    def unrounded(self) -> Iterator[None]:
        """While active, activation quantization is off in these structures. No step may run meanwhile."""
        rounded = [each for each in self.inputs if each.rounding.kind]
        before = [(each.digits, bytes(each.rounding)) for each in rounded]
        try:
            for each in rounded:
                each.digits, each.rounding = 3, library.Rounding()
            yield
        finally:
            for each, (digits, rounding) in zip(rounded, before, strict=True):
                each.digits, each.rounding = digits, library.Rounding.from_buffer_copy(rounding)

    @property
    def digits(self) -> set[int]:
        """Digit counts of the integer layers' activations."""
        return {each.digits for each in self.inputs if isinstance(each, Linear) and each.kind != library.KINDS["dense"]}

    @property
    def page_numbers(self) -> int:
        """Keys and values of a page of one layer."""
        return self.kv_heads * (self.head_dim + self.value_dim) * PAGE

    @property
    def head(self) -> Linear:
        """The last linear layer."""
        return next(op for op in reversed(self.tail) if OPS[op.kind] == "linear").linear

    @property
    def tail(self) -> list[Op]:
        """Operations from the residual stream to the logits."""
        return [self.decoder.tail[i] for i in range(self.decoder.tail_count)]

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What the first layer reads, float32 `[rows, hidden]`."""
        return embed(self.program, self.model, ids, positions)

    def rotation(self, positions: int) -> list[torch.Tensor]:
        """Cosines and sines of every rotation, float32 `[positions, rotary / 2]`."""
        return rotation_tables(self.program, positions, torch.device("cpu"))

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """What the head reads of the residual stream `[rows, hidden]`."""
        for operation in self.program.tail:
            if isinstance(operation, typed.Norm):
                x = apply_norm(x, operation.weights, *norm_parameters(self.module(operation.weights.module)))
        return x


def linears(ops: Sequence[Op] | Any, count: int) -> list[tuple[Op, Linear, float]]:
    """Linear layers of operations, and how much of each a token reads: all, but a share of the experts."""
    found: list[tuple[Op, Linear, float]] = []
    for op in (ops[i] for i in range(count)):
        if OPS[op.kind] == "linear":
            found.append((op, op.linear, 1.0))
        elif OPS[op.kind] == "mixture":
            router, experts = op.mixture.router.contents, op.mixture.experts.contents
            own = [experts.expert[i] for i in range(experts.count)]
            each = [
                x
                for expert in own
                for x in (expert.gate, expert.up, expert.down)[experts.activation == GATES["none"] :]
            ]
            found += [(op, router.logits, 1.0), *((op, linear, router.chosen / experts.count) for linear in each)]
    return found


def read_parts(model: PreTrainedModel, device: torch.device) -> Parts | str:
    """The parts, or the reason why this model is not for the native engine."""
    if device.type != "cpu" or library.load() is None:
        return "it runs on CPUs" if device.type != "cpu" else "there is no C compiler"
    program = read(model)
    if isinstance(program, str):
        return program
    try:
        return Parts(program, model, _dtype(program, model))
    except UnknownError as error:
        return str(error)


def _dtype(program: Program, model: PreTrainedModel) -> torch.dtype:
    """Of the norms, in which the modules compute."""
    found = [parameter.dtype for name in _norms(program) for parameter in model.get_submodule(name).parameters()]
    return found[0] if found else model.dtype


def _norms(program: Program) -> list[str]:
    operations = [*program.tail, *(each for layer in program.layers for each in layer.operations)]
    return [each.weights.module for each in operations if isinstance(each, typed.Norm)]
