"""Quantization methods, one file each; a new one is a file and a line in `METHODS`."""

from __future__ import annotations

from compress.core.method import Method
from compress.quantize import awq, gptq, rtn, smoothquant
from compress.quantize.config import QuantizeConfig
from compress.quantize.presets import PRESETS, check_fits, resolve_scheme

METHODS: dict[str, Method] = {module.METHOD.name: module.METHOD for module in (rtn, gptq, awq, smoothquant)}

__all__ = ["METHODS", "PRESETS", "QuantizeConfig", "check_fits", "resolve_scheme"]
