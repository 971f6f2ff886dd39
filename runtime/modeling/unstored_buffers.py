"""Buffers that a model computes and no checkpoint stores: rotary frequencies, position tables, multipliers.

transformers' initialisers (`_init_weights`) compute it when `from_pretrained` reads a checkpoint. One may also draw numbers at random, or
leave what it finds; what came of that would be silent corruption. So each is run over two different fillings: what differs afterwards was
not computed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime.errors import CompressError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A module's attribute: names of its buffers that would be parameters, or stored, in a checkpoint that has them.
_UNSTORED = "_compress_unstored"


def materialise_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint stores (rotary frequencies, ...) the way `from_pretrained` does.

    Raises:
        CompressError: transformers cannot compute one of them.
    """
    for name, module in model.named_modules():
        unstored = module._non_persistent_buffers_set
        missing = [b for b, held in module._buffers.items() if b in unstored and held is not None and held.is_meta]
        found = _computed(model, name, missing)
        for buffer in missing:
            if buffer not in found:
                raise CompressError(
                    f"buffer {name}.{buffer} is not stored in the checkpoint and transformers cannot recompute it"
                )
            module._buffers[buffer] = found[buffer]


def compute_unstored(model: PreTrainedModel, stored: Collection[str]) -> None:
    """Compute the parameters and buffers that transformers lets a checkpoint lack (`_keys_to_ignore_on_load_missing`: Marian's table of
    positions), where this one does. They become buffers that are not stored, as nothing is to be read or written for them.

    One that the initialiser draws at random is left alone: it is missing.

    Args:
        stored: names of the checkpoint's tensors.
    """
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    for name, module in list(model.named_modules()) if patterns else ():
        wanted = []
        for leaf, held in [*module._parameters.items(), *module._buffers.items()]:
            if held is None or leaf in module._non_persistent_buffers_set:
                continue
            whole = f"{name}.{leaf}" if name else leaf
            if any(re.search(pattern, whole) for pattern in patterns) and not _is_stored(whole, stored):
                wanted.append(leaf)
        for leaf, value in _computed(model, name, wanted).items():
            module._parameters.pop(leaf, None)
            module._buffers.pop(leaf, None)
            module.register_buffer(leaf, value, persistent=False)
            vars(module).setdefault(_UNSTORED, set()).add(leaf)


def cast_unstored(model: nn.Module, dtype: torch.dtype) -> None:
    """Give what `compute_unstored` has computed the dtype of the weights that are read, where it is another than the skeleton's."""
    for module in model.modules():
        for leaf in vars(module).get(_UNSTORED, ()):
            value = module._buffers[leaf]
            if value is not None and value.is_floating_point():
                module._buffers[leaf] = value.to(dtype)


def _is_stored(name: str, stored: Collection[str]) -> bool:
    """Whether a tensor is stored, with the prefix of a base model or without it."""
    return any(name == other or name.endswith(f".{other}") or other.endswith(f".{name}") for other in stored)


def _computed(model: PreTrainedModel, name: str, leaves: Collection[str]) -> dict[str, torch.Tensor]:
    """{leaf: its value} of those tensors of module `name` that an initialiser computes: of the module, or of one around it."""
    from transformers import PreTrainedModel

    if not leaves:
        return {}
    module = model.get_submodule(name)
    left, found = list(leaves), dict[str, torch.Tensor]()
    before: dict[str, torch.Tensor] = {leaf: getattr(module, leaf) for leaf in left}
    for around, part in _outward(model, name):
        # The module itself, then the models that it is part of: Falcon-H1's computes what its layers multiply by.
        if not left or (around != name and not isinstance(part, PreTrainedModel)):
            continue
        results: list[dict[str, torch.Tensor]] = []
        # One generator for both: what is drawn at random differs the second time.
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for fill in (0, 1):
                for leaf in left:
                    _put(module, leaf, torch.full_like(before[leaf], fill, device="cpu"))
                initialiser(model, around)._init_weights(part)
                results.append({leaf: getattr(module, leaf).detach().clone() for leaf in left})
        found |= {leaf: results[0][leaf] for leaf in left if torch.equal(results[0][leaf], results[1][leaf])}
        left = [leaf for leaf in left if leaf not in found]
    for leaf, value in before.items():
        _put(module, leaf, value)
    return found


def _outward(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """A module and those around it, from the inside out: names and modules."""
    parts = name.split(".") if name else []
    for end in range(len(parts), -1, -1):
        outer = ".".join(parts[:end])
        yield outer, model.get_submodule(outer)


def _put(module: nn.Module, leaf: str, value: torch.Tensor) -> None:
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[leaf] = value


def initialiser(model: PreTrainedModel, name: str) -> Any:
    """Whose `_init_weights` transformers calls with module `name`: that of the innermost model it belongs to, since the parts of a
    vision-language model initialise their own."""
    return next(part for _, part in _outward(model, name) if hasattr(part, "_init_weights"))
