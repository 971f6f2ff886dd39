"""A Llama-like decoder, matched in a general program: what engines run that know no other, with linear layers of one input joined.

Blocks may have routed experts in the place of their MLP (Mixtral, Qwen3-MoE).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime.engines.program import expert_stacks
from runtime.engines.program import operations as typed
from runtime.engines.program.joined import Joined
from runtime.engines.program.leaves import norm_parameters
from runtime.engines.program.operations import (
    STREAM,
    Attend,
    Gate,
    Heads,
    Linear,
    Mixture,
    Norm,
    NormWeights,
    Place,
    Routing,
)
from runtime.engines.program.read import read
from runtime.engines.program.tables import rotation_tables

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Rotation = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class FeedForward:
    """The MLP of a layer: `down(silu(gate(x)) * up(x))`."""

    gate_up: Joined
    down: nn.Module


@dataclass(frozen=True)
class RoutedExperts:
    """A mixture of such MLPs: the weighted sum of what the chosen ones give.

    Attributes:
        router: weight `[experts, hidden]` of the logits that `routing` chooses by: "softmax" or "chosen", and nothing else.
        module: holds the experts, in one or one by one.
        stacks: its weights, where they were joined.
    """

    router: torch.Tensor
    routing: Routing
    module: nn.Module
    stacks: expert_stacks.Stacks | None


@dataclass(frozen=True)
class Block:
    """One layer. `norms`: weights of the norms of query and key heads, where the family has them. `window`: 0 for all positions."""

    qkv: Joined
    output: nn.Module
    mlp: FeedForward | RoutedExperts
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None
    window: int


@dataclass(frozen=True)
class Program:
    """A Llama-like decoder: the modules and weights of its operations in their order, and its sizes.

    Attributes:
        rotation: for a number of positions, cosines and sines float32 `[positions, rotary / 2]`.
        scale: of the attention scores.
        vocabulary: width of the logits.
        dtype: of the norms, in which the modules compute.
    """

    embedding: nn.Module
    blocks: list[Block]
    final_norm: torch.Tensor
    head: nn.Module
    rotation: Rotation
    eps: float
    scale: float
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    dtype: torch.dtype

    @property
    def mixtures(self) -> list[RoutedExperts]:
        """Those of its blocks."""
        return [block.mlp for block in self.blocks if isinstance(block.mlp, RoutedExperts)]


def read_program(model: PreTrainedModel, fuse: bool = False, mixtures: bool = True) -> Program | str:
    """What fused engines run of a model, or the reason why they do not know it.

    Args:
        model: of transformers, its weights in place.
        fuse: join q/k/v, gate/up (see `Joined.of`) and experts (`expert_stacks`); the model's modules then share or hand over their
            weights.
        mixtures: blocks may have routed experts.
    """
    program = read(model)
    if isinstance(program, str):
        return program
    try:
        return _Match(program, model, fuse, mixtures).program()
    except typed.UnknownError as error:
        return f"{type(model).__name__} is not computed as a Llama is: {error}"


def why_not(model: PreTrainedModel, mixtures: bool = True) -> str | None:
    """The reason why this is not a decoder that the fused engines know; None when it is. `mixtures` as of `read_program`."""
    program = read_program(model, mixtures=mixtures)
    return program if isinstance(program, str) else None


def _more(rule: Routing) -> str:
    """What a router has beyond the softmax."""
    has = {
        "a sigmoid": rule.score == "sigmoid", "groups": rule.groups > 1, "a bias": rule.bias is not None,
        "a correction": rule.correction is not None,
    }  # fmt: skip
    return ", ".join(name for name, there in has.items() if there)


class _Match:
    def __init__(self, program: typed.Program, model: PreTrainedModel, fuse: bool, mixtures: bool) -> None:
        self.general, self.model, self.fuse, self.mixtures = program, model, fuse, mixtures
        self.eps: set[float] = set()
        self.scales: set[float] = set()

    def program(self) -> Program:
        """The whole; UnknownError where it is no Llama."""
        general = self.general
        norm, head = self._operations(general.tail, (Norm, Linear), "the end")
        if norm.source != typed.Place(typed.STREAM) or head.source != norm.target:
            raise typed.UnknownError("its head reads something else than the last norm of the residual stream")
        self._check_norms([norm.weights], "the end")
        weights = self.model.get_submodule(norm.weights.module)
        dtype = next(weights.parameters(), torch.empty(0, dtype=self.model.dtype)).dtype
        if dtype not in DTYPES:
            raise typed.UnknownError(f"its dtype is {dtype}")
        if len(general.rotations) != 1 or general.value_dim != general.head_dim:
            raise typed.UnknownError(
                f"it has {len(general.rotations)} rotations, or values of another width than its keys"
            )
        table = general.embeddings[0]
        if len(general.embeddings) > 1 or table.scale != 1.0:
            raise typed.UnknownError("its embeddings are scaled, or added up")
        final = self._vector(norm.weights, dtype)
        layers = [self._layer(layer, dtype) for layer in general.layers]  # all are known before modules are joined
        blocks = [self._block(operations, dtype) for operations in layers]
        if len(self.eps) != 1 or len(self.scales) != 1:
            raise typed.UnknownError("its layers have different scales of attention, or different epsilons")

        def rotation(positions: int) -> tuple[torch.Tensor, torch.Tensor]:
            cosine, sine = rotation_tables(general, positions, self.model.device)
            return cosine, sine

        return Program(
            self.model.get_submodule(table.module), blocks, final, self.model.get_submodule(head.module), rotation, self.eps.pop(),
            self.scales.pop(), general.heads, general.kv_heads, general.head_dim, general.vocabulary, dtype,
        )  # fmt: skip

    def _operations(self, found: Sequence[Any], kinds: Sequence[type], where: str) -> list[Any]:
        if [type(each) for each in found] != list(kinds):
            words = " ".join(type(each).__name__.lower() for each in found)
            raise typed.UnknownError(f"operations of {where} are not a Llama's: {words}")
        return list(found)

    def _layer(self, layer: typed.Layer, dtype: torch.dtype) -> list[Any]:
        """Its operations, of which each has been looked at."""
        mixture = type(layer.operations[-1]) is Mixture
        if mixture and not self.mixtures:
            raise typed.UnknownError(f"{layer.name} has routed experts")
        mlp = (Mixture,) if mixture else (Linear, Linear, Gate, Linear)
        kinds = (Norm, Linear, Linear, Linear, Heads, Attend, Linear, Norm, *mlp)
        found = self._operations(layer.operations, kinds, layer.name)
        norm, q, k, v, heads, attend, output, mlp_norm, *rest = found
        stream = Place(STREAM)
        sources = [
            (norm, stream),
            *((each, norm.target) for each in (q, k, v)),
            (attend, heads.target),
            (output, attend.target),
            (mlp_norm, stream),
        ]
        if mixture:
            sources.append((rest[0], mlp_norm.target))
            self._check_experts(rest[0], dtype)
        else:
            gate, up, act, down = rest
            sources += [*((each, mlp_norm.target) for each in (gate, up)), (act, gate.target), (down, act.source)]
            if act.activation != "silu":
                raise typed.UnknownError(f"its activation is {act.activation}, not silu")
        targets = [output.target, rest[-1].target]
        if (
            any(each.source != place for each, place in sources)
            or targets != [stream, stream]
            or not (mixture or act.other == up.target)
        ):
            raise typed.UnknownError(f"operations of {layer.name} are joined in another way than a Llama's")
        general = self.general
        wanted = [typed.Span(each.target.buffer, 0, general.head_dim, count) for each, count in zip(
            (q, k, v), (general.heads, general.kv_heads, general.kv_heads), strict=True)]  # fmt: skip
        found_spans = [
            typed.Span(each.buffer, each.at, general.head_dim, count) if count == 1 else each
            for each, count in zip(
                (heads.query, heads.key, heads.value), (general.heads, general.kv_heads, general.kv_heads), strict=True
            )
        ]
        turned = heads.turned
        odd = turned.pairs or not turned.rotary or turned.at or attend.softcap or attend.sinks is not None
        if found_spans != wanted or odd or heads.key_rest is not None:
            raise typed.UnknownError(f"heads of {layer.name} are laid out or rotated in another way than a Llama's")
        inner = [each for each in (heads.query_norm, heads.key_norm) if each is not None]
        if len(inner) == 1:
            raise typed.UnknownError(f"only one of queries and keys of {layer.name} is normed")
        self._check_norms([norm.weights, mlp_norm.weights, *inner], layer.name)
        self.scales.add(attend.scale)
        return found

    def _check_experts(self, mixture: Mixture, dtype: torch.dtype) -> None:
        rule, layout, name = mixture.routing, mixture.layout, mixture.experts
        if _more(rule):
            raise typed.UnknownError(
                f"{rule.module} chooses experts by more than a softmax of its logits: {_more(rule)}"
            )
        if mixture.gate.kind != "silu" or layout.bias or layout.transposed or layout.interleaved:
            raise typed.UnknownError(f"experts of {name} have biases, another gate, or another layout than Mixtral's")
        reason = expert_stacks.why_not(self.model.get_submodule(name), dtype) if self.fuse else None
        if reason is not None:
            raise typed.UnknownError(f"{name}: {reason}")

    def _check_norms(self, norms: Sequence[NormWeights], where: str) -> None:
        if any(each.layer or each.shift for each in norms):
            raise typed.UnknownError(f"norms of {where} are not a Llama's")
        self.eps |= {each.eps for each in norms}

    def _block(self, found: list[Any], dtype: torch.dtype) -> Block:
        norm, q, k, v, heads, attend, output, mlp_norm, *mlp = found

        def join(name: str, *operations: Linear) -> Joined:
            parents, names = zip(*(each.module.rsplit(".", 1) for each in operations), strict=True)
            parent = self.model.get_submodule(parents[0])
            if self.fuse and len(set(parents)) == 1:
                return Joined.of(parent, names, name)
            return Joined([self.model.get_submodule(each.module) for each in operations])

        has_norms = heads.query_norm is not None
        return Block(
            join("qkv_proj", q, k, v),
            self.model.get_submodule(output.module),
            self._experts(mlp[0])
            if len(mlp) == 1
            else FeedForward(join("gate_up_proj", mlp[0], mlp[1]), self.model.get_submodule(mlp[-1].module)),
            self._vector(norm.weights, dtype),
            self._vector(mlp_norm.weights, dtype),
            (self._vector(heads.query_norm, dtype), self._vector(heads.key_norm, dtype)) if has_norms else None,
            attend.window,
        )

    def _experts(self, mixture: Mixture) -> RoutedExperts:
        module, router = self.model.get_submodule(mixture.experts), self.model.get_submodule(mixture.routing.module)
        stacks = expert_stacks.stack_experts(module) if self.fuse else None
        return RoutedExperts(router.get_parameter("weight").detach(), mixture.routing, module, stacks)

    def _vector(self, norm: NormWeights, dtype: torch.dtype) -> torch.Tensor:
        weight, bias = norm_parameters(self.model.get_submodule(norm.module))
        if weight is None or weight.dim() != 1 or bias is not None or norm.layer:
            raise typed.UnknownError(f"{norm.module} is not a Llama's norm")
        return weight.to(dtype).contiguous()
