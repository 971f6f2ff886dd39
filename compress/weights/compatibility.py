"""Layers that transformers with compressed-tensors alone would not find, not replace, or compute with another scheme.

With one of them an artifact says `quant_method: compress`, and our own loader reads it (`runtime.layers.hf`). No family is named here: what
counts is how transformers builds, initialises and converts the model at hand.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime import formats
from runtime.formats.quantization_config import ModuleEntry, needs_dense_loading
from runtime.modeling.experts import Experts, expert_of
from runtime.modeling.linear_modules import is_linear, sides
from runtime.modeling.unstored_buffers import initialiser

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def foreign_layers(model: PreTrainedModel, entries: Mapping[str, ModuleEntry], pieces: Collection[str]) -> set[str]:
    """Names of those of `entries` that only our loader can load.

    Args:
        model: that is compressed, with its experts apart where they are stored so.
        entries: {compressed module: how it is stored}.
        pieces: tensors of single experts that the source stores fused: transformers cannot fuse those.
    """
    fused = {name.rpartition(".")[0] for name in pieces}
    if _other_modules(model) or _several_unpacked(entries) or not _experts_carried(model, entries, fused):
        return set(entries)
    kinds = {n for n, m in model.named_modules() if is_linear(m) and type(m) is not nn.Linear}
    if not needs_dense_loading(entries.values()):  # else transformers leaves every layer its weight
        kinds |= _initialised_by_name(model, entries)
    return (kinds | fused) & set(entries)


def _other_modules(model: nn.Module) -> bool:
    """Whether transformers builds a part of the model from other modules as soon as compressed-tensors is to load it (Llama 4's experts
    then are linear layers, which the published tensors do not fit)."""
    from transformers.quantizers import base

    patched: dict[str, Any] = base.MODULES_TO_PATCH_FOR_QUANTIZATION
    other = {kind for kind, patch in patched.items() if "compressed-tensors" in patch["quantization_methods"]}
    return any(type(module).__name__ in other for module in model.modules())


def _several_unpacked(entries: Mapping[str, ModuleEntry]) -> bool:
    """Packed zero points make transformers unpack while it loads (`runtime.formats.quantization_config`), and then it
    takes the first group's
    scheme for all layers; beside quantized activations it does not even do that."""
    stored = {_grid(entry) for entry in entries.values()}
    packed = (e.scheme.grid for e in entries.values() if e.format == "pack-quantized")
    return len(stored) > 1 and any(w is not None and not w.symmetric and w.strategy != "tensor" for w in packed)


def _experts_carried(model: nn.Module, entries: Mapping[str, ModuleEntry], fused: Collection[str]) -> bool:
    """Whether transformers puts the experts together as they are stored.

    It unpacks them as it does so, all with the scheme of the first group: it knows packed integers without zero points, and float8
    with a scale for a row or a tensor; what they read it does not round. Experts of 8-bit integers it refuses, but other engines run
    them, and read no other `quant_method`: so those count as carried. Dense experts go through beside float8 alone. Those that the
    source has fused (`fused`) are stored so where they stay dense.
    """
    experts = {
        f"{name}.{number}.{projection}"
        for name, module in model.named_modules()
        if isinstance(module, Experts)
        for number in range(module.count)
        for projection in module.layout.projections
    }
    experts -= fused - entries.keys()
    if not experts or not entries:
        return True
    first = next(iter(entries.values()))
    dense = experts - entries.keys()
    if dense and first.format != "float-quantized":
        return False
    weights = first.scheme.grid
    known = weights is not None and weights.symmetric
    if first.format in ("float-quantized", "int-quantized"):
        known = known and weights is not None and weights.strategy in ("tensor", "channel")
    else:
        known = known and first.format == "pack-quantized" and first.scheme.activations is None
    return all(known and _grid(entries[name]) == _grid(first) for name in experts - dense)


def _grid(entry: ModuleEntry) -> tuple[object, str]:
    """What tells groups of a configuration of compressed-tensors apart, which has no word for sparsity."""
    return replace(entry.scheme, sparsity=None), entry.format


def _initialised_by_name(model: PreTrainedModel, entries: Mapping[str, ModuleEntry]) -> set[str]:
    """Layers whose weight the model looks for when it initialises a module around them (GPT-BigCode, T5).

    compressed-tensors leaves a packed layer without a `weight`, and transformers initialises every module after loading. Each kind of
    module is asked once, with copies on meta, before and after the weights are taken out of them.
    """
    inside: dict[str, set[str]] = {}
    for name, entry in entries.items():
        shape = sides(model.get_submodule(name))
        if shape is None or expert_of(model, name) is not None:
            continue
        if "weight" in formats.get(entry.format).tensors(entry.scheme, shape, torch.float32, entry.count):
            continue
        parts = name.split(".")
        for end in range(len(parts)):
            inside.setdefault(".".join(parts[:end]), set()).add(".".join(parts[end:]))
    found: set[str] = set()
    asked: dict[tuple[type[nn.Module], frozenset[str]], bool] = {}
    for home, layers in inside.items():
        kind = (type(model.get_submodule(home)), frozenset(layers))
        if kind not in asked:
            asked[kind] = _initialises(model, home, ()) and not _initialises(model, home, layers)
        if asked[kind]:
            found |= {f"{home}.{layer}" if home else layer for layer in layers}
    return found


def _initialises(model: PreTrainedModel, home: str, without: Collection[str]) -> bool:
    """Whether a copy of module `home` can be initialised whose layers `without` have no weight.

    The copy is over tensors without values, so that nothing of the model is touched. Experts, which transformers has in one, are left out.
    """
    module = model.get_submodule(home)
    instead: dict[int, Any] = {id(m): nn.Module() for m in module.modules() if isinstance(m, Experts)}
    for value in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(value, device="meta")
        instead[id(value)] = nn.Parameter(empty, False) if isinstance(value, nn.Parameter) else empty
    try:
        probe = copy.deepcopy(module, instead)
        for name in without:
            del probe.get_submodule(name).weight
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            initialiser(model, home)._init_weights(probe)
    except Exception:  # models compute what they like there
        return False
    return True
