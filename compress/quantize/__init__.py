"""Quantization methods, one file each; a new one is a file and a line in `METHODS`."""

from __future__ import annotations

from compress.method import Method
from compress.quantize import gptq, rtn
from compress.quantize.config import QuantizeConfig
from compress.quantize.presets import PRESETS, check_fits, resolve_scheme

METHODS: dict[str, Method] = {module.METHOD.name: module.METHOD for module in (rtn, gptq)}

__all__ = ["METHODS", "PRESETS", "QuantizeConfig", "check_fits", "resolve_scheme"]
