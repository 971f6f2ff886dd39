"""Training that wins quality back after pruning and quantization. A method is one file and one line in `METHODS`."""

from __future__ import annotations

from compress.core.method import Method
from compress.distill.recover import finetune, lora, matformer
from compress.distill.recover.config import RecoverConfig

_MODULES = (finetune, lora, matformer)
METHODS: dict[str, Method] = {module.METHOD.name: module.METHOD for module in _MODULES}

__all__ = ["METHODS", "RecoverConfig"]
