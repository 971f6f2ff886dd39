"""Typed operations of a decoder over named buffers of rows: plain data, which names the modules whose weights it uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, TypeAlias

import torch

from runtime.modeling.experts import Gate as ExpertGate
from runtime.modeling.experts import Layout

# Buffers of every program: the residual stream `[rows, hidden]` and `[rows, vocabulary]`.
STREAM, LOGITS = "stream", "logits"

Half = Literal["attention", "mlp"] | None
"""What an operation is part of alone, so that it is left out with it."""


class UnknownError(Exception):
    """A model computes something that no operation does; the sentence names the module and what is unknown about it."""


@dataclass(frozen=True)
class Place:
    """Where in the rows of a buffer numbers begin."""

    buffer: str
    at: int = 0


@dataclass(frozen=True)
class Span:
    """Where heads lie in the rows of a buffer: head h at `at + h // group * group_step + h % group * step`."""

    buffer: str
    at: int = 0
    step: int = 0
    group: int = 1
    group_step: int = 0


@dataclass(frozen=True)
class NormWeights:
    """A norm module: RMS norm, or with `layer` layer norm; its weight is taken plus `shift` (1 in Gemma)."""

    module: str
    layer: bool
    shift: float
    eps: float


@dataclass(frozen=True)
class Norm:
    """target (+)= norm of `width` numbers of source; `add`: to what is there."""

    source: Place
    target: Place
    width: int
    weights: NormWeights
    add: bool = False
    half: Half = None


@dataclass(frozen=True)
class Linear:
    """target (+)= the linear layer `module` of source, `inputs` numbers to `outputs`.

    Attributes:
        transposed: a dense layer's weight lies there `[inputs, outputs]`.
    """

    source: Place
    target: Place
    inputs: int
    outputs: int
    module: str
    transposed: bool = False
    add: bool = False
    half: Half = None


@dataclass(frozen=True)
class Turned:
    """`rotary` numbers of a head from `at` on, rotated by the program's `rotation`: halves against each other, or neighbours (`pairs`)."""

    rotary: int
    rotation: int
    pairs: bool
    at: int = 0


@dataclass(frozen=True)
class Heads:
    """target = query heads, normed and rotated; keys likewise, into the cache with the values.

    Attributes:
        key_rest: where the rotated numbers of keys are, at the end of each (latent attention); None: with the others.
    """

    query: Span
    key: Span
    value: Span
    target: Place
    query_norm: NormWeights | None
    key_norm: NormWeights | None
    turned: Turned
    key_rest: Span | None = None
    half: Half = None


@dataclass(frozen=True)
class Attend:
    """target `[heads * value_dim]` = causal attention of the queries over the cache.

    Attributes:
        window: positions that a query sees, its own included; 0: all before it.
        softcap: of scores; 0: none.
        sinks: name of the parameter `[heads]` of logits that take part in the softmax and have no value; None: there are none.
    """

    source: Place
    target: Place
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: str | None = None
    half: Half = None


@dataclass(frozen=True)
class Gate:
    """source = activation(source) * other, in place; `other` None: activation(source)."""

    source: Place
    other: Place | None
    width: int
    activation: str
    half: Half = None


@dataclass(frozen=True)
class Add:
    """target += scale * source."""

    source: Place
    target: Place
    width: int
    scale: float
    half: Half = None


@dataclass(frozen=True)
class Cap:
    """target = cap * tanh(scale * target / cap), in place; `cap` 0: scale * target."""

    target: Place
    width: int
    scale: float
    cap: float = 0.0
    half: Half = None


@dataclass(frozen=True)
class Routing:
    """How the router `module` chooses experts and weighs them, of logits `x weight^T + bias`.

    Attributes:
        score: "softmax" over all experts, "chosen": softmax over the chosen ones, or "sigmoid".
        chosen: experts of a token: those of the highest scores, plus the parameter or buffer `correction` if there is one.
        groups, best: only experts of the `best` groups are chosen, those whose two highest scores add up to the most.
        normalize: weights are divided by their sum + `epsilon`; then all are multiplied by `scale`.
        bias: name of that parameter of the module.
    """

    module: str
    score: str
    chosen: int
    groups: int
    best: int
    normalize: bool
    epsilon: float
    scale: float
    bias: str | None
    correction: str | None


@dataclass(frozen=True)
class Mixture:
    """target (+)= the weighted sum of what the chosen ones of `experts` make of `width` numbers of source.

    Attributes:
        experts: the module that holds them, as `layout` says, in one or one by one; `gate`: between an expert's products.
    """

    source: Place
    target: Place
    width: int
    routing: Routing
    experts: str
    layout: Layout
    gate: ExpertGate
    add: bool = False
    half: Half = None


@dataclass(frozen=True)
class Weigh:
    """target = sigmoid(source) * target, in place; source is one number of a row."""

    source: Place
    target: Place
    width: int
    half: Half = None


Operation: TypeAlias = Norm | Linear | Heads | Attend | Gate | Add | Cap | Mixture | Weigh


@dataclass(frozen=True)
class Layer:
    """One block, `name` its module."""

    name: str
    operations: tuple[Operation, ...]


@dataclass(frozen=True)
class Embedding:
    """A table `module` that adds `scale` times its row of each token, or with `offset` of each position + offset."""

    module: str
    scale: float = 1.0
    offset: int | None = None


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of positions times `frequencies` (`rotary / 2` of them, float32), all multiplied by `scale`."""

    frequencies: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class Program:
    """A decoder.

    Attributes:
        tail: from the residual stream after the last layer to the logits.
        heads, kv_heads, head_dim, value_dim: of every layer's attention.
    """

    embeddings: tuple[Embedding, ...]
    layers: tuple[Layer, ...]
    tail: tuple[Operation, ...]
    rotations: tuple[Rotation, ...]
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


def reads(operation: Operation) -> list[str]:
    """Buffers whose numbers it uses."""
    found = [_buffer(operation, name) for name in ("source", "other", "query", "key", "value", "key_rest")]
    if isinstance(operation, Cap | Weigh) or getattr(operation, "add", False) or isinstance(operation, Add):
        found.append(_buffer(operation, "target"))
    return [name for name in found if name is not None]


def writes(operation: Operation) -> list[str]:
    """Buffers that it changes."""
    name = _buffer(operation, "source" if isinstance(operation, Gate) else "target")
    return [] if name is None else [name]


def _buffer(operation: Operation, field: str) -> str | None:
    place = getattr(operation, field, None)
    return place.buffer if isinstance(place, Place | Span) else None


# ---------------------------------------------------------------- as JSON
_TYPES: dict[str, Any] = {name: each for name, each in globals().items() if is_dataclass(each)}
_NAMES = {each: name for name, each in _TYPES.items()}
_TYPE, _DTYPE = "type", "dtype"


def encode(value: Any) -> Any:
    """A program, or a part of one, as JSON has it: every number comes back as it was."""
    if isinstance(value, tuple):
        return [encode(each) for each in value]
    if isinstance(value, torch.dtype):
        return {_TYPE: _DTYPE, "name": str(value).removeprefix("torch.")}
    if is_dataclass(value):
        return {
            _TYPE: _NAMES[type(value)],  # type: ignore[index]
            **{each.name: encode(getattr(value, each.name)) for each in fields(value)},
        }
    return value


def decode(value: Any) -> Any:
    """Inverse of `encode`; KeyError, TypeError, AttributeError: it is of something else."""
    if isinstance(value, list):
        return tuple(decode(each) for each in value)
    if not isinstance(value, dict):
        return value
    content = {name: decode(each) for name, each in value.items()}
    kind = content.pop(_TYPE)
    return getattr(torch, content["name"]) if kind == _DTYPE else _TYPES[kind](**content)


def parts(value: Any) -> Iterator[Any]:
    """A program and all dataclasses in it."""
    if isinstance(value, tuple):
        for each in value:
            yield from parts(each)
    elif is_dataclass(value):
        yield value
        for each in fields(value):
            yield from parts(getattr(value, each.name))
