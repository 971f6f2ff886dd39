"""Make a prepared file: block after block is read from the artifact, laid out for its kernels, written and forgotten."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runtime.linear import Chosen
from runtime.memory import return_memory
from runtime.module import CompressedModule
from runtime.streaming.file import Writer, room_for
from runtime.streaming.groups import OUTSIDE, Groups, empty, groups_of, places
from runtime.weights import Filling


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
