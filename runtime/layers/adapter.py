"""LoRA adapters (PEFT) on top of a model's packed layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from runtime.errors import ArtifactError, RequestError, first_line
from runtime.system.distribution import how_to_install

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Module = TypeVar("Module", bound=nn.Module)


def check_adapter(path: str | Path) -> Path:
    """The directory of an adapter.

    Raises:
        RequestError: it holds none, or PEFT is not installed.
    """
    directory = Path(path)
    missing = [name for name in (CONFIG, WEIGHTS) if not (directory / name).is_file()]
    if missing:
        raise RequestError(
            f"adapter: {directory} has no {missing[0]}; it must be a directory written by PEFT's save_pretrained"
        )
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"adapter: PEFT is needed and not installed ({first_line(error)}): {how_to_install('finetune')}"
        ) from None
    return directory


def add_adapter(module: Module, directory: Path) -> Module:
    """Add the adapter to the layers of `module`, in place, and return it in evaluation mode.

    Raises:
        RequestError: a prompt-learning adapter.
        ArtifactError: a damaged adapter, or one of another model.
    """
    from peft import PeftConfig, PeftModel, set_peft_model_state_dict
    from safetensors.torch import load_file

    try:
        config: Any = PeftConfig.from_pretrained(str(directory))
        if config.is_prompt_learning:
            raise RequestError(
                f"adapter: {directory} is of type {config.peft_type.value}, which changes the prompt; only adapters of layers are supported"
            )
        config.inference_mode = True
        wrapped: Any = PeftModel(module, config)  # type: ignore[arg-type]
        found: Any = set_peft_model_state_dict(wrapped, load_file(directory / WEIGHTS))
    except RequestError:
        raise
    except Exception as error:  # PEFT, safetensors and torch raise whatever comes up
        raise ArtifactError(f"the adapter in {directory} does not fit this model: {first_line(error)}") from error
    own = [name for name, parameter in wrapped.named_parameters() if ".default." in name or name.endswith(".default")]
    lost = sorted({*found.unexpected_keys, *(set(found.missing_keys) & set(own))})
    if lost:
        raise ArtifactError(f"the adapter in {directory} does not fit this model: {lost[0]} is in only one of them")
    module.eval()
    return module
