"""Skeleton with empty compressed modules in it, from the `quantization_config` of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from runtime.modeling.experts import Experts, unfuse
from runtime.modeling.linear_modules import is_linear
from runtime.modeling.tensor_names import Published

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from runtime.formats.quantization_config import ModuleEntry


def entries_of(model: PreTrainedModel, quantization: dict[str, Any], stored: Collection[str]) -> dict[str, ModuleEntry]:
    """{module of the model: how it is stored}.

    Experts that are stored one by one are taken apart in the model.

    Args:
        quantization: config.json's `quantization_config`.
        stored: names of the checkpoint's tensors.
    """
    from runtime.formats.quantization_config import parse

    published = take_experts_apart(model, stored)
    linear = [name for name, module in model.named_modules() if is_linear(module)]
    embeddings = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    return parse(quantization, linear, embeddings, published.module_place)


def take_experts_apart(model: PreTrainedModel, stored: Collection[str]) -> Published:
    """Give each expert that is `stored` on its own a module of its own; the ways between the model's names and the published ones."""
    published = Published(model)
    if published.experts:
        from runtime.layers.native_experts import NativeExperts

        places = {published.place(name) for name in stored}
        for name in unfuse(model, {n for n in published.experts if any(p.startswith(f"{n}.0.") for p in places)}):
            cast(Experts, model.get_submodule(name)).compute = NativeExperts()
    return published


def install_compressed(model: PreTrainedModel, config: dict[str, Any], stored: Collection[str]) -> frozenset[str]:
    """Replace the layers that config.json's `quantization_config` names by compressed ones, still on meta.

    Returns their names; empty for a plain checkpoint.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return frozenset()
    from runtime.layers.compressed_linear import install

    entries = entries_of(model, quantization, stored)
    install(model, entries)
    return frozenset(entries)
