"""Prepared weights of a model: which tensors its file must hold, the file made where there is none, the skeleton filled from it."""

from __future__ import annotations

import functools
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime import kernels as kernel_table
from runtime.engines.streaming import cache
from runtime.engines.streaming.cache import NoCacheError
from runtime.engines.streaming.plan import plan, reserve_for
from runtime.engines.streaming.prepared_file import (
    OUTSIDE,
    Groups,
    PreparedFile,
    UnusableFileError,
    Writer,
    groups_of,
    places,
    put,
    room_for,
    share,
    values,
)
from runtime.formats.grid import GridScheme
from runtime.kernels import Kernel, Layer
from runtime.kernels.cpu import library
from runtime.kernels.cpu.codebooks import CODEBOOKS
from runtime.kernels.cpu.integer import PanelKernel
from runtime.kernels.cpu.panels import K_QUANTS, PANEL, Panels
from runtime.kernels.cpu.sparse24 import S24
from runtime.layers.compressed_linear import Chosen, choose
from runtime.layers.compressed_module import PREPARED, CompressedModule
from runtime.modeling.skeleton import tied_names
from runtime.modeling.weights import FLOATS, Filling, to_device
from runtime.system import directories
from runtime.system.memory import return_memory

if TYPE_CHECKING:
    from runtime.engines.blueprint import Blueprint
    from runtime.engines.torch.engine import TorchEngine


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
        value = place.value
        if place.name.rpartition(".")[0] not in chosen:
            dtypes: tuple[torch.dtype, ...] = (dtype, torch.float32) if value.dtype in FLOATS else (value.dtype,)
        elif isinstance(value, nn.Parameter):  # a bias stays as it is stored
            dtypes = (dtype, *FLOATS)
        else:
            continue
        found[place.name] = Expected(tuple(value.shape), dtypes)
    for name, module in _compressed(model, chosen):
        layer = Layer(module.entry, module.shape, dtype, device)
        found |= {f"{name}.{leaf}": value for leaf, value in _of(module, chosen[name].choice.decode, layer).items()}
    return found


def _compressed(model: nn.Module, chosen: Mapping[str, Chosen]) -> Iterator[tuple[str, CompressedModule]]:
    for name in chosen:
        module = model.get_submodule(name)
        assert isinstance(module, CompressedModule)
        yield name, module


def group_bytes(model: Any, tensors: Mapping[str, Expected]) -> dict[str, int]:
    """About how large each group of the file is; a little less, since alignment is left out."""
    tied, groups = tied_names(model), groups_of(model)
    sizes = dict.fromkeys(groups.all(), 0)
    for name, tensor in tensors.items():
        if name not in tied:
            sizes[groups.of(name)] += math.prod(tensor.shape) * tensor.dtypes[0].itemsize
    return sizes


def check(file: PreparedFile, model: nn.Module, tensors: Mapping[str, Expected]) -> None:
    """Compare a file with what is expected of it.

    Raises:
        UnusableFileError: a tensor or group is missing, superfluous or something else.
    """
    problem = next(_problems(file, model, tensors), None)
    if problem is not None:
        raise UnusableFileError(f"{file.path} {problem}")


def _problems(file: PreparedFile, model: nn.Module, tensors: Mapping[str, Expected]) -> Iterator[str]:
    groups, found, aliases = groups_of(model), file.specs(), file.contents.aliases
    modules = dict(model.named_modules())
    if [group.name for group in file.groups] != groups.all():
        yield "has other blocks than the model"
    for group in file.groups:
        for name in file.names(group):
            if groups.of(name) != group.name:
                yield f"has {name} among the tensors of {group.name or 'no block'}"
    for name in (found.keys() | aliases.keys()) - tensors.keys():  # a kernel may have more than is known here
        if name in aliases or not isinstance(modules.get(name.rpartition(".")[0]), CompressedModule):
            yield f"has {name}, which the model does not"
    for name, wanted in tensors.items():
        if not wanted.sure:
            continue
        spec = found.get(aliases.get(name, name))
        if spec is None:
            yield f"lacks {name}"
        elif spec.shape != wanted.shape or spec.dtype not in wanted.dtypes:
            yield f"has {name} as {spec.dtype} {list(spec.shape)}, not {wanted.dtypes[0]} {list(wanted.shape)}"


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
    high, groups = -(-rows // PANEL), -(-columns // group)
    grid = (high, -(-groups // panels.share(layer)), PANEL)
    scale = torch.float16 if panels is K_QUANTS else stored["weight_scale"].dtypes[0]
    floats = (scale if scale in library.SCALES else torch.float32, *library.TYPES)
    found = {
        # Of a sparse layer some groups may be left out.
        "weight": Expected(
            (high, groups, panels.group_bytes(layer)),
            (torch.uint8,),
            sure=panels is S24 or layer.entry.scheme.sparsity is None,
        ),
        "scale": Expected(grid, floats),
    }
    if isinstance(weights, GridScheme) and not weights.symmetric:
        found |= {"least": found["scale"]} if panels is K_QUANTS else {"zero_point": Expected(grid, (torch.int8,))}
    if panels is CODEBOOKS:
        dtypes = {"table": (torch.uint8,), "single_columns": (torch.int32,), "single_values": floats}
        found |= {name: Expected(own, dtypes[name]) for name, own in CODEBOOKS.shapes(layer).items()}
    if "weight_global_scale" in stored:
        found["global_scale"] = stored["weight_global_scale"]
    if panels is S24:
        found["sums"] = Expected((high, groups, PANEL), (torch.int16,))
    mask = {"bitmap": "weight_bitmap", "sparse24": "weight_metadata"}.get(layer.entry.format)
    also = {mask: stored[mask]} if mask is not None and panels is not S24 else {}
    return {PREPARED + leaf: value for leaf, value in found.items()} | also


# Preparation of a file: block after block is read from the artifact, laid out for its kernels, written and forgotten.


def build(
    path: Path,
    key: str,
    blueprint: Blueprint,
    filling: Filling,
    chosen: dict[str, Chosen],
    admit: Callable[[int], None],
    behind: bool = False,
) -> None:
    """Write the prepared file of a skeleton (empty again afterwards but with its kernels chosen) to `path`.

    The file is there whole or not at all, whoever else writes it at the same time. Before it is, `admit` is called with its size,
    and may raise. `behind` as of `Writer`; then a group is also read while the one before it is prepared, which holds three in memory.

    Raises:
        OSError: it cannot be written. ArtifactError: the artifact cannot be read or is inconsistent.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.parent / f"{secrets.token_hex(8)}.tmp"
    note = name.with_suffix(".txt.tmp")
    try:
        with name.open("xb") as stream:  # not `mkstemp`, whose files nobody else may read
            room = room_for(place.name for place in places(blueprint.module))
            with Writer(stream, key, room, behind) as writer:
                _write(writer, blueprint, filling, chosen, behind)
        admit(name.stat().st_size)
        note.write_text(f"{blueprint.artifact.path}\n", encoding="utf-8")
        os.replace(note, path.parent / "source.txt")
        os.replace(name, path)
    finally:
        for leftover in (name, note):
            leftover.unlink(missing_ok=True)


def _read(filling: Filling, groups: Groups, ahead: bool) -> Iterator[str]:
    """Names of groups, each when its tensors are in the model; `ahead`: the next one's are then being read."""
    with ThreadPoolExecutor(1) as thread:

        def begin(group: str) -> Future[None]:
            return thread.submit(filling.place, lambda name: groups.of(name) == group)

        reading: Future[None] | None = None
        names = groups.all()
        for group, following in zip(names, [*names[1:], None], strict=True):
            (reading or begin(group)).result()
            if group == OUTSIDE:  # blocks are not tied to anything, see `groups_of`
                filling.tie()
            reading = begin(following) if ahead and following is not None else None
            yield group


def _write(writer: Writer, blueprint: Blueprint, filling: Filling, chosen: dict[str, Chosen], ahead: bool) -> None:
    model = blueprint.module
    groups = groups_of(model)
    for group in _read(filling, groups, ahead):
        for name, module in _compressed(model, chosen):
            if groups.of(name) == group:
                if module.dtype != blueprint.dtype:
                    module.to(blueprint.dtype)
                module.check(name)
                module.prepare(chosen[name].wanted, chosen[name].choice)
        mine = [place for place in places(model) if groups.of(place.name) == group]
        tensors: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        first: dict[int, str] = {}  # tied parameters are one object, and are written once
        for place in mine:
            source = first.setdefault(id(place.value), place.name)
            if source == place.name:
                tensors[source] = place.value
            else:
                aliases[place.name] = source
        writer.add(group, tensors, aliases)
        tensors.clear()
        for place in mine:
            meta = torch.empty_like(place.value, device="meta")
            is_parameter = isinstance(place.value, nn.Parameter)
            place.store[place.leaf] = nn.Parameter(meta, requires_grad=False) if is_parameter else meta
        return_memory()
    writer.finish()


def prepared_file(blueprint: Blueprint, verify: bool, max_memory: int | None = None) -> PreparedFile:
    """The file, checked (with `verify`: the content of its tensors too), made or made again where needed. The model stays empty.

    With a bound in bytes the model cannot run without it: then it may be larger than the cache, and where there is no home it lasts as
    long as this process.

    Raises:
        NoCacheError: there is nowhere to store it. RequestError: the bound is too little. ArtifactError, RequestError: as loading without
            a cache.
    """
    model = blueprint.module
    # Names, shapes and dtypes are checked also where nothing will be read: a wrong artifact stays wrong.
    filling = Filling(model, blueprint.artifact.checkpoint, blueprint.dtype, blueprint.device, blueprint.compressed)
    if filling.foreign:
        raise NoCacheError("its tensors have other names than those of the model")
    chosen = choose(model, blueprint.kernels, blueprint.dtype, blueprint.device)
    if directories.lasting() is None and max_memory is None:
        raise NoCacheError("there is no home directory, and COMPRESS_CACHE is not set")
    parts: dict[str, object] = {
        "class": type(model).__name__,
        "dtype": str(blueprint.dtype),
        "device": blueprint.device.type,
        "layouts": {name: each.choice.decode.layout for name, each in chosen.items()},
    }
    key = cache.key(blueprint.artifact, parts)
    path = cache.path_of(key)
    tensors = expected(model, chosen, blueprint.dtype, blueprint.device)
    outside, *blocks = sizes = list(group_bytes(model, tensors).values())
    if max_memory is not None:  # what is too little is refused before a large file is made
        plan(max_memory, outside, blocks, reserve_for(model.config, blueprint.dtype))

    def opened() -> PreparedFile:
        file = PreparedFile(path, key)
        check(file, model, tensors)
        return file

    found = None
    if path.exists():
        try:
            found = opened()
            if verify:
                found.verify()
        except (UnusableFileError, OSError) as problem:
            found = None
            cache.log.warning("prepared weights are made again: %s", problem)
    if found is None:
        admit = functools.partial(cache.make_room, path, beyond=max_memory is not None)
        try:
            admit(sum(sizes))  # what is too large is not even begun
            cache.log.info("preparing the weights of %s for this machine, once", blueprint.artifact.path)
            build(path, key, blueprint, filling, chosen, admit, behind=max_memory is None)
            found = opened()
        except OSError as error:
            raise NoCacheError(f"{path.parent} cannot be written: {error.strerror or error}") from error
        except UnusableFileError as error:  # somebody changes the directory meanwhile
            raise NoCacheError(str(error)) from error
    cache.touch(path)
    make_empty(model, chosen, blueprint.dtype)
    return found


def make_empty(model: nn.Module, chosen: Mapping[str, Chosen], dtype: torch.dtype) -> None:
    """Compressed modules as `prepare` leaves them, but without a tensor."""
    for name, module in _compressed(model, chosen):
        if module.dtype != dtype:
            module.to(dtype)
        module._buffers.clear()
        module._non_persistent_buffers_set.clear()
        module.choice, module._wanted = chosen[name].choice, chosen[name].wanted


def give_all(blueprint: Blueprint, file: PreparedFile) -> TorchEngine:
    """An engine on the model with every tensor a view of the mapped file."""
    from runtime.engines.torch.engine import TorchEngine

    model = blueprint.module
    for group in file.groups:
        put(values(model, file.tensors(group)))
    share(model, file.contents.aliases)
    for place in places(model):
        if place.value.device.type == "meta":
            raise NoCacheError(f"{file.path} lacks {place.name}")
    to_device(model, blueprint.device)
    return TorchEngine(blueprint.complete(model), blueprint.device)


@functools.cache
def say_once(message: str) -> None:
    """A warning that is not repeated for every model that is loaded."""
    cache.log.warning("%s", message)
