"""Program of a transformers decoder, read off a trace of its forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime.engines.program.activations import find_activation
from runtime.engines.program.builder import Builder
from runtime.engines.program.layout import Turn, as_span, distinct, find_heads, find_parts, same
from runtime.engines.program.leaves import read_norm, shape_of
from runtime.engines.program.mixtures import experts_layout, read_router
from runtime.engines.program.operations import (
    LOGITS,
    Attend,
    Cap,
    Embedding,
    Gate,
    Heads,
    Layer,
    Linear,
    Mixture,
    Norm,
    NormWeights,
    Operation,
    Place,
    Program,
    Rotation,
    Span,
    Turned,
    UnknownError,
    Weigh,
)
from runtime.engines.program.tables import find_rotation, tables_at
from runtime.engines.program.trace import TOKENS, Event, Mask, Trace, trace
from runtime.modeling.experts import gate_of
from runtime.modeling.linear_modules import is_conv1d

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STATIC_ROTATIONS = ("default", "linear", "llama3", "yarn", "proportional")


def read(model: PreTrainedModel) -> Program | str:
    """The program of a decoder of transformers, or the reason why operations cannot say what it computes.

    Weights are not looked at: they may be anywhere.
    """
    name = type(model).__name__
    if not type(model).__module__.startswith("transformers.models."):
        return f"{name} is no class of transformers"
    try:
        return _Reader(trace(model)).program()
    except UnknownError as error:
        return str(error)


@dataclass(frozen=True)
class _HeadNorm:
    """A norm of heads: its weights, and where the heads came from."""

    weights: NormWeights
    bases: tuple[int, ...]
    name: str  # of the buffer that it norms


class _Reader:
    def __init__(self, found: Trace) -> None:
        self.trace = found
        self.model: Any = found._model
        self.rotations: list[Rotation] = []
        self.turns: list[Turn] = []
        self.heads: set[tuple[int, int, int, int]] = set()

    def program(self) -> Program:
        """The whole."""
        before, layers, after = self._parts()
        for event in self.trace.events:
            if event.kind == "rotary":
                self._rotation(event)
        embeddings = self._embeddings(before, layers[0][0].inputs[0])
        read = tuple(self._layer(events) for events in layers)
        for (*_, leave), (enter, *_) in pairwise(layers):
            if not torch.equal(leave.output[0], enter.inputs[0]):
                raise UnknownError(f"{enter.name} reads something else than what {leave.name} leaves")
        tail, vocabulary = self._tail(after, layers[-1][-1].output[0])
        self._check_called()
        if len(self.heads) != 1:
            raise UnknownError("its layers differ in the number or size of their heads")
        hidden = int(layers[0][0].inputs[0].shape[-1])
        return Program(embeddings, read, tail, tuple(self.rotations), hidden, vocabulary, *self.heads.pop())

    def _parts(self) -> tuple[list[Event], list[list[Event]], list[Event]]:
        """Events before the first layer, of each, and after the last."""
        before: list[Event] = []
        layers: list[list[Event]] = []
        after: list[Event] = []
        inside = False
        for event in self.trace.events:
            if event.kind == "enter":
                layers.append([])
                inside = True
            if event.kind != "rotary" or inside:
                (layers[-1] if inside else after if layers else before).append(event)
            if event.kind == "leave":
                inside = False
        if [layer[0].module for layer in layers] != list(self.trace.blocks[1]):
            raise UnknownError(f"its forward pass does not run {self.trace.blocks[0]} one after another")
        return before, layers, after

    def _check_called(self) -> None:
        """Everything with weights was called once."""
        called: dict[nn.Module, int] = {}
        for event in self.trace.events:
            if event.kind in ("linear", "norm", "embedding", "router", "experts"):
                called[event.module] = called.get(event.module, 0) + 1
        for module, count in called.items():
            if count > 1:
                raise UnknownError(f"{self.trace.names[module]} is called {count} times")
        inside: list[nn.Module] = [each for module in called for each in module.modules()]
        known = {id(each) for module in inside for each in module.parameters()}
        known |= {id(event.more.get("s_aux")) for event in self.trace.events}
        for name, module in self.model.named_modules():
            if any(id(each) not in known for each in module.parameters(recurse=False)):
                text = f"it has {name}, a {type(module).__name__}, which its forward pass does not call"
                raise UnknownError(text)

    # ---------------------------------------------------------------- before the first layer
    def _rotation(self, event: Event) -> None:
        kinds = getattr(event.module, "rope_type", "default")
        arguments = event.more["arguments"]
        if isinstance(kinds, dict):
            kinds = kinds.get(arguments[0], "default") if arguments else "default"
        if kinds not in _STATIC_ROTATIONS:
            raise UnknownError(f"its rotary embedding is of type {kinds}, which changes with the length")
        rotation = find_rotation(event.module, event.inputs[0], *event.output)
        if rotation is None:
            raise UnknownError(f"{event.name}, a {type(event.module).__name__}, rotates by no frequencies that it has")
        if rotation in self.rotations:
            return
        cosine, sine = (each.expand(2, -1, -1) for each in tables_at(rotation, event.inputs[0]))
        for pairs, apart in ((False, False), (True, False), (True, True)):
            self.turns.append(Turn(len(self.rotations), pairs, cosine, sine, apart))
        self.rotations.append(rotation)

    def _embeddings(self, before: Sequence[Event], first: torch.Tensor) -> tuple[Embedding, ...]:
        tables = []
        for event in before:
            if event.kind != "embedding":
                raise UnknownError(f"{event.name}, a {type(event.module).__name__}, comes before the first layer")
            tables.append(event)
        basis = torch.stack([event.output[0].expand_as(first).flatten() for event in tables], -1).double()
        scales = torch.linalg.lstsq(basis, first.flatten()[:, None].double()).solution[:, 0]
        if float((basis @ scales - first.flatten()).norm() / first.norm()) > 1e-5:
            raise UnknownError("its first layer reads no sum of rows of embeddings")
        return tuple(self._embedding(event, float(scale)) for event, scale in zip(tables, scales, strict=True))

    def _embedding(self, event: Event, scale: float) -> Embedding:
        # Of a float64 the last bits are the rounding of the sums it comes from.
        scale = 1.0 if abs(scale - 1) < 1e-6 else float(torch.tensor(scale))
        if event.module is self.model.get_input_embeddings():
            return Embedding(event.name, scale)
        ids = event.inputs[0].reshape(-1, event.inputs[0].shape[-1])
        offset = int(ids[0, 0])
        if ids[0].tolist() != [offset, offset + 1, offset + 2]:
            raise UnknownError(f"{event.name} is read at other places than positions")
        return Embedding(event.name, scale, offset)

    # ---------------------------------------------------------------- one layer
    def _layer(self, events: Sequence[Event]) -> Layer:
        enter, *inner, leave = events
        build, head_norms, prefix = Builder(enter.inputs[0]), dict[str, _HeadNorm](), f"{enter.name}."
        for event in inner:
            name = event.name.removeprefix(prefix)
            if event.kind == "norm":
                self._norm(build, event, name, head_norms)
            elif event.kind == "linear":
                self._linear(build, event, name)
            elif event.kind == "attention":
                self._attention(build, event, head_norms)
            elif event.kind == "experts":
                self._mixture(build, event, name, inner)
            elif event.kind not in ("rotary", "router"):
                raise UnknownError(f"{event.name}, a {type(event.module).__name__}, is in the middle of a layer")
        left = leave.output[0]
        left = left.reshape(enter.inputs[0].shape)
        whole = build.combination(left) or self._weighed(build, left)
        if whole is None:
            raise UnknownError(f"{enter.name} leaves no sum of what it read and computed")
        build.reach(whole, enter.name)
        return Layer(enter.name, build.finish())

    def _norm(self, build: Builder, event: Event, name: str, head_norms: dict[str, _HeadNorm]) -> None:
        x, y = event.inputs[0], event.output[0]
        weights = read_norm(event.name, event.module)
        if x.dim() < 4:
            flat = x.reshape(2, TOKENS, -1)
            source = build.source(flat, event.name)
            if source is not None:
                build.add(Norm(source, Place(name), x.shape[-1], weights), y.reshape(flat.shape))
                return
        for turned in (False, True):  # [batch, heads, tokens, head_dim], or tokens before heads
            heads, given = (
                ((x, y) if not turned else (x.transpose(1, 2), y.transpose(1, 2))) if x.dim() == 4 else (x, y)
            )
            found = find_heads(heads, build.nodes()) if heads.dim() == 4 and heads.shape[2] == TOKENS else None
            if found is not None:
                head_norms[name] = _HeadNorm(weights, found.bases, found.name)
                build.rows[name] = given.transpose(1, 2).flatten(2)
                return
        raise UnknownError(f"{event.name}, a {type(event.module).__name__}, norms something that it does not know")

    def _linear(self, build: Builder, event: Event, name: str) -> None:
        x, y = (each.reshape(2, TOKENS, -1) for each in (event.inputs[0], event.output[0]))
        source = build.source(x, event.name)
        if source is None:
            found = find_activation(
                x, [(each, rows) for each, rows in build.nodes() if rows.shape[-1] % x.shape[-1] == 0]
            )
            if found is None:
                raise UnknownError(self._no_activation(event))
            build.in_place(Gate(found.gate, found.other, x.shape[-1], found.activation), found.gate.buffer)
            source = found.gate
        outputs, inputs = shape_of(event.name, event.module)
        build.add(Linear(source, Place(name), inputs, outputs, event.name, is_conv1d(event.module)), y)

    def _weighed(self, build: Builder, left: torch.Tensor) -> dict[str, float] | None:
        """The combination that `left` is once a node has been weighed by another's one number, as an expert is that all tokens share."""
        nodes = build.nodes()
        for weight, number in nodes:
            for name, rows in nodes:
                if number.shape[-1] != 1 or rows.shape != left.shape:
                    continue
                build.rows[name] = number.sigmoid() * rows
                found = build.combination(left)
                if found is not None:
                    build.in_place(Weigh(Place(weight), Place(name), left.shape[-1]))
                    return found
                build.rows[name] = rows
        return None

    def _mixture(self, build: Builder, event: Event, name: str, events: Sequence[Event]) -> None:
        x, *given = event.inputs
        router = next(
            (e for e in events if e.kind == "router" and _agree(e.output, given) and _agree(e.inputs, (x,))), None
        )
        if router is None:
            raise UnknownError(f"{event.name} is not given just what a router chose for the rows that it reads")
        source = build.source(x.reshape(2, 3, -1), event.name)
        if source is None:
            raise UnknownError(f"{event.name} reads something that it does not know")
        routing = read_router(router.name, router.module)
        layout, gate = experts_layout(event.module), gate_of(event.module)
        if layout is None or gate is None:
            raise UnknownError(f"{event.name}, a {type(event.module).__name__}, has a gate that operations do not know")
        mixture = Mixture(source, Place(name), x.shape[-1], routing, event.name, layout, gate)
        build.add(mixture, event.output[0].reshape(2, 3, -1))

    def _no_activation(self, event: Event) -> str:
        layer = event.name[: event.name.rfind(".")]
        kinds = {type(each).__name__ for each in self.model.get_submodule(layer).modules() if not list(each.children())}
        odd = ", ".join(sorted(kinds - {"Linear", "CompressedLinear", "Dropout"}))
        return f"{event.name} reads no known activation of what other layers gave" + (
            f" ({layer} has a {odd})" if odd else ""
        )

    def _attention(self, build: Builder, event: Event, head_norms: dict[str, _HeadNorm]) -> None:
        where, more = event.name, event.more
        query, key, value = event.inputs
        window = self._window(event)
        scale = more.get("scaling")
        scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
        own = float(getattr(event.module, "scaling", 1.0) or 1.0)
        found = [
            find_parts(query, build.nodes(), self.turns, tuple(dict.fromkeys((1.0, own)))),
            find_parts(key, build.nodes(), self.turns, (1.0,)),
            find_parts(value, build.nodes(), (), (1.0,)),
        ]
        for each, what in zip(found, ("queries", "keys", "values"), strict=True):
            if each is None:
                kind = type(event.module).__name__
                raise UnknownError(f"{where}, a {kind}, makes its {what} in a way that it does not know")
        (q, q_rest), (k, k_rest), (v, _) = (each for each in found if each is not None)
        turn = (q_rest or q).turn
        if turn is not (k_rest or k).turn or (q_rest is None) != (k_rest is None):
            raise UnknownError(f"{where} rotates its queries and keys in different ways")
        rotary = 0 if turn is None else turn.rotary
        if q_rest is not None and (q_rest.name, q_rest.bases) != (q.name, _shifted(q.bases, query.shape[-1] - rotary)):
            raise UnknownError(f"{where} makes its queries of two things")
        spans, norms = [], []
        for part in (q, k, v):
            norm = head_norms.pop(part.name, None)
            name, bases = part.name, part.bases
            if norm is not None:
                name, bases = norm.name, tuple(norm.bases[base // query.shape[-1]] for base in bases)
                build.rows.pop(part.name)
            spans.append(self._span(where, name, bases if part is q else distinct(bases)))
            norms.append(None if norm is None else norm.weights)
        if norms[2] is not None or (k_rest is not None and any(norms)):
            raise UnknownError(f"{where} norms its values, or parts of its keys")
        kv_heads = {len(distinct(part.bases)) for part in (k, v)}
        if len(kv_heads) != 1 or query.shape[1] % min(kv_heads):
            raise UnknownError(f"{where} has heads that do not divide among those of the cache")
        self.heads.add((query.shape[1], kv_heads.pop(), query.shape[-1], value.shape[-1]))
        rotation = Turned(
            rotary,
            0 if turn is None else turn.index,
            turn is not None and turn.pairs,
            0 if k_rest is None else query.shape[-1] - rotary,
        )
        rest = None if k_rest is None else self._span(where, k_rest.name, k_rest.bases)
        queries, target = Place("queries"), Place("attention")
        build.in_place(Heads(spans[0], spans[1], spans[2], queries, norms[0], norms[1], rotation, rest))
        given = more.get("s_aux")
        sinks = None if given is None else next((n for n, p in self.model.named_parameters() if p is given), "")
        if sinks == "":
            raise UnknownError(f"{where} has sinks that are no parameter of it")
        operation = Attend(queries, target, scale * q.factor, window, float(more.get("softcap") or 0.0), sinks)
        build.add(operation, event.output[0])

    def _span(self, where: str, name: str, bases: Sequence[int]) -> Span:
        found = as_span(name, bases)
        if found is None:
            raise UnknownError(f"{where} has its heads in an order that it does not know")
        return found

    def _window(self, event: Event) -> int:
        more, where = event.more, event.name
        for name, value in more.items():
            if isinstance(value, torch.Tensor) and name not in ("s_aux", "tensor") and "position" not in name:
                raise UnknownError(f"{where} computes attention with {name}, which it does not know")
        mask = more.get("mask")
        if isinstance(mask, Mask):
            window = mask.window(where)
        elif "causal" in more:
            tensor, wanted = more["tensor"], torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
            seen = tensor if tensor is None or tensor.dtype == torch.bool else tensor == 0
            if not more["causal"] and (seen is None or not bool((seen == wanted).all())):
                raise UnknownError(f"{where} computes attention with a mask that it does not know")
            window = 0
        else:
            raise UnknownError(f"{where} computes attention with a mask that it does not know")
        said = more.get("sliding_window")
        if said and window and said != window:
            raise UnknownError(f"{where} has a window of {said} and a mask of {window} positions")
        return window

    # ---------------------------------------------------------------- after the last layer
    def _tail(self, after: Sequence[Event], left: torch.Tensor) -> tuple[tuple[Operation, ...], int]:
        build = Builder(left)
        for event in after:
            if event.kind == "norm":
                self._norm(build, event, event.name, {})
            elif event.kind == "linear":
                self._linear(build, event, event.name)
            else:
                raise UnknownError(f"{event.name}, a {type(event.module).__name__}, comes after the last layer")
        operations, logits = list(build.finish()), self.trace.logits
        last = operations[-1] if operations else None
        if not isinstance(last, Linear) or build.rows[last.target.buffer].shape != logits.shape:
            raise UnknownError("its logits do not come from a linear layer")
        head = build.rows[last.target.buffer]
        operations[-1] = replace(last, target=Place(LOGITS))
        cap = self._cap(head, logits)
        return (*operations, *([] if cap is None else [cap])), last.outputs

    def _cap(self, head: torch.Tensor, logits: torch.Tensor) -> Cap | None:
        if torch.equal(head, logits):
            return None
        width = logits.shape[-1]
        scale = float((head * logits).sum() / head.square().sum())
        if same(head * scale, logits):
            return Cap(Place(LOGITS), width, scale)
        cap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        if cap and same(cap * torch.tanh(head / cap), logits):
            return Cap(Place(LOGITS), width, 1.0, float(cap))
        raise UnknownError("its logits are what its head gave, changed in a way that it does not know")


def _shifted(bases: Sequence[int], by: int) -> tuple[int, ...]:
    return tuple(base + by for base in bases)


def _agree(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether these are the same tensors in any order, of any shape."""
    return len(some) == len(others) and all(any(torch.equal(a.flatten(), b.flatten()) for b in others) for a in some)
