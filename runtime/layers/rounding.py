"""Weights of a plain checkpoint rounded to nearest as they are read: `runtime.load(scheme=...)`, which needs no calibration.

What is rounded, and to which codes, is as by `compress apply` with method `rtn` and `scales: minmax`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from runtime import formats
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.checkpoint.headers import TensorEntry
from runtime.config.dtypes import dtype_name
from runtime.config.messages import show
from runtime.errors import ArtifactError, RequestError
from runtime.formats.bitpack import row_slices
from runtime.formats.presets import PRESETS, preset
from runtime.formats.quantization_config import ModuleEntry, build
from runtime.formats.scheme import CompressedWeight, Scheme
from runtime.layers.install import take_experts_apart
from runtime.modeling.experts import find_fused, routers
from runtime.modeling.linear_modules import is_conv1d
from runtime.modeling.skeleton import build_skeleton, find_stacks, linear_shapes, read_config
from runtime.modeling.tensor_names import match_names
from runtime.modeling.weights import FLOATS, main_dtype

_SLICE = 1 << 24  # weights that are float32 at once
_SUFFIX = ".weight"


def read_scheme(name: str) -> Scheme:
    """The preset of that name; RequestError where there is none, or its weights or inputs need more than rounding to nearest integers."""
    if not isinstance(name, str):
        raise RequestError(f"scheme must be the name of a preset, such as 'W8A16', not {show(name)}")
    scheme = preset(name)
    if _needs_more(scheme):
        allowed = ", ".join(known for known, found in PRESETS.items() if not _needs_more(found))
        raise RequestError(
            f"scheme '{name}' cannot be made while loading, only integer schemes without calibration can ({allowed}); use compress apply"
        )
    return scheme


def _needs_more(scheme: Scheme) -> bool:
    calibrated = scheme.activations is not None and scheme.activations.calibrated
    return scheme.grid is None or not scheme.grid.integral or calibrated or scheme.transform is not None


def round_artifact(artifact: Artifact, name: str, trust_remote_code: bool) -> Artifact:
    """The artifact with the linear layers of its blocks in a scheme; head, embeddings and routers stay as they are.

    Args:
        artifact: a plain checkpoint, or one that only structured pruning has changed.
        name: of the scheme.
        trust_remote_code: as of `read_config`.

    Raises:
        RequestError: `read_scheme`; the checkpoint is compressed already, or has layers that the scheme does not fit.
        ArtifactError: the checkpoint cannot be read.
    """
    scheme, checkpoint = read_scheme(name), artifact.checkpoint
    if artifact.config.get("quantization_config") is not None:
        text = "has a quantization_config, so its weights are quantized already"
        raise RequestError(
            f"scheme: {artifact.path} {text}; load it without a scheme, or give an unquantized checkpoint"
        )
    dtype, stored = main_dtype(checkpoint), checkpoint.names()
    model = build_skeleton(read_config(artifact.path, trust_remote_code), dtype, trust_remote_code, stored)
    take_experts_apart(model, stored)
    blocks, choosing, shapes = tuple(f"{name}." for name, _ in find_stacks(model)), routers(model), linear_shapes(model)
    fused = next((home for home in find_fused(model) if home.startswith(blocks)), None)
    if fused is not None:
        raise RequestError(
            f"scheme: {fused} stores its experts in one tensor, and cannot be rounded while loading; use compress apply"
        )
    places = dict(model.state_dict(keep_vars=True))
    found = match_names(model, stored, places)
    layers, entries = dict[str, RoundedLayer](), dict[str, ModuleEntry]()
    for module, shape in shapes.items():
        weight = found.get(module + _SUFFIX)
        if weight is None or module in choosing or not module.startswith(blocks):
            continue
        if checkpoint.shape(weight) != tuple(places[module + _SUFFIX].shape) or checkpoint.dtype(weight) not in FLOATS:
            continue  # whoever fills the model says what is wrong with it
        try:
            storage = formats.choose(scheme, shape)
        except RequestError:
            assert scheme.grid is not None
            reason = scheme.grid.why_not(shape) or f"no format stores a weight of shape {list(shape)}"
            raise RequestError(f"scheme '{name}' does not fit {module}: {reason}; use compress apply") from None
        entries[module] = ModuleEntry(scheme, storage.name)
        layers[weight] = RoundedLayer(entries[module], shape, is_conv1d(model.get_submodule(module)))
    if not entries:
        raise RequestError(f"scheme '{name}' finds no linear layer in the blocks of {artifact.path}")
    rounded = copy.copy(artifact)
    rounded.checkpoint = RoundedCheckpoint(checkpoint, dtype, layers)
    rounded.config["quantization_config"] = build(entries, list(shapes), foreign=entries)
    return rounded


@dataclass(frozen=True)
class RoundedLayer:
    """A layer to be rounded: how it is stored then, (out, in), and whether the checkpoint has the transposed matrix."""

    entry: ModuleEntry
    shape: tuple[int, int]
    transposed: bool

    def tensors(self, weight: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The tensors of the format for `weight` as the checkpoint has it, in a model of `dtype`."""
        matrix = weight.T if self.transposed else weight
        return formats.get(self.entry.format).pack(round_weight(matrix, self.entry.scheme, dtype))


def round_weight(weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> CompressedWeight:
    """`weight` `[out, in]` of any float dtype on an integer grid: scales that cover the range of every group, nearest codes."""
    grid, (rows, columns) = scheme.grid, weight.shape
    assert grid is not None
    codes, fitted = [], []
    for start, stop in row_slices(rows, columns, _SLICE) if grid.rows_apart else [(0, rows)]:
        part = weight[start:stop].to(dtype).float()
        fitted.append(grid.fit(part, dtype))
        scale, zero = (
            None if found is None else grid.spread(found.float(), columns)
            for found in (fitted[-1]["scale"], fitted[-1].get("zero_point"))
        )
        assert scale is not None
        codes.append(grid.codes(part, scale, zero).to(grid.code_dtype))
    return CompressedWeight.of(torch.cat(codes), grid.join_rows(fitted), None, scheme, dtype)


class RoundedCheckpoint(Checkpoint):
    """A checkpoint some of whose weights are read rounded: in their place it has the tensors of a storage format. For one thread.

    Args:
        checkpoint: the files.
        dtype: of the model.
        layers: by the stored names of their weights.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, layers: Mapping[str, RoundedLayer]) -> None:
        self.__dict__.update(copy.copy(checkpoint.__dict__))
        self._files, self._dtype, self._layers = checkpoint, dtype, layers
        self.config = {**checkpoint.config, "dtype": dtype_name(str(dtype))}
        self._weight_of: dict[str, str] = {}
        self._made: dict[str, torch.Tensor] = {}
        entries = {name: checkpoint.entry(name) for name in checkpoint.names() if name not in layers}
        for weight, layer in layers.items():
            specs = formats.get(layer.entry.format).tensors(layer.entry.scheme, layer.shape, dtype)
            for leaf, spec in specs.items():
                name = f"{weight.removesuffix(_SUFFIX)}.{leaf}"
                self._weight_of[name] = weight
                entries[name] = replace(
                    checkpoint.entry(weight), name=name, dtype=spec.dtype, shape=spec.shape, nbytes=spec.bytes
                )
        self._tensors: dict[str, TensorEntry] = dict(sorted(entries.items()))
        self.total_bytes = sum(entry.nbytes for entry in self._tensors.values())

    def get(self, name: str) -> torch.Tensor:
        """One tensor; ArtifactError for one of a weight that holds NaN or infinity."""
        weight = self._weight_of.get(name)
        if weight is None:
            return self._files.get(name)
        if name not in self._made:  # what one weight becomes is read name after name: it is kept until then
            value = self._files.get(weight)
            if not bool(torch.isfinite(value).all()):
                raise ArtifactError(f"{self.path}: tensor {weight} holds NaN or Inf, and cannot be rounded")
            home = weight.removesuffix(_SUFFIX)
            self._made = {
                f"{home}.{leaf}": tensor for leaf, tensor in self._layers[weight].tensors(value, self._dtype).items()
            }
        return self._made.pop(name)

    def get_item(self, name: str, index: int) -> torch.Tensor:
        """Item `index` of a tensor along its first dimension."""
        return self.get(name)[index] if name in self._weight_of else self._files.get_item(name, index)

    def get_part(self, name: str, index: Sequence[slice]) -> torch.Tensor:
        """Part of a tensor, a slice for each dimension. Of a weight that is rounded, all is read and rounded before it is cut."""
        return self.get(name)[tuple(index)].clone() if name in self._weight_of else self._files.get_part(name, index)
