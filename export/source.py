"""Source of an export: an artifact (or an uncompressed checkpoint) whose weights are read one at a time."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime import formats
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.companions import TOKENIZER_FILES as TOKENIZER_FILES
from runtime.checkpoint.export_directory import find_export
from runtime.errors import ArtifactError, RequestError
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import CompressedWeight, GridScheme
from runtime.layers.install import entries_of
from runtime.modeling.experts import expert_of
from runtime.modeling.skeleton import build_skeleton, linear_shapes, read_config, tied_names
from runtime.modeling.tensor_names import Published
from runtime.modeling.weights import main_dtype

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`."""
    return str(dtype).removeprefix("torch.")


def in_float32(weight: CompressedWeight) -> torch.Tensor:
    """The matrix `[out, in]` as its codes and scales say, products not rounded to the model's dtype."""
    scale = None if weight.scale is None else weight.scale.float()
    return replace(weight, scale=scale, dtype=torch.float32).dequantize()


def by_block(values: torch.Tensor, grid: GridScheme, shape: tuple[int, int], block: int) -> torch.Tensor:
    """Scales or zero points `[rows, groups]` (`[]` where there is one in all) as `[rows, blocks]`.

    Args:
        shape: (rows, columns) of the matrix.
        block: columns of a block, each of which lies inside one group.
    """
    rows, columns = shape
    if grid.strategy == "tensor":
        values = values.reshape(1, 1).expand(rows, 1)
    width = (grid.group_size if grid.strategy == "group" else None) or max(1, columns)
    return values[:, torch.arange(0, columns, block) // width]


def distance(before: torch.Tensor, after: torch.Tensor) -> float:
    """`||W' - W|| / ||W||`, the relative error of a matrix that was rounded anew."""
    return float((after - before).norm() / before.norm().clamp(min=1e-30))


class Source:
    """An artifact as exporters see it.

    Attributes:
        artifact: the directory; `artifact.manifest` is None for an uncompressed checkpoint.
        config: transformers' config object.
        dtype: what the model computes in (scales and dense weights are stored in it).
        entries: {module: scheme and storage format} of the compressed modules, in the model's order; empty for an uncompressed checkpoint.
        shapes: {module: (rows, columns)} of every linear layer and embedding, compressed or not.
        embeddings: names of the modules among `shapes` that are embeddings.

    Raises:
        ArtifactError: the directory cannot be used.
        RequestError: it is an export that holds no artifact any more.
    """

    #: Options that what is exported brings along; see `export.target.Target.open`.
    defaults: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, path: str | Path, trust_remote_code: bool = False) -> None:
        exported = find_export(path)
        if exported is not None and not exported.is_checkpoint:
            again = f"; only target {exported.target} takes it" if exported.target == "tensorrt" else ""
            raise RequestError(f"{path} is an export to {exported.target} already{again}; name its artifact")
        self.artifact = Artifact(path, trust_remote_code)
        self.trust_remote_code = trust_remote_code
        if not isinstance(self.artifact.config.get("quantization_config", {}), dict):
            raise ArtifactError(f"{self.path}/config.json: quantization_config is not an object")
        self.config: PretrainedConfig = read_config(self.path, trust_remote_code)
        self.dtype = main_dtype(self.artifact.checkpoint)
        model = self.skeleton
        tables = {n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
        self.embeddings = frozenset(tables)
        self.shapes = {n: (m.num_embeddings, m.embedding_dim) for n, m in tables.items()} | linear_shapes(model)
        self.entries: dict[str, ModuleEntry] = {}
        quantization = self.artifact.config.get("quantization_config")
        if quantization is not None:
            self.entries = entries_of(model, quantization, self.artifact.checkpoint.names())
            self.shapes |= linear_shapes(model)  # experts are apart now
        missing = [name for name in self.entries if name not in self.shapes]
        if missing:
            raise ArtifactError(f"{self.path}: config.json compresses {missing[0]}, which the model has no layer for")

    @property
    def path(self) -> Path:
        """Directory of the artifact."""
        return self.artifact.path

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """The model, parameters on meta, layers as transformers makes them. Shared: do not change it (see `build`)."""
        return self.build(self.dtype)

    def verify(self) -> None:
        """Raise ArtifactError unless every file has the hash that the manifest says; an uncompressed checkpoint has none."""
        if self.artifact.manifest is not None:
            self.artifact.verify()

    def build(self, dtype: torch.dtype) -> PreTrainedModel:
        """A fresh skeleton whose floats are `dtype`, parameters on meta."""
        return build_skeleton(self.config, dtype, self.trust_remote_code, self.artifact.checkpoint.names())

    @cached_property
    def tied(self) -> dict[str, str]:
        """{tied parameter: the parameter it shares}, as config.json ties them."""
        return tied_names(self.skeleton)

    @cached_property
    def compressed_expert(self) -> str | None:
        """The first compressed layer that belongs to a routed expert, or None."""
        return next((name for name in self.entries if expert_of(self.skeleton, name) is not None), None)

    # ---------------------------------------------------------------- tensors
    @cached_property
    def _published(self) -> dict[str, str]:
        """{the model's name of a tensor's module: its name in the files} where the two differ."""
        published = Published(self.skeleton)
        names = {published.place(name): name for name in self.artifact.checkpoint.names()}
        return {own.rpartition(".")[0]: name.rpartition(".")[0] for own, name in names.items() if own != name}

    def _stored(self, name: str) -> str:
        module, _, leaf = name.rpartition(".")
        return f"{self._published.get(module, module)}.{leaf}"

    def weight(self, module: str) -> CompressedWeight:
        """Codes, scales, zero points and mask of one compressed module, read now; nothing is kept."""
        entry = self.entries[module]
        storage, shape, checkpoint = formats.get(entry.format), self.shapes[module], self.artifact.checkpoint
        specs = storage.tensors(entry.scheme, shape, self.dtype, entry.count)
        names = {name: self._stored(f"{module}.{name}") for name in specs if not name.startswith("input_")}
        tensors = {name: checkpoint.get(stored) for name, stored in names.items()}
        return storage.unpack(tensors, entry.scheme, shape, self.dtype, module)

    def matrix(self, module: str) -> torch.Tensor:
        """`[rows, columns]` of any linear layer or embedding, dequantized, for untransformed inputs."""
        if module not in self.entries:
            return self.dense(f"{module}.weight")
        transform, weight = self.entries[module].scheme.transform, self.weight(module).dequantize()
        return weight if transform is None else transform.of_weight(weight, self.input_basis(module))

    def optional(self, name: str) -> torch.Tensor | None:
        """A stored tensor, None where there is none."""
        stored = self._stored(name)
        return self.artifact.checkpoint.get(stored) if self.artifact.checkpoint.has(stored) else None

    def input_basis(self, module: str) -> dict[str, torch.Tensor]:
        """Matrices or order of the input transform, as `InputTransform.tensors` names them; none where there is no transform."""
        transform = self.entries[module].scheme.transform
        names = () if transform is None else transform.tensors(self.shapes[module][1])
        return {name: self.artifact.checkpoint.get(self._stored(f"{module}.{name}")) for name in names}

    def input_scale(self, module: str) -> torch.Tensor | None:
        """The static activation scale, `[1]` in the model's dtype; None where activations are dynamic or not quantized."""
        return self.optional(f"{module}.input_scale")

    def input_zero_point(self, module: str) -> torch.Tensor | None:
        """The static activation zero point, `[1]`; None where there is none."""
        return self.optional(f"{module}.input_zero_point")

    def bias(self, module: str) -> torch.Tensor | None:
        """`[rows]` in the dtype stored, or None."""
        return self.optional(f"{module}.bias")

    def dense(self, name: str) -> torch.Tensor:
        """One stored tensor by its full name; a tied one that is not stored is read from where it is."""
        checkpoint = self.artifact.checkpoint
        if not checkpoint.has(name):
            twins = [other for pair in self.tied.items() if name in pair for other in pair]
            name = next((twin for twin in twins if checkpoint.has(twin)), name)
        return checkpoint.get(name)

    def dense_names(self) -> list[str]:
        """Stored tensors that belong to no compressed module (biases of compressed modules are among them), sorted."""
        names = self.artifact.checkpoint.names()
        return [name for name in names if name.endswith(".bias") or name.rpartition(".")[0] not in self.entries]

    # ---------------------------------------------------------------- facts
    @property
    def bytes(self) -> int:
        """Bytes of all stored tensors."""
        return self.artifact.checkpoint.total_bytes

    @cached_property
    def _module_bytes(self) -> Counter[str]:
        sizes: Counter[str] = Counter()
        for name in self.artifact.checkpoint.names():
            module, _, leaf = name.rpartition(".")
            sizes[module] += 0 if leaf == "bias" else self.artifact.checkpoint.nbytes(name)
        return sizes

    def module_bytes(self, module: str) -> int:
        """Bytes of all stored tensors of one module but its bias."""
        return self._module_bytes[self._published.get(module, module)]

    def sha256(self) -> str:
        """Hash of the artifact: of the manifest, which has the hash of every file; a fingerprint for uncompressed checkpoints."""
        if self.artifact.manifest is None:
            return self.artifact.checkpoint.fingerprint()
        listed = {name: value["sha256"] for name, value in self.artifact.manifest["files"].items()}
        return hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """Who the artifact is, for the export's provenance."""
        manifest = self.artifact.manifest or {}
        return {
            "path": self.path.name,
            "sha256": self.sha256(),
            "compress_version": manifest.get("compress_version"),
            "source": manifest.get("source"),
            "tensor_bytes": self.bytes,
        }
