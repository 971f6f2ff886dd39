"""The three dialects of ONNX that are written, and the options that choose one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from export.onnx_graph.grid import ONNX, TENSORRT, Rules
from export.target import Options
from runtime.formats.scheme import Scheme


class OnnxOptions(Options):
    """Options of `--target onnx`."""

    ort: bool = False
    """ONNX Runtime's own operators (MatMulNBits, GroupQueryAttention, ...) instead of standard ones."""
    dtype: Literal["float32", "float16"] = "float32"
    """Activations and logits. CPUs compute float32; float16 is for GPUs."""


@dataclass(frozen=True)
class Dialect:
    """How a graph is spoken.

    Attributes:
        name: `onnx`: standard operators that ONNX Runtime fuses; `ort`: ONNX Runtime's own operators; `tensorrt`: what TensorRT's
            parser takes.
        opset: of the default domain.
        dtype: activations and logits.
        rules: of weights.
        own_operators: operators of `com.microsoft` are used.
    """

    name: Literal["onnx", "ort", "tensorrt"]
    opset: int
    dtype: torch.dtype
    rules: Rules
    own_operators: bool


def dialect(name: Literal["onnx", "ort", "tensorrt"], dtype: torch.dtype) -> Dialect:
    """The dialect of that name with activations in `dtype`."""
    if name == "tensorrt":
        return Dialect(name, 23, dtype, TENSORRT, False)
    return Dialect(name, 21, dtype, ONNX, name == "ort")


def dialect_of(options: OnnxOptions) -> Dialect:
    """What the options ask for."""
    return dialect("ort" if options.ort else "onnx", getattr(torch, options.dtype))


def multiplies_integers(scheme: Scheme) -> bool:
    """Whether the layer's product can be one of int8 codes: both sides are, and neither scale changes along the sum."""
    weights, acts = scheme.grid, scheme.activations
    if weights is None or acts is None or weights.type != "int" or acts.type != "int":
        return False
    one_scale = weights.symmetric and weights.strategy != "group"
    return one_scale and weights.bits > 4 and (acts.symmetric or not acts.dynamic)


def layer_rules(scheme: Scheme, spoken: Dialect) -> Rules:
    """The rules of the dialect, without blocks of 8-bit codes where the layer multiplies integers.

    The writer and what is said before writing both ask here, so that nothing is announced that is not done.
    """
    return replace(spoken.rules, blocked_int8=False) if multiplies_integers(scheme) else spoken.rules


def fast_name(file: str) -> str:
    """The second graph beside `file`, whose products may round activations to int8 (`kernels="fast"`)."""
    return f"{file.removesuffix('.onnx')}_fast.onnx"
