"""Filling of a model skeleton with the tensors of a checkpoint, one at a time, every one accounted for."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime.checkpoint.checkpoint import Checkpoint
from runtime.config.dtypes import dtype_name
from runtime.config.messages import did_you_mean
from runtime.errors import ArtifactError, first_line
from runtime.modeling.skeleton import find_stacks, set_tensor, tied_names
from runtime.modeling.tensor_names import match_names, prediction_tensors, without_place
from runtime.modeling.unstored_buffers import cast_unstored

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Left in old checkpoints by former versions of transformers; models compute them.
_LEFTOVERS = (r"rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$", r"^lm_head\.decoder\.bias$", r"(^|\.)position_ids$")


def main_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """What the model computes in: config.json's dtype, else the float dtype that most weights are stored in."""
    named = checkpoint.config.get("dtype", checkpoint.config.get("torch_dtype"))
    if isinstance(named, str):
        dtype = getattr(torch, dtype_name(named), None)
        if dtype not in FLOATS:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in FLOATS)
            raise ArtifactError(f"{checkpoint.path}/config.json has dtype {named!r}; allowed are {allowed}")
        return dtype
    sizes: Counter[torch.dtype] = Counter()
    for entry in map(checkpoint.entry, checkpoint.names()):
        if entry.dtype in FLOATS:
            sizes[entry.dtype] += math.prod(entry.shape)
    if not sizes:
        raise ArtifactError(f"{checkpoint.path} has no weights in float16, bfloat16 or float32")
    return sizes.most_common(1)[0][0]


class Filling:
    """Which tensor of a checkpoint belongs where in a model skeleton (on meta): matched and checked as a whole, placed in parts.

    Float tensors become `dtype`; those of `compressed` layers stay as stored. A tensor of the wrong shape or dtype, a missing
    one and one that the model has no place for are errors.

    Attributes:
        names: {name in the model: name in the checkpoint}.
        foreign: the names are not those of the model, and only transformers knows how to convert them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        compressed: frozenset[str] = frozenset(),
    ) -> None:
        self.model, self.checkpoint, self.dtype, self.device = model, checkpoint, dtype, device
        self._compressed = compressed
        places = _places(model)
        self._ties = {name: source for name, source in tied_names(model).items() if {name, source} <= places.keys()}
        self.names = match_names(model, checkpoint.names(), places)
        missing = sorted(places.keys() - self.names.keys() - _tied_away(self._ties, self.names))
        unexpected = unplaced(model, checkpoint.names(), set(self.names.values()))
        self.foreign = bool(missing and unexpected and not compressed)
        if self.foreign:
            return
        _refuse(model, checkpoint, missing, unexpected)
        _check(model, checkpoint, places, self.names, compressed)
        self._keep = _keeps_float32(model, dtype)

    def place(self, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Read the tensors of the places that are `wanted` and put them there, on `device`."""
        for name, stored in self.names.items():
            if not wanted(name):
                continue
            value = self.checkpoint.get(stored)
            if value.dtype in FLOATS and name.rpartition(".")[0] not in self._compressed:
                value = value.to(torch.float32 if self._keep(name) else self.dtype)
            set_tensor(self.model, name, value.to(self.device))

    def tie(self) -> None:
        """Share what config.json ties, among the tensors that were placed."""
        missing = {name for pair in self._ties.items() for name in pair if name not in self.names}
        everything = self.model.all_tied_weights_keys
        self.model.all_tied_weights_keys = dict(self._ties)
        # Where both of two are stored and differ they stay apart.
        self.model.tie_weights(missing_keys=missing, recompute_mapping=False)
        self.model.all_tied_weights_keys = everything


def fill(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    compressed: frozenset[str] = frozenset(),
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Give every parameter and stored buffer of `model` (on meta) its tensor, see `Filling`; returns the filled model.

    A plain checkpoint whose names are not those of the model (experts stored one by one, say) is read by transformers, which
    knows the conversions; the model returned is then a new one.
    """
    filling = Filling(model, checkpoint, dtype, device, compressed)
    if filling.foreign:
        return _read_by_transformers(model, checkpoint, dtype, device, trust_remote_code)
    filling.place()
    filling.tie()
    cast_unstored(model, dtype)
    return model


def to_device(model: nn.Module, device: torch.device) -> None:
    """Move what `fill` did not place: buffers that are computed, not stored."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def _places(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and persistent buffers by name, tied ones under each of their names."""
    return dict(model.state_dict(keep_vars=True))


def _tied_away(ties: dict[str, str], names: dict[str, str]) -> set[str]:
    """Names that need no tensor of their own, since one they are tied to is stored."""
    groups: dict[str, set[str]] = {}
    for name, source in ties.items():
        groups.setdefault(source, {source}).add(name)
    return {member for group in groups.values() if group & names.keys() for member in group}


def unplaced(model: PreTrainedModel, names: Collection[str], used: Collection[str]) -> list[str]:
    """The stored `names` that are not `used`, and that nobody knows to be of no use to the model."""
    patterns = [*_LEFTOVERS, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    found = [
        n for n in names if n not in used and not any(re.search(p, n) for p in patterns) and not without_place(model, n)
    ]
    known = prediction_tensors(find_stacks(model), names) if found else set()
    return [name for name in found if name not in known]


def _refuse(model: nn.Module, checkpoint: Checkpoint, missing: list[str], unexpected: list[str]) -> None:
    """ArtifactError where tensors are missing or have no place."""
    name = type(model).__name__
    if missing:
        raise ArtifactError(f"{checkpoint.path}: tensor {first_name(missing)} is missing: {name} needs it")
    if unexpected:
        hint = did_you_mean(unexpected[0], _places(model))
        raise ArtifactError(f"{checkpoint.path}: {name} has no place for tensor {first_name(unexpected)}{hint}")


def _check(
    model: nn.Module,
    checkpoint: Checkpoint,
    places: dict[str, torch.Tensor],
    names: dict[str, str],
    compressed: frozenset[str],
) -> None:
    for name, stored in names.items():
        place, shape, dtype = places[name], checkpoint.shape(stored), checkpoint.dtype(stored)
        if tuple(place.shape) != shape:
            raise ArtifactError(
                f"{checkpoint.path}: tensor {stored} has shape {list(shape)}, {type(model).__name__} as config.json describes "
                f"it needs {list(place.shape)}"
            )
        if dtype != place.dtype and not (dtype in FLOATS and place.dtype in FLOATS):
            hint = ""
            if not compressed and place.dtype in FLOATS:
                hint = " (config.json has no quantization_config that would say how to read it)"
            raise ArtifactError(
                f"{checkpoint.path}: tensor {stored} is {_short(dtype)}, expected {_short(place.dtype)}{hint}"
            )


def _keeps_float32(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], bool]:
    """Which parameters stay float32 in a 16-bit model: the model class says so (routers, some norms)."""
    parts = model._get_dtype_plan(dtype)
    pattern = re.compile("|".join(rf"(?:^|\.){part}(?:$|\.)" for part in sorted(parts))) if parts else None
    return lambda name: pattern is not None and pattern.search(name) is not None


def _read_by_transformers(
    model: PreTrainedModel, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> PreTrainedModel:
    try:
        result: Any = type(model).from_pretrained(
            str(checkpoint.path),
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        raise ArtifactError(f"{checkpoint.path} cannot be read: {first_line(error)}") from error
    loaded, info = result
    unexpected = sorted(info["unexpected_keys"])
    predicting = prediction_tensors(find_stacks(model), [*_places(model), *unexpected])
    _refuse(model, checkpoint, sorted(info["missing_keys"]), [name for name in unexpected if name not in predicting])
    return loaded.to(device).eval().requires_grad_(False)


def first_name(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
