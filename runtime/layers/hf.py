"""transformers integration: `AutoModelForCausalLM.from_pretrained` for artifacts with quant_method `compress`.

Importing this module registers it; `import runtime` is enough (see `runtime.layers.hook`). Weights stay packed; the kernels are
those of `runtime.load`. Artifacts that use compressed-tensors formats only say so in their config and are loaded by the
compressed-tensors package, unless `from_pretrained` is given a `CompressConfig`. Adapters are trained beside the packed weights.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    AutoHfQuantizer,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from runtime.checkpoint.guard import GUARDS, NOTICE, guards, is_guard
from runtime.checkpoint.headers import read_header
from runtime.config.dtypes import dtype_name
from runtime.config.messages import did_you_mean
from runtime.errors import ArtifactError, RequestError
from runtime.formats.quantization_config import OWN_METHOD, SHARED_METHOD, ModuleEntry, refuse_prefix
from runtime.kernels import check_name
from runtime.layers.compressed_linear import CompressedLinear, install, prepare_all
from runtime.layers.compressed_module import CompressedModule
from runtime.layers.install import entries_of
from runtime.modeling.tensor_names import Published
from runtime.system.describe import integer, show


class CompressConfig(QuantizationConfigMixin):
    """How `from_pretrained` loads an artifact, and the `quantization_config` of one.

    `from_pretrained(path, quantization_config=CompressConfig(kernels="reference"))` reads own formats and those of compressed-tensors,
    and keeps both packed.

    Args:
        kernels: "auto", "fast" or a kernel's name, as `runtime.load`'s.
        threads: CPU threads of torch, for the whole process; None leaves them as they are.
        content: what config.json says; a user need not repeat it, and cannot change it.
    """

    def __init__(
        self, quant_method: str = OWN_METHOD, *, kernels: str = "auto", threads: int | None = None, **content: Any
    ) -> None:
        self.quant_method = OWN_METHOD  # type: ignore[assignment]
        self.kernels, self.threads = kernels, threads
        self.content = {"quant_method": quant_method, **content}

    def to_dict(self) -> dict[str, Any]:
        """`quantization_config` as in config.json, word for word."""
        return copy.deepcopy(self.content)

    def to_diff_dict(self) -> dict[str, Any]:
        """All of `to_dict`: no value is a default."""
        return self.to_dict()

    def of_checkpoint(self, stored: Any) -> CompressConfig:
        """The `quantization_config` of a checkpoint (a mapping, or transformers' object of it), loaded as this one says.

        Raises:
            RequestError: another method than ours or compressed-tensors, or a value that differs from the checkpoint's.
        """
        stored = dict(stored) if isinstance(stored, Mapping) else stored.to_dict()
        method = stored.get("quant_method")
        if method not in (OWN_METHOD, SHARED_METHOD):
            raise RequestError(
                f"CompressConfig loads {OWN_METHOD} and {SHARED_METHOD} checkpoints; this one says quant_method {method!r}"
            )
        for name, value in self.content.items():
            if name not in stored:
                raise RequestError(f"CompressConfig has no option {name!r}{did_you_mean(name, ('kernels', 'threads'))}")
            if name != "quant_method" and stored[name] != value:
                raise RequestError(
                    f"CompressConfig: {name} is {show(stored[name])} in the checkpoint, not {show(value)}; "
                    "only kernels and threads can be chosen when it is loaded"
                )
        return CompressConfig(**{**stored, "kernels": self.kernels, "threads": self.threads})


class CompressHfQuantizer(HfQuantizer):
    """Puts empty compressed modules into the model before its weights are read, and prepares their kernels after."""

    requires_calibration = True
    quantization_config: CompressConfig

    def __init__(self, quantization_config: CompressConfig, **kwargs: Any) -> None:
        if not kwargs.get("pre_quantized", True):
            raise RequestError("CompressConfig loads what `compress apply` has made; this checkpoint is not compressed")
        super().__init__(quantization_config, **kwargs)

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Raise `RequestError` where `device_map` offloads to disk, or what the config asks for does not exist."""
        device_map = kwargs.get("device_map")
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise RequestError("a compressed model cannot be offloaded to disk; its weights are small, use cpu instead")
        check_name(self.quantization_config.kernels)
        if self.quantization_config.threads is not None:
            torch.set_num_threads(integer(1)("threads", self.quantization_config.threads))

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        files = kwargs.get("checkpoint_files") or []
        files[:] = [file for file in files if Path(file).name != GUARDS]  # it has done its duty, and is not read
        headers = [read_header(Path(file)) for file in files if str(file).endswith(".safetensors")]
        tensors = {name: entry for header in headers for name, entry in header.tensors.items()}
        stored = [name for name, entry in tensors.items() if not is_guard(entry.shape, entry.dtype)]
        entries = entries_of(model, self.quantization_config.to_dict(), stored)
        refuse_prefix(
            self.quantization_config.to_dict(), "transformers cannot run this checkpoint, load it with runtime.load"
        )
        if type(model).__name__ not in (model.config.architectures or [type(model).__name__]):
            entries = _shared_with(model, entries, stored)
        install(model, entries)
        # Those that `save_pretrained` has written are among the weights, and would be reported as unexpected.
        known = model._keys_to_ignore_on_load_unexpected or set()
        passed = "|".join(map(re.escape, [*_guarded(model), NOTICE]))
        model._keys_to_ignore_on_load_unexpected = {*known, f"^(?:{passed})$"}
        self._published, self._layers = Published(model), [(name, model.get_submodule(name)) for name in entries]
        for module in model.modules():
            if isinstance(module, CompressedLinear):
                module.filling = True
            # Who initialises the layers in it by name (GPT-2, Switch Transformers) would look for weights that compressed ones do not have.
            own = [*module._parameters.values(), *module._buffers.values()]
            # A model as a whole may compute something for its parts (Falcon-H1).
            parts = module.children() if hasattr(module, "_init_weights") else module.modules()
            if not own and any(isinstance(part, CompressedModule) for part in parts):
                module._is_hf_initialized = True  # type: ignore[assignment]

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """transformers' own but for those that put experts together, and after them what experts' layers are called that stay apart.

        transformers 5.10 names no model.
        """
        from transformers.core_model_loading import WeightRenaming

        published = getattr(self, "_published", None)
        if published is None:
            return weight_conversions
        names = published.layer_names()
        return [
            *(conversion for conversion in weight_conversions if not published.joins_apart(conversion)),
            *(WeightRenaming(rf"\.(\d+)\.{re.escape(old)}\.", rf".\1.{new}.") for old, new in names.items()),
        ]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, module in model.named_modules():
            if isinstance(module, CompressedModule):
                _require_loaded(name, module)
        prepare_all(model, self.quantization_config.kernels)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """What `save_pretrained` writes: the stored tensors, and guards against readers that do not know them."""
        return model.state_dict() | guards(_guarded(model)), {}

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        """Replace every compressed module by a dense one (`model.dequantize()`). `dtype` may be its name, as in
        configs.
        """
        dtype = getattr(torch, dtype_name(dtype)) if isinstance(dtype, str) else dtype
        for name, module in list(model.named_modules()):
            if isinstance(module, CompressedModule):
                model.set_submodule(name, module.dense(dtype))
        return model

    def is_serializable(self) -> bool:
        """Compressed models can be saved; RequestError where an adapter was merged into one, so that a part is dense."""
        dense = [name for name, layer in self._layers if not isinstance(layer, CompressedModule)]
        if dense:
            raise RequestError(
                f"{len(dense)} layers are dense since an adapter was merged into them ({dense[0]}, ...): "
                "save model.dequantize(), or keep the adapter beside the artifact"
            )
        return True

    @property
    def is_trainable(self) -> bool:
        """Gradients go through the layers, so adapters beside them can be trained; compressed weights stay as they are."""
        return True


def _shared_with(model: Any, entries: dict[str, ModuleEntry], stored: Collection[str]) -> dict[str, ModuleEntry]:
    """Of a checkpoint's entries those that a model of another class has too (a classifier on a language model's blocks)."""
    prefix, modules = f"{model.base_model_prefix}.", {name for name, _ in model.named_modules()}
    held = {name.rpartition(".")[0] for name in stored}
    found = {}
    for name, entry in entries.items():
        names = (name, name.removeprefix(prefix), prefix + name)
        own = next((each for each in names if each in modules), None)
        if own is not None and held.intersection(names):
            found[own] = entry
    return found


def _guarded(model: Any) -> list[str]:
    """Names of weights that plain readers look for and that packed layers do not have."""
    packed = ((name, module) for name, module in model.named_modules() if isinstance(module, CompressedModule))
    return [f"{name}.weight" for name, module in packed if "weight" not in module.state_dict(keep_vars=True)]


def _require_loaded(name: str, module: CompressedModule) -> None:
    """transformers only warns of tensors a checkpoint lacks, and leaves memory as it found it in their place."""
    tensors = module.state_dict(keep_vars=True)
    missing = sorted(key for key, value in tensors.items() if not getattr(value, "_is_hf_initialized", False))
    if missing:
        raise ArtifactError(f"tensor {name}.{missing[0]} is missing from the checkpoint")


def _honour_ours(merge: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' merge of a user's config with the checkpoint's. It takes options of its own classes only, so ours is merged here."""

    def merged(stored: Any, asked: Any) -> Any:
        return asked.of_checkpoint(stored) if isinstance(asked, CompressConfig) else merge(stored, asked)

    return merged


if OWN_METHOD not in AUTO_QUANTIZER_MAPPING:
    merge = AutoHfQuantizer.merge_quantization_configs
    AutoHfQuantizer.merge_quantization_configs = staticmethod(_honour_ours(merge))  # type: ignore[method-assign]
    register_quantization_config(OWN_METHOD)(CompressConfig)
    register_quantizer(OWN_METHOD)(CompressHfQuantizer)
