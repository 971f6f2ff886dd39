"""Quantization methods, one file each; a new one is a file and an argument of `registry`, or an entry point of another package."""

from __future__ import annotations

from compress.core.method import registry
from compress.quantize import awq, gptq, rtn, smoothquant
from compress.quantize.config import QuantizeConfig
from compress.quantize.presets import candidate_schemes, check_fits, resolve_scheme
from runtime.formats.presets import PRESETS

METHODS = registry("compress.quantize", rtn.METHOD, gptq.METHOD, awq.METHOD, smoothquant.METHOD)

__all__ = ["METHODS", "PRESETS", "QuantizeConfig", "candidate_schemes", "check_fits", "resolve_scheme"]
