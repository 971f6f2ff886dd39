"""A stand-in for the tensorrt module: the real names and arguments (`api.json`, made from the bindings 11.4), and engines whose parsed
ONNX file ONNX Runtime computes.

It proves that the builder builds the model and that the runtime runs an engine; it says nothing about TensorRT itself.
"""

from __future__ import annotations

import enum
from types import ModuleType

from fake_tensorrt.builder import Builder, IBuilderConfig, IOptimizationProfile
from fake_tensorrt.listing import LISTING, enums, listed_class
from fake_tensorrt.network import CLASSES as NETWORK
from fake_tensorrt.parser import OnnxParser, OnnxParserRefitter
from fake_tensorrt.running import ICudaEngine, IExecutionContext, Refitter, Runtime


def module() -> ModuleType:
    """A fresh `tensorrt`."""
    trt = ModuleType("tensorrt")
    trt.__version__ = LISTING["version"]
    for name, kind in enums().items():
        setattr(trt, name, kind)
    for name, value in LISTING["aliases"].items():
        setattr(trt, name, getattr(trt.DataType, value.rpartition(".")[2]))
    for name in LISTING["classes"]:
        setattr(trt, name, listed_class(name))
    own = (
        Builder, IBuilderConfig, IOptimizationProfile, OnnxParser, OnnxParserRefitter, Runtime, ICudaEngine, IExecutionContext, Refitter,
        *NETWORK,
    )  # fmt: skip
    for kind in own:
        setattr(trt, kind.__name__, kind)
    for name in ("ILogger", "IProgressMonitor"):
        setattr(trt, name, _to_derive_from(name))
    trt.ILogger.Severity = enum.IntEnum("Severity", ["INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"], start=0)
    return trt


def _to_derive_from(name: str) -> type:
    """A class whose subclasses may only override what the real one calls."""
    called = set(LISTING["classes"][name]["methods"])

    def check(cls: type) -> None:
        odd = [n for n in vars(cls) if not n.startswith("_") and n not in called]
        assert not odd, f"{name} never calls {odd}"

    return type(name, (), {"__init__": lambda self: None, "__init_subclass__": classmethod(check)})
