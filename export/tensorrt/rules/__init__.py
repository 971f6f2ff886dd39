"""Rules of TensorRT's documentation, checked without a GPU: one function a rule.

Sources: [docs] TensorRT 11 documentation (operator reference, quantization, ONNX opset guide); [parser] onnx-tensorrt's importers
(release 10.14 and later); [#n] issues of NVIDIA/TensorRT.
"""

from __future__ import annotations

from pathlib import Path

from export.tensorrt.graph import Graph
from export.tensorrt.rules import attention, general, quantized
from export.tensorrt.rules.base import RULES, Broken, Rule

__all__ = ["RULES", "Broken", "Rule", "attention", "check", "general", "quantized"]


def check(path: Path) -> tuple[list[Broken], int]:
    """What an ONNX file breaks, and how many rules there are."""
    graph = Graph(path)
    broken = [Broken(one, where, found) for one in RULES for where, found in one.check(graph)]
    return broken, len(RULES)
