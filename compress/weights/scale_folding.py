"""Folding of a per-channel input scale into the module that produces the input.

AWQ and SmoothQuant multiply the columns of a weight by `s` and divide its input by `s`. For that to be free, the producer of
the input must take the `1/s`. Which producers can is found by trying: a candidate is scaled by random factors, the consumers
are scaled back, and the block must still compute the same function. No architecture is named here; a gated activation passes
for `up_proj` and fails for `gate_proj` because that is what the mathematics says.

Sources: Lin et al., AWQ (arXiv 2306.00978); Xiao et al., SmoothQuant (arXiv 2211.10438).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from compress.core.tensors import relative
from compress.model.input_statistics import InputGroup
from runtime.modeling.experts import Experts, expert_of
from runtime.modeling.linear_modules import get_matrix, is_matrix, set_matrix, sides

# Relative change of the block's output (float32) under which folding counts as function-preserving.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Fold:
    """One place where a scale folds.

    Attributes:
        producer: name of the norm or linear layer in the block that takes `1/s`.
        consumers: linear layers whose columns take `s`.
        offset: 1.0 for norms that compute with `1 + weight` (Gemma), else 0.0.
        repeat, width: a value head of `width` channels feeds `repeat` consecutive query heads (grouped-query attention), so
            producer channel `h * width + j` feeds columns `(h * repeat + r) * width + j` for all `r`.
    """

    producer: str
    consumers: tuple[str, ...]
    offset: float = 0.0
    repeat: int = 1
    width: int = 1

    def shared(self, scale: torch.Tensor) -> torch.Tensor:
        """`[in]` -> `[producer channels]`: geometric mean over the columns that one producer channel feeds."""
        if self.repeat == 1:
            return scale
        return scale.view(-1, self.repeat, self.width).log().mean(dim=1).exp().reshape(-1)

    def expanded(self, scale: torch.Tensor) -> torch.Tensor:
        """`[producer channels]` -> `[in]`."""
        return scale.view(-1, 1, self.width).expand(-1, self.repeat, self.width).reshape(-1)


@torch.no_grad()
def fold(block: nn.Module, place: Fold, scale: torch.Tensor, work: dict[str, torch.Tensor]) -> torch.Tensor:
    """Divide the producer by `scale` `[producer channels]` and multiply the consumers' columns; returns the exact column scale.

    `work` holds float32 copies of the linear weights of the block, so that nothing is rounded twice; a norm's weight is stored
    in the model's dtype, so the consumers take the scale that its rounding really left.
    """
    producer = block.get_submodule(place.producer)
    weight, bias = producer._parameters["weight"], producer._parameters.get("bias")
    assert weight is not None
    if is_matrix(producer):
        work[place.producer] /= scale.unsqueeze(1)
        set_matrix(producer, work[place.producer].to(weight.dtype))
    else:
        old = weight.data.float() + place.offset
        rounded = (old / scale - place.offset).to(weight.dtype)
        new = rounded.float() + place.offset
        if bias is None:
            # With a bias both parts must shrink by the same factor, so only bias-free norms can give the rounding back.
            exact = (new != 0) & (old != 0)
            scale = torch.where(exact, old / torch.where(exact, new, torch.ones_like(new)), scale)
        weight.data = rounded
    if bias is not None:
        bias.data = (bias.data.float() / scale).to(bias.dtype)
    columns = place.expanded(scale)
    for name in place.consumers:
        work[name] *= columns
        consumer = block.get_submodule(name)
        set_matrix(consumer, work[name].to(get_matrix(consumer).dtype))
    return columns


def find_folds(
    block: nn.Module, groups: list[InputGroup], all_groups: list[InputGroup], run: Callable[[], torch.Tensor]
) -> list[Fold]:
    """The folds that leave the block's function unchanged, for the inputs of `groups`.

    A fold between the layers of one expert is tried on the expert alone: tokens of a small batch may never be sent to it, and then the
    block would change by nothing whatever is done to it.

    Args:
        groups: inputs one wants to scale. `all_groups`: every linear layer's, since a producer's scale reaches all its readers.
        run: runs the block (in float32) over a small batch and returns its output.
    """
    whole = run()
    places: list[Fold] = []
    for group in groups:
        readers = tuple(next(g.members for g in all_groups if group.members[0] in g.members))
        others, trial, reference = all_groups, run, whole
        expert = expert_of(block, group.members[0])
        if expert is not None:
            name, number = expert
            prefix = f"{name}.{number}."
            if not all(reader.startswith(prefix) for reader in readers):
                continue
            group = InputGroup(group.members, group.in_features)
            others = [InputGroup([n for n in g.members if n.startswith(prefix)], g.in_features) for g in all_groups]
            trial = _trial(block.get_submodule(name), number)
            reference = trial()
        candidates = _candidates(block, group, readers, others)
        found = next((c for c in candidates if _preserves(block, c, trial, reference)), None)
        places += [] if found is None else [found]
    return places


def _trial(experts: nn.Module, number: int) -> Callable[[], torch.Tensor]:
    """Runs one expert over random tokens."""
    assert isinstance(experts, Experts)
    rows = torch.randn(16, experts.layout.hidden, generator=torch.Generator().manual_seed(0))
    return partial(experts.run, number, rows.to(next(experts.parameters()).device))


def _candidates(
    block: nn.Module, group: InputGroup, consumers: tuple[str, ...], all_groups: list[InputGroup]
) -> list[Fold]:
    if group.source is not None:
        source = block.get_submodule(group.source)
        weight = getattr(source, "weight", None)
        if not is_matrix(source) and isinstance(weight, torch.Tensor) and tuple(weight.shape) == (group.in_features,):
            return [Fold(group.source, consumers, offset) for offset in (0.0, 1.0)]
    found = []
    for name in (name for other in all_groups for name in other.members if name not in consumers):
        shape = sides(block.get_submodule(name))
        repeat, rest = (0, 1) if shape is None else divmod(group.in_features, shape[0])
        if shape is None or rest:
            continue
        width = getattr(block.get_submodule(name.rpartition(".")[0]), "head_dim", None)
        if repeat == 1:
            found.append(Fold(name, consumers))
        elif isinstance(width, int) and shape[0] % width == 0:
            found.append(Fold(name, consumers, 0.0, repeat, width))
    return found


@torch.no_grad()
def _preserves(block: nn.Module, place: Fold, run: Callable[[], torch.Tensor], reference: torch.Tensor) -> bool:
    """Try `place` with random scales in float32 and undo it."""
    producer = block.get_submodule(place.producer)
    saved = {
        (n, k): p.data
        for n in (place.producer, *place.consumers)
        for k, p in block.get_submodule(n).named_parameters(recurse=False)
    }
    weight = producer.weight
    assert isinstance(weight, torch.Tensor)
    channels = get_matrix(producer).shape[0] if is_matrix(producer) else weight.shape[0]
    scale = torch.linspace(0.5, 2.0, channels, device=weight.device)[
        torch.randperm(channels, generator=torch.Generator().manual_seed(channels))
    ]
    try:
        for (name, key), value in saved.items():
            block.get_submodule(name)._parameters[key] = nn.Parameter(value.float(), requires_grad=False)
        work = {
            n: get_matrix(m).clone()
            for n in (place.producer, *place.consumers)
            if is_matrix(m := block.get_submodule(n))
        }
        fold(block, place, scale, work)
        return relative(run(), reference) < TOLERANCE
    finally:
        for (name, key), value in saved.items():
            block.get_submodule(name)._parameters[key] = nn.Parameter(value, requires_grad=False)
