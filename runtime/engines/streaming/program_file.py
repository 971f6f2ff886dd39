"""Programs of decoders that were read before, beside their prepared weights: such a model runs without transformers' code of it.

One file a program, `KEY.json` in the directory of the weights that it runs on. Its key is a digest of everything that decides what is
read off a model, this library and transformers included, so a program is never out of date. The proof on a probe
(`runtime.engines.native.take_over.disproof`) was done before it was stored, under the same key: later loads do not repeat it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime.engines.fused import UnbuiltEngine
from runtime.engines.native.engine import NativeEngine
from runtime.engines.native.parts import Parts
from runtime.engines.native.take_over import probe
from runtime.engines.program.operations import Linear, NormWeights, Program, UnknownError, decode, encode, parts
from runtime.engines.streaming import cache
from runtime.engines.streaming.load import give_all, make_empty
from runtime.engines.streaming.prepared_file import PreparedFile, UnusableFileError, put, share, values
from runtime.formats.quantization_config import ModuleEntry, entry_from_dict, entry_to_dict
from runtime.kernels.cpu import library
from runtime.layers.compressed_linear import CompressedEmbedding, CompressedLinear, choose
from runtime.layers.compressed_module import CompressedModule
from runtime.system import instruction_sets
from runtime.system.self_hash import json_is_whole, sealed_json

if TYPE_CHECKING:
    from runtime.engines.blueprint import Blueprint
    from runtime.engines.torch.engine import TorchEngine


def store(blueprint: Blueprint, file: PreparedFile, engine: NativeEngine) -> None:
    """Write the program of an engine that runs on all of a prepared file; where that cannot be, the log says why.

    Others may write it at the same time: it is there whole or not at all.
    """
    content = {
        "weights": file.digest,
        "program": encode(engine.parts.program),
        "packed": _packed(engine.module),
        "dtype": str(engine.parts.cache_dtype).removeprefix("torch."),
        "facts": {name: getattr(engine, name) for name in ("vocab_size", "context_length", "weight_bytes")},
    }
    path = file.path.with_name(f"{_key(blueprint)}.json")
    text = sealed_json(content)
    try:
        # A program may use what its module computes and no file has: then its numbers are others, or it cannot be bound.
        if not torch.equal(probe(_engine(json.loads(text), blueprint, file)), probe(engine)):
            raise ValueError("it computes something else on the weights of the file")
    except _ERRORS as problem:
        cache.log.info("the program of %s is read at every load: %s", blueprint.artifact.path, problem)
        return
    temporary = path.with_name(f"{secrets.token_hex(8)}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        cache.log.info("the program of %s is read at every load: %s", blueprint.artifact.path, error)
    finally:
        temporary.unlink(missing_ok=True)


def recall(blueprint: Blueprint, verify: bool) -> NativeEngine | None:
    """The engine of a program that was stored; None: there is none, or the weights that it was read with are not to be had.

    Args:
        verify: compare the weights with their checksums.
    """
    if library.load() is None:
        return None
    for path in cache.directory().glob(f"*/{_key(blueprint)}.json"):
        try:
            file = PreparedFile(path.with_name(cache.NAME), path.parent.name)
            if verify:
                file.verify()
        except (UnusableFileError, OSError):  # who makes it again says so
            continue
        try:
            raw = path.read_bytes()
            if not json_is_whole(raw):
                raise ValueError(f"{path} is damaged")
            content = json.loads(raw)
            if content["weights"] != file.digest:  # no tensors but those that its program was checked with
                continue
            engine = _engine(content, blueprint, file)
        except (OSError, *_ERRORS) as problem:
            cache.log.warning("the program of %s is read again: %s", blueprint.artifact.path, problem)
            continue
        cache.touch(file.path)
        return engine
    return None


_ERRORS = (AttributeError, KeyError, TypeError, ValueError, UnknownError)


def _key(blueprint: Blueprint) -> str:
    """Digest of all that decides which program is read off a model and on which weights it runs."""
    wanted: dict[str, object] = {
        "dtype": str(blueprint.dtype),
        "device": blueprint.device.type,
        "kernels": blueprint.kernels,
        "code": bool(blueprint.trust_remote_code),  # then the class may be the checkpoint's own
        "transformers": importlib.metadata.version("transformers"),
        "instructions": instruction_sets.chosen(),
        "program": sources(),
    }
    return cache.key(blueprint.artifact, wanted)


@functools.cache
def sources() -> str:
    """Digest of what reads programs and runs them, beyond what lays weights out (`cache.library_facts`)."""
    return cache.sources(("engines/program", "engines/native", "kernels/cpu"), ("*.py", "*.c", "*.h"))


def _engine(content: dict[str, Any], blueprint: Blueprint, file: PreparedFile) -> NativeEngine:
    """Of what `store` writes, on views of the mapped file."""
    program = decode(content["program"])
    bound = Parts(program, _modules(program, content["packed"], blueprint, file), getattr(torch, content["dtype"]))
    build = functools.partial(_build, blueprint, file)
    return NativeEngine(UnbuiltEngine(blueprint.device, **content["facts"], build=build), bound)


def _build(blueprint: Blueprint, file: PreparedFile) -> TorchEngine:
    """Transformers' modules on the same file."""
    model = blueprint.module
    make_empty(model, choose(model, blueprint.kernels, blueprint.dtype, blueprint.device), blueprint.dtype)
    return give_all(blueprint, file)


# ---------------------------------------------------------------- weights by name
def _packed(model: nn.Module) -> list[dict[str, Any]]:
    """How compressed modules are stored, and which have what shape."""
    found: dict[ModuleEntry, dict[str, list[int]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, CompressedModule):
            found.setdefault(module.entry, {})[name] = list(module.shape)
    return [{"entry": entry_to_dict(entry), "modules": modules} for entry, modules in found.items()]


class _Module(nn.Linear):
    """A module that only has the tensors it is given. It may be any: what it computes, operations say. If a linear layer, it is one."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


def _modules(program: Program, packed: list[dict[str, Any]], blueprint: Blueprint, file: PreparedFile) -> nn.Module:
    """Modules of the names that a program says, with their weights."""
    root, names = _Module(), [*file.specs(), *file.contents.aliases]
    for name, module in _compressed(program, packed, blueprint, set(names)):
        home, _, leaf = name.rpartition(".")
        _at(root, home).add_module(leaf, module)
    chosen = choose(root, blueprint.kernels, blueprint.dtype, blueprint.device)
    make_empty(root, chosen, blueprint.dtype)
    for name in names:
        home, _, leaf = name.rpartition(".")
        owner = _at(root, home)
        if isinstance(owner, _Module):
            owner.register_parameter(leaf, None)
    for group in file.groups:
        put(values(root, file.tensors(group)))
    share(root, file.contents.aliases)
    for part in parts(program):
        if isinstance(part, NormWeights):  # it may have no weights, and then no file has its name
            _at(root, part.module)
        elif isinstance(part, Linear) and part.transposed:
            layer = _at(root, part.module)
            layer._parameters["weight"] = nn.Parameter(layer.get_parameter("weight").t(), requires_grad=False)
    return root


def _compressed(
    program: Program, packed: list[dict[str, Any]], blueprint: Blueprint, names: set[str]
) -> Iterator[tuple[str, CompressedModule]]:
    tables, stored = {each.module for each in program.embeddings}, blueprint.stored_dtype
    for group in packed:
        entry, modules = entry_from_dict(group["entry"]), group["modules"]
        for name, (rows, columns) in modules.items():
            if name in tables:
                yield name, CompressedEmbedding(entry, (rows, columns), stored)
            else:
                yield name, CompressedLinear(entry, (rows, columns), f"{name}.bias" in names, stored)


def _at(root: nn.Module, name: str) -> nn.Module:
    """The module of a name, made where it is missing."""
    for part in name.split(".") if name else ():
        if part not in root._modules:
            root.add_module(part, _Module())
        root = root.get_submodule(part)
    return root
