"""A draft cut out of a target: some of its layers under the same embeddings, final norm and head, dense and ready to be trained."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from compress.model.config_sizes import with_layers
from compress.model.couplings import stored_tensors
from compress.model.hybrid_layers import attending, attends
from runtime.errors import RequestError
from runtime.layers.compressed_module import CompressedModule
from runtime.modeling.experts import Experts
from runtime.modeling.skeleton import build_skeleton, find_blocks, model_kind, set_tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: What makes a layer's numbers depend on its place, or on other layers, in ways that a cut would change without a word.
_TIED_TO_PLACE = ("scale_attn_by_inverse_layer_idx", "num_kv_shared_layers")


def cut(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A smaller model of the target's class. Weights that are compressed in the target are dense in the draft, as the target computes.

    Args:
        target: a causal language model of transformers, its layers as they are or compressed
        (`runtime.layers.compressed_linear`). It is not changed.
        layers: their indices, ascending.

    Returns:
        The draft in eval mode, float32, on the target's device; its parameters ask for gradients. Tied weights stay tied.

    Raises:
        RequestError: layers that the target does not have, or a target that is built in a way that cannot be cut.
    """
    draft, name = empty_cut(target, layers), find_blocks(target)[0]
    places = {f"{name}.{new}.": f"{name}.{old}." for new, old in enumerate(layers)}
    for own, place in stored_tensors(draft).items():
        prefix = next((new for new in places if own.startswith(new)), None)
        source = own if prefix is None else places[prefix] + own.removeprefix(prefix)
        _fill(draft, own, place, target, source)
    draft.requires_grad_().tie_weights()
    device = next(draft.parameters()).device
    for own, buffer in draft.named_buffers(remove_duplicate=False):
        if buffer.device != device:
            set_tensor(draft, own, buffer.to(device))
    draft.generation_config = copy.deepcopy(target.generation_config)
    return draft


def empty_cut(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """As `cut`, without weights (on meta): whether it can be made is known before the target's weights are."""
    name, blocks = _blocks(target)
    chosen = checked_layers(layers, len(blocks))
    smaller = with_layers(target.config, chosen)
    if attends(target.config) and not attends(smaller):
        raise RequestError(
            f"a {type(target).__name__} cannot be cut so: of the layers {chosen} none would have attention, by which its cache counts "
            "tokens"
        )
    draft = build_skeleton(smaller, torch.float32)
    if type(draft) is not type(target):
        raise RequestError(f"a {type(target).__name__} cannot be cut: its config builds a {type(draft).__name__}")
    inner_name, inner = find_blocks(draft)
    if inner_name != name or len(inner) != len(chosen):
        raise RequestError(
            f"a {type(target).__name__} cannot be cut: its config does not decide how many layers it has"
        )
    return draft


def cut_checkpoint(
    path: str | Path, layers: Sequence[int] | None, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """As `cut`, of an artifact or a checkpoint directory, of which only the layers that are kept are read; None: all of them.

    Raises:
        RequestError: as `cut`. ArtifactError: it cannot be used.
    """
    from runtime.checkpoint.artifact import Artifact
    from runtime.engines.blueprint import Blueprint
    from runtime.modeling.weights import Filling

    where = torch.device(device)
    blueprint = Blueprint(Artifact(path), where, "reference", None, False)
    model = blueprint.module
    name, blocks = _blocks(model)
    every = range(len(blocks))
    layers = every if layers is None else layers
    left_out = {f"{name}.{index}." for index in set(every) - set(layers)}
    filling = Filling(model, blueprint.artifact.checkpoint, blueprint.dtype, where, blueprint.compressed)
    if filling.foreign:  # only transformers knows how to read it, and it reads all of it
        return cut(blueprint.build_module(), layers)
    filling.place(lambda tensor: not any(tensor.startswith(prefix) for prefix in left_out))
    filling.tie()
    return cut(model, layers)


def spread(depth: int, count: int) -> list[int]:
    """Indices of `count` of `depth` layers, evenly spread, the first and (from two on) the last among them.

    The last layer writes what the head reads: a cut that has it agrees more with its target, before and after training, than one of the
    first layers alone.

    Raises:
        RequestError: not 1 to `depth` layers.
    """
    if not 1 <= count <= depth:
        raise RequestError(f"layers of a draft: 1 to {depth}, those of its target, not {count}")
    return [0] if count == 1 else [round(index * (depth - 1) / (count - 1)) for index in range(count)]


def chosen_layers(config: PretrainedConfig, depth: int, layers: int | Sequence[int]) -> list[int]:
    """Indices of the layers of a draft.

    Args:
        depth: layers of the target.
        layers: the indices, or their number: `spread`, and where none of those has attention, the last gives place to the nearest that has.

    Raises:
        RequestError: as `spread`; indices that are none; no layer would have attention in its new place.
    """
    if not isinstance(layers, int):
        return checked_layers(layers, depth)
    even = spread(depth, layers)
    others = sorted(set(range(depth)) - set(even), key=lambda index: abs(index - even[-1]))
    return attending(config, even, others, even[-1])


def checked_layers(layers: Sequence[int], depth: int) -> list[int]:
    """Indices of some of `depth` layers; RequestError unless they are ascending, each once."""
    chosen = list(layers)
    if not chosen or chosen != sorted(set(chosen)) or not set(chosen) <= set(range(depth)):
        raise RequestError(
            f"layers of a draft: indices of 0 to {depth - 1} in ascending order, each once, not {chosen}"
        )
    return chosen


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm between the last layer and the head; RequestError where there is not just one that could be it."""
    norms = [child for child in decoder_of(model).children() if "norm" in type(child).__name__.lower()]
    if len(norms) != 1:
        raise RequestError(f"a {type(model).__name__} has {len(norms)} final norms; a nested draft needs one")
    return norms[0]


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The module whose child the list of layers is."""
    return model.get_submodule(find_blocks(model)[0].rpartition(".")[0])


def _blocks(target: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The target's layers, if it is built in a way that can be cut."""
    what, config = type(target).__name__, target.config
    if model_kind(config) != "decoder":
        raise RequestError(f"a {what} is an {model_kind(config)}; a draft is cut out of a causal language model")
    if config.get_text_config(decoder=True) is not config:
        raise RequestError(
            f"a {what} has a text model inside another; a draft is cut out of plain language models only"
        )
    name, blocks = find_blocks(target)
    if len(blocks) != getattr(config, "num_hidden_layers", None):
        raise RequestError(
            f"a {what} cannot be cut: it has {len(blocks)} blocks in {name}, num_hidden_layers of its config is "
            f"{getattr(config, 'num_hidden_layers', 'missing')}"
        )
    odd = next((key for key in _TIED_TO_PLACE if getattr(config, key, None)), None)
    if odd is not None:
        raise RequestError(f"a {what} with {odd} cannot be cut: what a layer computes depends on the others")
    return name, blocks


def _fill(draft: PreTrainedModel, name: str, place: torch.Tensor, target: PreTrainedModel, source: str) -> None:
    """Give the draft's parameter or buffer `name` the numbers of the target's `source`."""
    what, dtype = type(target).__name__, torch.float32 if place.is_floating_point() else place.dtype
    home, _, key = source.rpartition(".")
    try:
        origin = target.get_submodule(home)
    except AttributeError:
        raise RequestError(f"a {what} cannot be cut: it has no module {home}") from None
    value = _value(origin, key)
    transposed = type(draft.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D"
    if value is not None and value.dim() == 2 and transposed and isinstance(origin, CompressedModule):
        value = value.T  # Conv1D holds the transposed of what compressed layers do
    if value is None or value.shape != place.shape or value.device.type == "meta":
        raise RequestError(f"a {what} cannot be cut: its {home} has no {key} of {list(place.shape)}")
    set_tensor(draft, name, value.detach().to(dtype).clone().contiguous())


def _value(origin: nn.Module, key: str) -> torch.Tensor | None:
    if isinstance(origin, CompressedModule) and key == "weight":
        # In float32: rounded to the target's, codes times scales would no longer be what its kernels compute with.
        return origin.dequantize(torch.float32)
    if isinstance(origin, Experts):
        whole = origin.whole(key, _value)
        if whole is not None:
            return whole
    value = getattr(origin, key, None)
    return value if isinstance(value, torch.Tensor) else None
