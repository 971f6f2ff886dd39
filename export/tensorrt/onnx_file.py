"""ONNX file in TensorRT's dialect: written, and checked against every rule before an engine is built from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from export.onnx_graph.dialect import dialect
from export.onnx_graph.write import sparse_modules, write_graphs
from export.source import Source, dtype_name
from export.target import Job
from export.tensorrt.bundle import ONNX, Build
from export.tensorrt.profiles import limits, read_model
from export.tensorrt.proof import changed_modules, precision
from export.tensorrt.support import conversions, expressible
from runtime.errors import CompressError, RequestError

#: torch name -> TensorRT's `DataType` member.
TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16"}


def write_onnx(job: Job, folder: Path) -> Build:
    """Write the ONNX file into `folder`; what `build.json` says of it, without profiles and hashes.

    Raises:
        RequestError: the artifact cannot be said in the dialect. CompressError: the file breaks a rule of TensorRT's or ONNX's.
    """
    source, options = job.source, job.options
    name = options.dtype or dtype_name(source.dtype)
    if name not in TYPES:
        raise RequestError(f"the artifact computes in {name}; choose one of {', '.join(TYPES)} with option dtype")
    facts = write_graphs(
        replace(job, source=expressible(source), folder=folder), dialect("tensorrt", getattr(torch, name))
    )
    model = read_model(source)
    odd = next((c for c in facts["cache"] if c != [model.kv_heads, model.head_dim]), None)
    if odd is not None or facts["layers"] != model.layers:
        raise RequestError(f"{source.path} has layers with caches of different shapes ({odd})")
    # Checked here and not in the proof: an engine built at once, and a bundle without proof, are read by TensorRT just the same.
    return Build(
        options=options,
        dtype=TYPES[name],  # type: ignore[arg-type]
        sparse=sparse_modules(job),
        artifact=source.describe(),
        conversions=conversions(source, options),
        losses=job.losses,
        changed=bool(changed_modules(job)),
        rounds_inputs=precision(source, TYPES[name]).rounds_inputs,
        rules=check_model(folder / ONNX),
        model=model,
        limits=limits(options, model),
    )


def check_model(path: Path) -> int:
    """The rules and ONNX's checker over an ONNX file; returns how many rules held.

    Raises:
        CompressError: a rule is broken, or the file is no valid ONNX.
    """
    import onnx

    from export.tensorrt.rules import check

    broken, count = check(path)
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise CompressError(f"TensorRT would refuse {path.name}: {broken[0].sentence()}{more}")
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise CompressError(f"{path.name} is not valid ONNX: {str(error).splitlines()[0]}") from error
    return count


def bytes_needed(source: Source, dtype: str | None) -> int:
    """Bytes of the ONNX file and of what lies beside it for a while: its float32 twin, or the plan."""
    width = 4 if (dtype or dtype_name(source.dtype)) == "float32" else 2
    codes, dense = 0.0, 0
    for name, (rows, columns) in source.shapes.items():
        entry = source.entries.get(name)
        weights = None if entry is None or name in source.embeddings else entry.scheme.grid
        if weights is None:
            dense += rows * columns
        else:
            codes += rows * columns * (1 if weights.bits > 4 else 0.6)  # with a scale for every 64
    onnx = max(source.bytes, int(codes + dense * width))
    return int((onnx + max(onnx, codes + dense * 4)) * 1.1) + (64 << 20)
