"""transformers integration: `AutoModelForCausalLM.from_pretrained` for artifacts with quant_method `compress`.

`import runtime` is enough (see `runtime.hook`). Weights stay packed; the kernels are those of `runtime.load`.
Artifacts that use compressed-tensors formats only say so in their config and are loaded by the compressed-tensors
package instead.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from runtime.errors import ArtifactError, RequestError
from runtime.linear import install, prepare_all
from runtime.module import CompressedModule
from runtime.quantization_config import OWN_METHOD, parse


class CompressConfig(QuantizationConfigMixin):
    """The `quantization_config` of an artifact, kept word for word."""

    def __init__(self, quant_method: str = OWN_METHOD, **content: Any) -> None:
        self.quant_method = quant_method  # type: ignore[assignment]
        self.content = content

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": self.quant_method, **copy.deepcopy(self.content)}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


class CompressHfQuantizer(HfQuantizer):
    """Puts empty compressed modules into the model before its weights are read, and prepares their kernels after."""

    requires_calibration = True
    quantization_config: CompressConfig

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        device_map = kwargs.get("device_map")
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise RequestError("a compressed model cannot be offloaded to disk; its weights are small, use cpu instead")

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        install(model, parse(self.quantization_config.to_dict(), linear))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, module in model.named_modules():
            if isinstance(module, CompressedModule):
                _require_loaded(name, module)
        prepare_all(model)
        return model

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        """Replace every compressed module by a dense one (`model.dequantize()`). `dtype` may be its name, as in
        configs.
        """
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        for name, module in list(model.named_modules()):
            if isinstance(module, CompressedModule):
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, module.dense(dtype))
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def _require_loaded(name: str, module: CompressedModule) -> None:
    """transformers only warns of tensors a checkpoint lacks, and leaves memory as it found it in their place."""
    tensors = module.state_dict(keep_vars=True)
    missing = sorted(key for key, value in tensors.items() if not getattr(value, "_is_hf_initialized", False))
    if missing:
        raise ArtifactError(f"tensor {name}.{missing[0]} is missing from the checkpoint")


def register() -> None:
    """Add `compress` to the tables of transformers, once."""
    if OWN_METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(OWN_METHOD)(CompressConfig)
        register_quantizer(OWN_METHOD)(CompressHfQuantizer)
