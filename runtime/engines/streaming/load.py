"""Prepared weights of a model: which tensors its file must hold, the file made where there is none, the skeleton filled from it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime import kernels as kernel_table
from runtime.engines.streaming import cache
from runtime.engines.streaming.cache import NoCacheError
from runtime.engines.streaming.prepared_file import (
    OUTSIDE,
    Groups,
    PreparedFile,
    UnusableFileError,
    Writer,
    empty,
    groups_of,
    missing,
    places,
    put,
    room_for,
    share,
)
from runtime.kernels import Kernel, Layer
from runtime.kernels.cpu import library
from runtime.kernels.cpu.integer import PanelKernel
from runtime.kernels.cpu.panels import PANEL, Panels
from runtime.layers.compressed_linear import Chosen, choose
from runtime.layers.compressed_module import PREPARED, CompressedModule
from runtime.modeling.skeleton import tied_names
from runtime.modeling.weights import FLOATS, Filling, to_device
from runtime.system import directories
from runtime.system.memory import return_memory

if TYPE_CHECKING:
    from runtime.engines.torch.engine import Blueprint, TorchEngine


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
    weights, (rows, columns), group = layer.entry.scheme.grid, layer.shape, panels.group(layer)
    assert weights is not None
    high, groups = -(-rows // PANEL), -(-columns // group)
    grid = (high, weights.parameter_shape(layer.shape)[-1], PANEL)
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


# Make a prepared file: block after block is read from the artifact, laid out for its kernels, written and forgotten.


def build(
    path: Path,
    key: str,
    model: Any,
    filling: Filling,
    chosen: dict[str, Chosen],
    dtype: torch.dtype,
    source: str,
    admit: Callable[[int], None],
) -> None:
    """Write the prepared file of `model` (a skeleton, empty again afterwards but with its kernels chosen) to `path`.

    The file is there whole or not at all, whoever else writes it at the same time. Before it is, `admit` is called with its size,
    and may raise.

    Raises:
        OSError: it cannot be written. ArtifactError: the artifact cannot be read or is inconsistent.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.parent / f"{secrets.token_hex(8)}.tmp"
    try:
        with name.open("xb", buffering=0) as stream:  # not `mkstemp`, whose files nobody else may read
            _write(Writer(stream, key, room_for(place.name for place in places(model))), model, filling, chosen, dtype)
        admit(name.stat().st_size)
        note = name.with_suffix(".txt.tmp")
        note.write_text(source + "\n", encoding="utf-8")
        os.replace(note, path.parent / "source.txt")
        os.replace(name, path)
    except BaseException:
        for leftover in (name, name.with_suffix(".txt.tmp")):
            with contextlib.suppress(OSError):
                os.unlink(leftover)
        raise


def _write(writer: Writer, model: Any, filling: Filling, chosen: dict[str, Chosen], dtype: torch.dtype) -> None:
    groups: Groups = groups_of(model)
    for group in groups.all():
        filling.place(lambda name, group=group: groups.of(name) == group)  # type: ignore[misc]
        if group == OUTSIDE:  # blocks are not tied to anything, see `groups_of`
            filling.tie()
        for name, module in model.named_modules():
            if name in chosen and groups.of(name) == group:
                _prepare(name, module, chosen[name], dtype)
        mine = [place for place in places(model) if groups.of(place.name) == group]
        tensors: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        first: dict[int, str] = {}  # tied parameters are one object, and are written once
        for place in mine:
            value = place.value
            if id(value) in first:
                aliases[place.name] = first[id(value)]
            else:
                first[id(value)] = place.name
                tensors[place.name] = value
        writer.add(group, tensors, aliases)
        tensors.clear()
        empty(mine)
        return_memory()
    writer.finish()


def _prepare(name: str, module: nn.Module, chosen: Chosen, dtype: torch.dtype) -> None:
    assert isinstance(module, CompressedModule)
    if module.dtype != dtype:
        module.to(dtype)
    module.check(name)
    module.prepare(chosen.wanted, chosen.choice)


_said: set[str] = set()


def prepared_file(blueprint: Blueprint, verify: bool, streams: bool = False) -> PreparedFile:
    """The file, checked (with `verify`: what its tensors hold too), made or made again where needed. The model stays empty.

    With `streams` the model cannot run without it: then it may be larger than the cache, and where there is no home it lasts as long
    as this process.

    Raises:
        NoCacheError: there is nowhere to keep it. ArtifactError, RequestError: as loading without a cache.
    """
    # Names, shapes and dtypes are checked also where nothing will be read: a wrong artifact stays wrong.
    filling = Filling(
        blueprint.module, blueprint.artifact.checkpoint, blueprint.dtype, blueprint.device, blueprint.compressed
    )
    if filling.foreign:
        raise NoCacheError("its tensors have other names than those of the model")
    chosen = choose(blueprint.module, blueprint.kernels, blueprint.dtype, blueprint.device)
    if directories.lasting() is None and not streams:
        raise NoCacheError("there is no home directory, and COMPRESS_CACHE is not set")
    key = cache.key(blueprint.artifact, _parts(blueprint, chosen))
    path = cache.path_of(key)
    tensors = expected(blueprint.module, chosen, blueprint.dtype, blueprint.device)
    found = _open(path, key, verify, blueprint, tensors)
    if found is None:
        found = _make(path, key, blueprint, filling, chosen, tensors, streams)
    cache.touch(path)
    _adopt(blueprint, chosen)
    return found


def give_all(blueprint: Blueprint, file: PreparedFile) -> TorchEngine:
    """An engine on the model with every tensor a view of the mapped file."""
    from runtime.engines.torch.engine import TorchEngine

    for group in file.groups:
        put(blueprint.module, file.tensors(group))
    share(blueprint.module, file.contents.aliases)
    name = missing(blueprint.module)
    if name is not None:
        raise NoCacheError(f"{file.path} lacks {name}")
    to_device(blueprint.module, blueprint.device)
    return TorchEngine(blueprint.module, blueprint.device)


def say_once(message: str, *details: object) -> None:
    """A warning that is not repeated for every model that is loaded."""
    text = message % details
    if text not in _said:
        _said.add(text)
        cache.log.warning("%s", text)


def _open(
    path: Path, key: str, verify: bool, blueprint: Blueprint, tensors: Mapping[str, Expected]
) -> PreparedFile | None:
    if not path.exists():
        return None
    try:
        file = PreparedFile(path, key)
        check(file, blueprint.module, tensors)
        if verify:
            file.verify()
        return file
    except (UnusableFileError, OSError) as problem:
        cache.log.warning("prepared weights are made again: %s", problem)
        return None


def _make(
    path: Path,
    key: str,
    blueprint: Blueprint,
    filling: Filling,
    chosen: dict[str, Chosen],
    tensors: Mapping[str, Expected],
    streams: bool,
) -> PreparedFile:
    admit = partial(cache.make_room, path, beyond=streams)
    try:
        admit(total_bytes(blueprint.module, tensors))  # what is too large is not even begun
        cache.log.log(logging.INFO, "preparing the weights of %s for this machine, once", blueprint.artifact.path)
        build(path, key, blueprint.module, filling, chosen, blueprint.dtype, str(blueprint.artifact.path), admit)
        made = PreparedFile(path, key)
        check(made, blueprint.module, tensors)
        return made
    except OSError as error:
        raise NoCacheError(f"{path.parent} cannot be written: {error.strerror or error}") from error
    except UnusableFileError as error:  # somebody changes the directory meanwhile
        raise NoCacheError(str(error)) from error


def _parts(blueprint: Blueprint, chosen: dict[str, Chosen]) -> dict[str, object]:
    return {
        "class": type(blueprint.module).__name__,
        "dtype": str(blueprint.dtype),
        "device": blueprint.device.type,
        "layouts": {name: choice.layout for name, choice in chosen.items()},
    }


def _adopt(blueprint: Blueprint, chosen: dict[str, Chosen]) -> None:
    """Compressed modules as `prepare` leaves them, but without a tensor."""
    for name, kernels in chosen.items():
        module = blueprint.module.get_submodule(name)
        assert isinstance(module, CompressedModule)
        if module.dtype != blueprint.dtype:
            module.to(blueprint.dtype)
        module._buffers.clear()
        module._non_persistent_buffers_set.clear()
        module.choice, module._wanted = kernels.choice, kernels.wanted
