"""Give a skeleton its weights from a prepared file, which is made first where there is none."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime.engines.streaming import cache
from runtime.engines.streaming.cache import NoCacheError
from runtime.engines.streaming.expected import Expected, check, expected, total_bytes
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
from runtime.layers.compressed_linear import Chosen, choose
from runtime.layers.compressed_module import CompressedModule
from runtime.modeling.weights import Filling, to_device
from runtime.system import directories
from runtime.system.memory import return_memory

if TYPE_CHECKING:
    from runtime.engines.torch.engine import Blueprint, TorchEngine


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
