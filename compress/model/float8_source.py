"""The checkpoint that a recipe starts from: float weights, also where the files hold them as 8-bit floats with scales.

DeepSeek-V3 and many after it are published so: `weight` in float8 (e4m3) beside a `weight_scale_inv` for every block of 128x128, which
the weight is multiplied by. Others have one scale for a row, or for all (`weight_scale`). Such a weight is given in the dtype that the
model computes in; what is compressed, and what is copied, is that.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from runtime.api.load import end_of_sequence
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.config.dtypes import dtype_name
from runtime.errors import ArtifactError, RequestError

#: Last names of the scales that a float8 weight is multiplied by.
SCALES = ("weight_scale_inv", "weight_scale")
_INPUTS = ("input_scale", "input_scale_ub", "k_scale", "v_scale", "kv_scale")
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
KEY = "quantization_config"


def open_checkpoint(path: str | Path | Checkpoint) -> Checkpoint:
    """A checkpoint (directory, hub id, or one that is open) whose weights are floats.

    Raises:
        RequestError: it is compressed already, otherwise than to 8-bit floats; or an adapter is to go on top of it.
        ArtifactError: it cannot be read, or a scale does not fit its weight; or its generation_config.json is not one that the artifact
            could generate with.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    end_of_sequence(checkpoint, None)  # asked now, and not first when the finished artifact is loaded
    adapter = checkpoint.path / "adapter_config.json"
    if adapter.is_file():
        raise RequestError(
            f"{checkpoint.path} holds an adapter ({adapter.name}) beside its weights, and the artifact would be of the model without it: "
            "merge it into the weights first (merge_and_unload of peft), or take it out of the directory"
        )
    settings = checkpoint.config.get(KEY)
    if KEY not in checkpoint.config or isinstance(checkpoint, Float8Checkpoint):
        return checkpoint
    stored = {name: checkpoint.dtype(name) for name in checkpoint.names()}
    whole = [n for n, dtype in stored.items() if not dtype.is_floating_point]
    if not whole and any(dtype in _FLOAT8 for dtype in stored.values()):
        return Float8Checkpoint(checkpoint)
    method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else "unknown"
    raise RequestError(
        f"{checkpoint.path} is compressed already (quant_method {method}); give the original checkpoint, or one of 8-bit floats"
    )


class Float8Checkpoint(Checkpoint):
    """A checkpoint whose float8 weights are read as floats, multiplied by their scales.

    Attributes:
        folded: {tensor of the files that is not among the names: why}.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.__dict__.update(copy.copy(checkpoint.__dict__))
        self._files = checkpoint
        self.config = {key: value for key, value in checkpoint.config.items() if key != KEY}
        self._dtype = _computes_in(checkpoint.config)
        self._block = _block_size(checkpoint.config.get(KEY))
        entries = {name: checkpoint.entry(name) for name in checkpoint.names()}
        self._scales = {name: self._find_scale(name) for name, entry in entries.items() if entry.dtype in _FLOAT8}
        self.folded = {scale: f"multiplied into {name}" for name, scale in self._scales.items()}
        for name in entries:
            if name.rpartition(".")[2] in _INPUTS:
                self.folded[name] = "of the 8-bit inputs or cache of the source, which are floats here"
        self._tensors = {
            name: replace(entry, dtype=self._dtype) if name in self._scales else entry
            for name, entry in entries.items()
            if name not in self.folded
        }

    def _find_scale(self, name: str) -> str:
        home, _, leaf = name.rpartition(".")
        scale = next((found for last in SCALES if self._files.has(found := f"{home}.{last}")), None)
        if scale is None or leaf != "weight":
            raise ArtifactError(
                f"{self.path}: tensor {name} is of 8-bit floats and has no scale beside it ({' or '.join(SCALES)})"
            )
        shape, own = self._files.shape(name), self._files.shape(scale)
        rows, columns = self._block
        blocks = (-(-shape[0] // rows), -(-shape[1] // columns)) if len(shape) == 2 else None
        if len(shape) != 2 or own not in ((), (1,), (shape[0],), (shape[0], 1), blocks):
            raise ArtifactError(
                f"{self.path}: tensor {scale} has shape {list(own)}, which fits no scale of {name} {list(shape)}: one for all, one a row, "
                f"or one for a block of {rows}x{columns}"
            )
        return scale

    def nbytes(self, name: str) -> int:
        """Bytes of the tensor in its file, without its scale."""
        return self._files.nbytes(name)

    def get(self, name: str) -> torch.Tensor:
        """One tensor; one of 8-bit floats times its scale, in the dtype that the model computes in."""
        value = self._files.get(name)
        if name not in self._scales:
            return value
        scale = self._files.get(self._scales[name]).float()
        if not bool(torch.isfinite(scale).all()):
            raise ArtifactError(f"{self.path}: tensor {self._scales[name]} holds NaN or Inf")
        return self._times(value, scale)

    def _times(self, value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Rows are multiplied block by block, so that no more than one of them is in float32."""
        rows, columns = self._block
        out = torch.empty(value.shape, dtype=self._dtype)
        blocked = scale.ndim == 2 and scale.shape != (value.shape[0], 1)
        for start in range(0, value.shape[0], rows):
            part = slice(start, start + rows)
            if blocked:
                factor = scale[start // rows].repeat_interleave(columns)[: value.shape[1]]
            else:
                factor = scale.reshape(-1, 1)[part] if scale.numel() > 1 else scale.reshape(1)
            out[part] = (value[part].float() * factor).to(self._dtype)
        return out


def _computes_in(config: dict[str, Any]) -> torch.dtype:
    named = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    found = getattr(torch, dtype_name(str(named)), None)
    return found if isinstance(found, torch.dtype) and found.itemsize > 1 else torch.bfloat16


def _block_size(settings: Any) -> tuple[int, int]:
    size = settings.get("weight_block_size") if isinstance(settings, dict) else None
    if size is None:
        return 128, 128
    if not (isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        raise ArtifactError(f"config.json: {KEY}.weight_block_size must be two positive numbers, got {size!r}")
    return size[0], size[1]
