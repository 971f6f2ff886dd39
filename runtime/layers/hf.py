"""transformers integration: `AutoModelForCausalLM.from_pretrained` for artifacts with quant_method `compress`.

Importing this module registers it; `import runtime` is enough (see `runtime.layers.hook`). Weights stay packed; the kernels are
those of `runtime.load`. Artifacts that use compressed-tensors formats only say so in their config and are loaded by the
compressed-tensors package instead.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from runtime.checkpoint.guard import GUARDS, NOTICE, guards, is_guard
from runtime.checkpoint.headers import read_header
from runtime.errors import ArtifactError, RequestError
from runtime.formats.quantization_config import OWN_METHOD
from runtime.layers.compressed_linear import CompressedLinear, install, prepare_all
from runtime.layers.compressed_module import CompressedModule
from runtime.layers.install import entries_of
from runtime.modeling.tensor_names import Published


class CompressConfig(QuantizationConfigMixin):
    """The `quantization_config` of an artifact, word for word."""

    def __init__(self, quant_method: str = OWN_METHOD, **content: Any) -> None:
        self.quant_method = quant_method  # type: ignore[assignment]
        self.content = content

    def to_dict(self) -> dict[str, Any]:
        """`quantization_config` as in config.json."""
        return {"quant_method": self.quant_method, **copy.deepcopy(self.content)}

    def to_diff_dict(self) -> dict[str, Any]:
        """All of `to_dict`: no value is a default."""
        return self.to_dict()


class CompressHfQuantizer(HfQuantizer):
    """Puts empty compressed modules into the model before its weights are read, and prepares their kernels after."""

    requires_calibration = True
    quantization_config: CompressConfig

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Raise `RequestError` where `device_map` offloads to disk."""
        device_map = kwargs.get("device_map")
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise RequestError("a compressed model cannot be offloaded to disk; its weights are small, use cpu instead")

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        files = kwargs.get("checkpoint_files") or []
        files[:] = [file for file in files if Path(file).name != GUARDS]  # it has done its duty, and is not read
        headers = [read_header(Path(file)) for file in files if str(file).endswith(".safetensors")]
        entries = {name: entry for header in headers for name, entry in header.tensors.items()}
        stored = [name for name, entry in entries.items() if not is_guard(entry.shape, entry.dtype)]
        install(model, entries_of(model, self.quantization_config.to_dict(), stored))
        # Those that `save_pretrained` has written are among the weights, and would be reported as unexpected.
        known = model._keys_to_ignore_on_load_unexpected or set()
        passed = "|".join(map(re.escape, [*_guarded(model), NOTICE]))
        model._keys_to_ignore_on_load_unexpected = {*known, f"^(?:{passed})$"}
        self._published = Published(model)
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
        prepare_all(model)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """What `save_pretrained` writes: the stored tensors, and guards against readers that do not know them."""
        return model.state_dict() | guards(_guarded(model)), {}

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        """Replace every compressed module by a dense one (`model.dequantize()`). `dtype` may be its name, as in
        configs.
        """
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        for name, module in list(model.named_modules()):
            if isinstance(module, CompressedModule):
                model.set_submodule(name, module.dense(dtype))
        return model

    def is_serializable(self) -> bool:
        """Compressed models can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Compressed weights cannot be trained."""
        return False


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


if OWN_METHOD not in AUTO_QUANTIZER_MAPPING:
    register_quantization_config(OWN_METHOD)(CompressConfig)
    register_quantizer(OWN_METHOD)(CompressHfQuantizer)
