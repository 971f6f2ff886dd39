"""A transformers model without its weights: built on the meta device, with the buffers that no checkpoint stores made real.

Both sides use it: the runtime fills it with an artifact's tensors, the offline pipeline fills it one block at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from runtime.errors import ArtifactError, CompressError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def read_config(path: str | Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """The checkpoint's config, or ArtifactError when transformers does not know or cannot read it."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, TypeError, AttributeError, StrictDataclassError) as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ArtifactError(
                f"{path} needs Python code of its own to run (auto_map in config.json): read it, then allow it with "
                "trust_remote_code"
            ) from error
        # A validation error says which check failed; what was wrong is in its cause.
        detail = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
        raise ArtifactError(f"{path}/config.json cannot be used: {_first_line(detail)}") from error


def build_skeleton(config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """The causal language model of `config`, in eval mode: parameters on meta, non-persistent buffers computed on the CPU.

    A `quantization_config` in `config` is ignored here (a copy of the config is used): installing compressed modules is the
    caller's next step.
    """
    import copy

    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, RuntimeError, TypeError, ZeroDivisionError) as error:
        raise ArtifactError(
            f"config.json describes no causal language model that can be built: {_first_line(error)}"
        ) from error
    model.eval()
    model.requires_grad_(False)
    materialise_buffers(model)
    return model


def materialise_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint stores (rotary frequencies, ...) the way `from_pretrained` does.

    The initialiser is run over two different fillings; a buffer that keeps a trace of the filling was not initialised, and
    using it would be silent corruption, so that is an error.
    """
    for name, module in model.named_modules():
        missing = [b for b in module._non_persistent_buffers_set if _on_meta(module, b)]
        if not missing:
            continue
        results: list[dict[str, torch.Tensor]] = []
        for fill in (0, 1):
            for buffer in missing:
                meta = module._buffers[buffer]
                assert meta is not None
                module._buffers[buffer] = torch.full_like(meta, fill, device="cpu")
            with torch.no_grad():
                model._init_weights(module)
            results.append({b: module._buffers[b].clone() for b in missing})  # type: ignore[union-attr]
        for buffer in missing:
            if not torch.equal(results[0][buffer], results[1][buffer]):
                raise CompressError(
                    f"buffer {name}.{buffer} is not stored in the checkpoint and transformers cannot recompute it"
                )


def _on_meta(module: nn.Module, buffer: str) -> bool:
    value = module._buffers.get(buffer)
    return value is not None and value.device.type == "meta"


def set_tensor(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Put `value` where parameter or buffer `name` is (shapes must match: the caller checked them)."""
    parent_name, _, leaf = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    if leaf in parent._parameters:
        parent._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    elif leaf in parent._buffers:
        parent._buffers[leaf] = value
    else:
        raise ArtifactError(f"the model has no parameter or buffer {name}")


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """{tied parameter: the parameter it shares}, empty when the config does not tie."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def find_blocks(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The repeated transformer blocks: the ModuleList with the most parameters, and its qualified name."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    best: tuple[int, str, nn.ModuleList] | None = None
    prefix = next((n for n, m in model.named_modules() if m is decoder), "")
    for name, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 0:
            size = sum(p.numel() for p in module.parameters())
            if best is None or size > best[0]:
                best = (size, f"{prefix}.{name}" if prefix else name, module)
    if best is None:
        raise CompressError(
            f"{type(model).__name__} has no list of repeated blocks, so it cannot be compressed block by block"
        )
    return best[1], best[2]


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """{name: (out_features, in_features)} of every nn.Linear."""
    return {n: (m.out_features, m.in_features) for n, m in model.named_modules() if isinstance(m, nn.Linear)}


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
