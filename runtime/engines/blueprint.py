"""Blueprint of a model: an artifact and how it shall be run, before its weights are read."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from runtime.checkpoint.artifact import Artifact
from runtime.errors import ArtifactError, RequestError
from runtime.layers.adapter import add_adapter
from runtime.layers.dense_products import leave_products
from runtime.layers.install import install_compressed
from runtime.modeling.skeleton import Kind, build_skeleton, model_kind, read_config
from runtime.modeling.weights import fill, main_dtype, to_device
from runtime.system.memory import return_memory

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from runtime.engines.torch.engine import TorchEngine


class Blueprint:
    """An artifact's model before its weights are read.

    Nothing of transformers is imported before it is asked for `config`, `kind`, `module` or `compressed`: a program that is known needs
    none of them.

    Attributes:
        checkpoint: the tensors that the skeleton needs.
        dtype: what is computed in; `stored_dtype`: what most weights are stored in.
        adapter: directory of an adapter (`runtime.layers.adapter`) that is added when the weights are read; None: there is none.
    """

    def __init__(
        self,
        artifact: Artifact,
        device: torch.device,
        kernels: str,
        dtype: torch.dtype | None,
        trust_remote_code: bool | None,  # None: see `read_config`
        adapter: Path | None = None,
    ) -> None:
        if not isinstance(artifact.config.get("quantization_config", {}), dict):
            raise ArtifactError(f"{artifact.path}/config.json: quantization_config is not an object")
        self.artifact, self.device, self.kernels, self.adapter = artifact, device, kernels, adapter
        self.checkpoint = artifact.checkpoint
        self.trust_remote_code = trust_remote_code
        self.stored_dtype = main_dtype(artifact.checkpoint)
        self.dtype = dtype or self.stored_dtype

    @cached_property
    def config(self) -> PretrainedConfig:
        """Config of the checkpoint; ArtifactError where transformers cannot read it."""
        return read_config(self.artifact.path, self.trust_remote_code)

    @cached_property
    def kind(self) -> Kind:
        """What the checkpoint is."""
        return model_kind(self.config)

    @cached_property
    def _skeleton(self) -> tuple[PreTrainedModel, frozenset[str]]:
        return self.build_skeleton()

    def build_skeleton(self) -> tuple[PreTrainedModel, frozenset[str]]:
        """A skeleton with its compressed modules, and their names."""
        names = self.artifact.checkpoint.names()
        module = build_skeleton(self.config, self.stored_dtype, bool(self.trust_remote_code), names)
        compressed = install_compressed(module, self.artifact.config, names)
        if self.kernels == "reference":
            leave_products(module)
        if not compressed and self.kernels not in ("auto", "fast", "reference"):
            raise RequestError(f"kernels {self.kernels!r} fits no layer: {self.artifact.path} is not compressed")
        return module, compressed

    @property
    def module(self) -> PreTrainedModel:
        """The skeleton (parameters on meta), compressed modules installed."""
        return self._skeleton[0]

    @property
    def compressed(self) -> frozenset[str]:
        """Names of the compressed modules; empty for a plain checkpoint."""
        return self._skeleton[1]

    def reset(self) -> None:
        """A fresh skeleton, when it is next asked for."""
        self.__dict__.pop("_skeleton", None)

    def build(self) -> TorchEngine:
        """The engine of a causal language model, its weights in memory."""
        from runtime.engines.torch.engine import TorchEngine

        return TorchEngine(self.build_module(), self.device)

    def build_module(self) -> PreTrainedModel:
        """Read the artifact's tensors into memory and lay them out for the kernels."""
        module, compressed = self._skeleton
        module = fill(module, self.checkpoint, self.dtype, self.device, compressed, bool(self.trust_remote_code))
        to_device(module, self.device)
        if compressed:
            from runtime.layers.compressed_linear import prepare_all

            if self.dtype != self.stored_dtype:
                for name in compressed:
                    module.get_submodule(name).to(self.dtype)
            prepare_all(module, self.kernels)
            return_memory()
        return self.complete(module)

    def complete(self, module: PreTrainedModel) -> PreTrainedModel:
        """A module whose weights are there, with the adapter in it."""
        return module if self.adapter is None else add_adapter(module, self.adapter)
