"""Which tensors a model's prepared file holds: their shapes and dtypes, known before any weight is read.

C is given the addresses of tensors and takes their sizes from the layer, so what a file says is compared with this before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from runtime import kernels as kernel_table
from runtime.engines.streaming.prepared_file import PreparedFile, UnusableFileError, groups_of, places
from runtime.formats.checks import grid_shape
from runtime.kernels import Kernel, Layer
from runtime.kernels.cpu import library
from runtime.kernels.cpu.integer import PanelKernel
from runtime.kernels.cpu.panels import PANEL, Panels
from runtime.layers.compressed_linear import Chosen
from runtime.layers.compressed_module import PREPARED, CompressedModule
from runtime.modeling.skeleton import tied_names
from runtime.modeling.weights import FLOATS


@dataclass(frozen=True)
class Expected:
    """One tensor: its shape, and the dtypes it may have (the likeliest first).

    `sure` is False for a layout that only its kernel knows: these are the stored tensors, which say about how large it is.
    """

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    sure: bool = True


def expected(
    model: nn.Module, chosen: Mapping[str, Chosen], dtype: torch.dtype, device: torch.device
) -> dict[str, Expected]:
    """{name in the file: tensor} of a skeleton and the kernels of its compressed modules; tied parameters under all their names."""
    found = {}
    for place in places(model):
        shape, own = tuple(place.value.shape), place.value.dtype
        if place.name.rpartition(".")[0] not in chosen:
            found[place.name] = Expected(shape, (dtype, torch.float32) if own in FLOATS else (own,))
        elif place.leaf in place.owner._parameters:  # a bias stays as it is stored
            found[place.name] = Expected(shape, (dtype, *FLOATS))
    for name, kernels in chosen.items():
        module = model.get_submodule(name)
        assert isinstance(module, CompressedModule)
        layer = Layer(module.entry, module.shape, dtype, device)
        found |= {f"{name}.{leaf}": value for leaf, value in _of(module, kernels.choice.decode, layer).items()}
    return found


def total_bytes(model: Any, tensors: Mapping[str, Expected]) -> int:
    """About how large the file is."""
    tied = tied_names(model)
    return sum(math.prod(t.shape) * t.dtypes[0].itemsize for name, t in tensors.items() if name not in tied)


def check(file: PreparedFile, model: nn.Module, tensors: Mapping[str, Expected]) -> None:
    """Compare a file with what is expected of it.

    Raises:
        UnusableFileError: a tensor or group is missing, superfluous or something else.
    """
    groups, found, aliases = groups_of(model), file.specs(), file.contents.aliases
    if [group.name for group in file.groups] != groups.all():
        raise UnusableFileError(f"{file.path} has other blocks than the model")
    for group in file.groups:
        for name in file.names(group):
            if groups.of(name) != group.name:
                raise UnusableFileError(f"{file.path} has {name} among the tensors of {group.name or 'no block'}")
    unknown = (found.keys() | aliases.keys()) - tensors.keys()
    for name in unknown:  # a kernel may keep more than is known here
        if name in aliases or not isinstance(_module(model, name.rpartition(".")[0]), CompressedModule):
            raise UnusableFileError(f"{file.path} has {name}, which the model does not")
    for name, wanted in tensors.items():
        if not wanted.sure:
            continue
        spec = found.get(aliases.get(name, name))
        if spec is None:
            raise UnusableFileError(f"{file.path} lacks {name}")
        if spec.shape != wanted.shape or spec.dtype not in wanted.dtypes:
            raise UnusableFileError(
                f"{file.path} has {name} as {spec.dtype} {list(spec.shape)}, not {wanted.dtypes[0]} {list(wanted.shape)}"
            )
        if name in file.contents.orders and name.rpartition(".")[2].startswith(PREPARED):
            raise UnusableFileError(f"{file.path} has {name} transposed")


def _of(module: CompressedModule, kernel: Kernel, layer: Layer) -> dict[str, Expected]:
    stored = {
        leaf: Expected(spec.shape, (spec.dtype, *FLOATS) if spec.dtype in FLOATS else (spec.dtype,))
        for leaf, spec in module._specs.items()
    }
    if kernel is kernel_table.REFERENCE:
        return stored
    if not isinstance(kernel, PanelKernel):
        return {leaf: replace(value, sure=False) for leaf, value in stored.items()}
    return _panels(kernel.panels, layer, stored)


def _panels(panels: Panels, layer: Layer, stored: Mapping[str, Expected]) -> dict[str, Expected]:
    """What `runtime.kernels.cpu.panels` describes."""
    weights, (rows, columns), group = layer.entry.scheme.weights, layer.shape, panels.group(layer)
    assert weights is not None
    high, groups = -(-rows // PANEL), -(-columns // group)
    grid = (high, grid_shape(weights, layer.shape)[-1], PANEL)
    scale = stored["weight_scale"].dtypes[0]
    floats = (scale if scale in library.TYPES else torch.float32, *library.TYPES)
    found = {
        "weight": Expected((high, groups, group * panels.column_bytes), (torch.uint8,)),
        "scale": Expected(grid, floats),
    }
    if not weights.symmetric:
        found["zero_point"] = Expected(grid, (torch.int8,))
    if panels.kind == "s24":
        found["sums"] = Expected((high, groups, PANEL), (torch.int16,))
    kept = {"bitmap": "weight_bitmap", "sparse24": "weight_metadata"}.get(layer.entry.format)
    also = {kept: stored[kept]} if kept is not None and panels.kind != "s24" else {}
    return {PREPARED + leaf: value for leaf, value in found.items()} | also


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
