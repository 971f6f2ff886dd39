"""Rule and the list of all rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from export.tensorrt.graph import Graph

Check = Callable[[Graph], Iterator[tuple[str, str]]]  # (where, what was found)


@dataclass(frozen=True)
class Rule:
    """`id`, what TensorRT wants, where that is said, and the check: it yields what breaks it."""

    id: str
    wants: str
    source: str
    check: Check


@dataclass(frozen=True)
class Broken:
    """A rule that a graph breaks."""

    rule: Rule
    where: str
    found: str

    def sentence(self) -> str:
        return f"{self.where} {self.found}, and {self.rule.wants} ({self.rule.id}; {self.rule.source})"


RULES: list[Rule] = []
FLOATS = {"FLOAT", "FLOAT16", "BFLOAT16"}


def rule(id: str, wants: str, source: str) -> Callable[[Check], Check]:
    """Put a check into `RULES`."""

    def add(check: Check) -> Check:
        RULES.append(Rule(id, wants, source, check))
        return check

    return add


def of(node: ir.Node) -> str:
    return f"{node.op_type} {node.name or node.outputs[0].name}"


def size(shape: tuple[int | None, ...]) -> int:
    result = 1
    for number in shape:
        result *= number or 0
    return result
