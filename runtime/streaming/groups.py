"""A model's tensors in groups: what is outside the repeated blocks, then each block. Taken out of modules and put back by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from runtime.errors import CompressError
from runtime.module import PREPARED
from runtime.skeleton import find_blocks, tied_names

OUTSIDE = ""  # name of the group of everything that is in no block


@dataclass(frozen=True)
class Groups:
    """Names of the blocks in order (empty: the model has none), and which group a tensor or module belongs to."""

    blocks: tuple[str, ...]

    def all(self) -> list[str]:
        return [OUTSIDE, *self.blocks]

    def of(self, name: str) -> str:
        """The group of a parameter, buffer or module."""
        if not self.blocks:
            return OUTSIDE
        prefix = self.blocks[0].rpartition(".")[0] + "."
        if not name.startswith(prefix):
            return OUTSIDE
        block = prefix + name[len(prefix) :].partition(".")[0]
        return block if block in self.blocks else OUTSIDE


def groups_of(model: Any) -> Groups:
    """The groups of a transformers model; no blocks where one of their tensors is tied to another tensor."""
    try:
        name, blocks = find_blocks(model)
    except CompressError:
        return Groups(())
    groups = Groups(tuple(f"{name}.{i}" for i in range(len(blocks))))
    ties = tied_names(model)
    return Groups(()) if any(groups.of(tied) != OUTSIDE for tied in [*ties, *ties.values()]) else groups


@dataclass(frozen=True)
class Place:
    """One parameter or buffer of a module."""

    name: str
    owner: nn.Module
    leaf: str

    @property
    def value(self) -> torch.Tensor:
        value = self.owner._parameters.get(self.leaf)
        return value if value is not None else self.owner._buffers[self.leaf]  # type: ignore[return-value]


def places(model: nn.Module) -> Iterator[Place]:
    """Every parameter and buffer that a prepared file holds: all but buffers that are computed. Shared modules come once."""
    for prefix, module in model.named_modules():
        for leaf, value in [*module._parameters.items(), *module._buffers.items()]:
            computed = leaf in module._non_persistent_buffers_set and not leaf.startswith(PREPARED)
            if value is not None and not computed:
                yield Place(f"{prefix}.{leaf}" if prefix else leaf, module, leaf)


def put(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give modules their tensors; those of a kernel's own layout become buffers that `state_dict` does not list."""
    for name, value in tensors.items():
        owner_name, _, leaf = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        elif leaf in owner._buffers or not leaf.startswith(PREPARED):
            owner._buffers[leaf] = value
        else:
            owner.register_buffer(leaf, value, persistent=False)


def share(model: nn.Module, aliases: Mapping[str, str]) -> None:
    """Make each named parameter the one it is an alias of."""
    for name, source in aliases.items():
        owner_name, _, leaf = name.rpartition(".")
        from_name, _, from_leaf = source.rpartition(".")
        value = model.get_submodule(from_name)._parameters[from_leaf]
        model.get_submodule(owner_name)._parameters[leaf] = value


def empty(places_: list[Place]) -> None:
    """Let go of tensors; what is left says shape and dtype."""
    for place in places_:
        meta = torch.empty_like(place.value, device="meta")
        if place.leaf in place.owner._parameters:
            place.owner._parameters[place.leaf] = nn.Parameter(meta, requires_grad=False)
        else:
            place.owner._buffers[place.leaf] = meta


def missing(model: nn.Module) -> str | None:
    """The first parameter or buffer that has no content yet."""
    return next((place.name for place in places(model) if place.value.device.type == "meta"), None)
