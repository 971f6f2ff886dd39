"""ONNX file in TensorRT's dialect: written, and checked against every rule before an engine is built from it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from export.source import Source
from export.target import Job
from export.tensorrt.bundle import ONNX
from export.tensorrt.model import read_model
from export.tensorrt.proof import changed_modules, precision
from export.tensorrt.support import conversions, expressible
from runtime.errors import CompressError, RequestError

#: torch name -> TensorRT's `DataType` member.
TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16"}


def write_onnx(job: Job, folder: Path) -> dict[str, Any]:
    """Write the ONNX file into `folder`; what `build.json` says besides model, limits and hashes.

    Raises:
        RequestError: the artifact cannot be said in the dialect. CompressError: the file breaks a rule of TensorRT's or ONNX's.
    """
    from export.onnx.dialect import dialect
    from export.onnx.write import write_decoder

    name = job.options.dtype or str(job.source.dtype).removeprefix("torch.")
    if name not in TYPES:
        raise RequestError(
            f"the artifact computes in {name}, and TensorRT in {', '.join(TYPES)}; choose one with option dtype"
        )
    written = replace(job, source=expressible(job.source), folder=folder)
    facts = write_decoder(written, dialect("tensorrt", getattr(torch, name)))
    model = read_model(job.source)
    odd = next((c for c in facts["cache"] if c != [model.kv_heads, model.head_dim]), None)
    if odd is not None or facts["layers"] != model.layers:
        raise RequestError(
            f"{job.source.path} has layers with caches of different shapes ({odd}), which no profile is made for"
        )
    import onnx

    # Here and not in the proof: an engine built at once, and a bundle without proof, are read by TensorRT just the same.
    rules = check_model(folder / ONNX)
    properties = onnx.load(str(folder / ONNX), load_external_data=False).metadata_props
    sparse = next((p.value for p in properties if p.key == "compress.sparse"), "[]")
    return {
        "options": job.options.model_dump(mode="json", exclude_unset=True),
        "dtype": TYPES[name],
        "sparse": json.loads(sparse),
        "artifact": job.source.describe(),
        "conversions": [asdict(c) for c in conversions(job.source, job.options)],
        "losses": job.losses,
        "changed": bool(changed_modules(job)),
        "rounds_inputs": precision(job.source, TYPES[name]).rounds_inputs,
        "rules": rules,
    }


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
    width = 4 if (dtype or str(source.dtype).removeprefix("torch.")) == "float32" else 2
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
