"""Slices of tensors that belong to one unit: a channel of a feed-forward network, a group of heads, a dimension of the hidden state.

No architecture is named. A model is built from a config with fewer units, on meta; units have slices of the tensors whose shapes differ,
and the difference tells how many. The order of the slices of one unit is found by trial: a cut model must compute what the whole one
computes when nothing reads the unit (`compress.prune.structure.stage`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import nn

from runtime.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Slices:
    """Slices of one tensor that belong to units.

    Attributes:
        name: of the tensor.
        dim: along which a unit has slices.
        each: slices of a unit.
        parts: how they stand: those of all units for the first part, then for the next; they add up to `each`. (3,): the three of a unit
            side by side. (1, 1): a fused gate and up projection. (64, 64, 64): fused queries, keys and values.
    """

    name: str
    dim: int
    each: int
    parts: tuple[int, ...] = ()

    def index(self, units: torch.Tensor, count: int) -> torch.Tensor:
        """Places of the slices of some of `count` units, as they stand: int64 `[len(units) * each]`."""
        return torch.cat([places.reshape(-1) for places in self._places(units, count)])

    def by_unit(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[units, all numbers of a unit]`."""
        count = tensor.shape[self.dim] // self.each
        order = torch.cat(self._places(torch.arange(count), count), 1).reshape(-1).to(tensor.device)
        return tensor.movedim(self.dim, 0).reshape(tensor.shape[self.dim], -1)[order].reshape(count, -1)

    def cut(self, tensor: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
        """The tensor with the slices of these units alone."""
        return tensor.index_select(self.dim, self.index(units, tensor.shape[self.dim] // self.each).to(tensor.device))

    def _places(self, units: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Of each part int64 `[len(units), part]`."""
        places, start = [], 0
        for part in self.parts or (self.each,):
            places.append(start + units[:, None] * part + torch.arange(part)[None, :])
            start += part * count
        return places


@dataclass(frozen=True)
class Channels:
    """Units that are ranked and removed together: those that one layer reads.

    Attributes:
        consumer: name of the layer whose inputs they are.
        slices: all that belongs to them.
        count: units there are.
    """

    consumer: str
    slices: tuple[Slices, ...]
    count: int

    @property
    def columns(self) -> Slices:
        """The slices of the consumer's weight."""
        return next(s for s in self.slices if s.name == f"{self.consumer}.weight")


def changed(whole: PreTrainedModel, smaller: PreTrainedModel, before: int, after: int) -> list[Slices]:
    """The tensors whose shapes differ between a model of `before` units and one of `after`.

    Raises:
        RequestError: a tensor changed in another way than by whole slices, or is only in one of them.
    """
    old, new, found = shapes(whole), shapes(smaller), list[Slices]()
    for name in old | new:
        if name not in old or name not in new or len(old[name]) != len(new[name]):
            raise RequestError(
                f"a {type(whole).__name__} cannot be cut so: only one of the two models has {name} as it is there"
            )
        for dim, (wide, narrow) in enumerate(zip(old[name], new[name], strict=True)):
            if wide == narrow:
                continue
            each, rest = divmod(wide, before)
            if rest or narrow != each * after:
                sizes = f"from {list(old[name])} to {list(new[name])}"
                raise RequestError(
                    f"a {type(whole).__name__} cannot be cut so: {name} goes {sizes}, which are no whole units"
                )
            found.append(Slices(name, dim, each))
    return found


def changed_shapes(one: nn.Module, other: nn.Module) -> list[str]:
    """Names of tensors that have other shapes in the other model, or are only in one of the two."""
    old, new = shapes(one), shapes(other)
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of `stored_tensors`."""
    return {name: tuple(value.shape) for name, value in stored_tensors(model).items()}


def stored_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, then all buffers that a checkpoint stores; tied ones under each of their names."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for name, value in model.named_buffers(remove_duplicate=False):
        parent, _, leaf = name.rpartition(".")
        if leaf not in model.get_submodule(parent)._non_persistent_buffers_set:
            found[name] = value
    return found


def channels_of(model: nn.Module, slices: Sequence[Slices], prefix: str, count: int) -> tuple[Channels, ...]:
    """The channels of one block: each layer that reads some, with all that makes them.

    Args:
        slices: of the whole model. prefix: of the block's tensors.

    Raises:
        RequestError: the readers of the channels cannot be determined.
    """
    own = [s for s in slices if s.name.startswith(prefix)]
    if not own:
        return ()
    consumers = [s.name.removesuffix(".weight") for s in own if is_input(model, s)]
    if not consumers:
        raise RequestError(f"{prefix.removesuffix('.')}: no linear layer reads these units, so they cannot be ranked")
    return tuple(
        Channels(consumer, tuple(s for s in own if _nearest(s.name, consumers) == consumer), count)
        for consumer in consumers
    )


def is_input(model: nn.Module, slices: Slices) -> bool:
    """Whether a tensor is a layer's weight, and the slices are of its inputs."""
    parent, _, leaf = slices.name.rpartition(".")
    return leaf == "weight" and slices.dim == input_dim(model.get_submodule(parent))


def input_dim(module: nn.Module) -> int | None:
    """Along which a linear layer's weight has its inputs; None: it is none."""
    if isinstance(module, nn.Linear):
        return 1
    return 0 if type(module).__name__ == "Conv1D" else None


def _nearest(name: str, consumers: Sequence[str]) -> str:
    """The consumer that shares the longest path with a tensor."""
    own = name.rpartition(".")[0].split(".")

    def common(consumer: str) -> int:
        pairs = zip(own, consumer.split("."), strict=False)
        return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))

    return max(consumers, key=common)


def layouts(channels: Channels, members: int) -> Iterator[Channels]:
    """Possible layouts of the slices of channels in fused tensors, likeliest first.

    Args:
        members: query heads of a unit.
    """
    plain = channels.columns.each
    fused = tuple(replace(s, parts=_fused(s.each, plain, members)) for s in channels.slices)
    if fused != channels.slices:
        yield replace(channels, slices=fused)
    yield channels


def _fused(each: int, plain: int, members: int) -> tuple[int, ...]:
    """The parts of a fused tensor whose reader has `plain` slices of a unit; (): it is not fused, or interleaved by unit."""
    if each == 2 * plain and plain == 1:  # gate and up
        return (1, 1)
    if each * members == plain * (members + 2):  # queries, keys and values; `plain` are all queries of a unit
        width = plain // members
        return (plain, width, width)
    return ()


def weights_of(channels: Channels, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Float32 `[units, numbers]` of each tensor that the units have slices of, the consumer's first."""
    ordered = sorted(channels.slices, key=lambda s: s.name != f"{channels.consumer}.weight")
    return [s.by_unit(tensors[s.name].float()) for s in ordered]
