"""Writes api.json: names, arguments, properties and enum members of TensorRT's real Python bindings.

`python tests/fake_tensorrt/make_api.py` where `tensorrt_bindings` can be imported; `real.py` says how that is possible without the
libraries and without a GPU.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).with_name("api.json")


def describe(trt: Any) -> dict[str, Any]:
    """`{version, enums: {name: [member]}, classes: {name: {bases, properties, methods: {name: [overload]}}}}`.

    An overload is `{"arguments": [[name, has a default]], "returns": type}`, without self; None stands for a method whose
    documentation has no signature.
    """
    enums, classes = {}, {}
    for name, value in vars(trt).items():
        if not isinstance(value, type) or name.startswith("_"):
            continue
        if hasattr(value, "__members__"):
            enums[name] = list(value.__members__)
        else:
            classes[name] = _describe_class(value)
    aliases = {name: str(getattr(trt, name)) for name in vars(trt) if isinstance(getattr(trt, name), trt.DataType)}
    return {"version": trt.__version__, "enums": enums, "classes": classes, "aliases": aliases}


def _describe_class(owner: type) -> dict[str, Any]:
    properties, methods = [], {}
    for name in dir(owner):
        if name.startswith("_") and name != "__init__":
            continue
        value = getattr(owner, name)
        if isinstance(value, property):
            properties.append(name)
        elif callable(value):
            methods[name] = signatures(name, value.__doc__)
    bases = [base.__name__ for base in owner.__mro__[1:] if base.__module__.startswith("tensorrt")]
    return {"bases": bases, "properties": properties, "methods": methods}


def signatures(name: str, documentation: str | None) -> list[dict[str, Any]] | None:
    """The overloads that pybind11 wrote into a docstring."""
    lines = (documentation or "").splitlines()
    found = [line for line in lines if re.match(rf"(\d+\. )?{re.escape(name)}\(", line)]
    overloads = [line for line in found if "*args, **kwargs" not in line]
    return [_signature(line) for line in overloads] or None


def _signature(line: str) -> dict[str, Any]:
    inside, _, returns = line.partition("(")[2].rpartition(" -> ")
    depth, part, parts = 0, "", []
    for letter in inside.rstrip(")"):
        depth += letter in "[(<"
        depth -= letter in "])>"
        if letter == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += letter
    parts.append(part)
    arguments = []
    for text in (p.strip() for p in parts if p.strip()):
        argument = text.split(":")[0].strip()
        if argument != "self" and not text.startswith("*"):
            arguments.append([argument, " = " in text])
    return {"arguments": arguments, "returns": returns.strip().rpartition(".")[2]}


if __name__ == "__main__":
    import tensorrt_bindings

    OUTPUT.write_text(
        json.dumps(describe(tensorrt_bindings), indent=None, sort_keys=True).replace('}, "', '},\n"') + "\n"
    )
