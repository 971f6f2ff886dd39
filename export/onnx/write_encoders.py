"""Encoders and encoder-decoders as ONNX files that share one file of weights."""

from __future__ import annotations

from typing import Any

from export.onnx.dialect import Dialect
from export.onnx.store import DataFile
from export.onnx.trace_encoders import STATES, trace_encoder, trace_seq2seq
from export.onnx.write import DATA, FILE, number, replace_marks, save
from export.target import Job

ENCODER, CROSS, DECODER = "encoder.onnx", "cross.onnx", "decoder.onnx"


def write_encoder(job: Job, dialect: Dialect) -> dict[str, Any]:
    """`model.onnx`: `input_ids`, `attention_mask` (and `token_type_ids`) in, `last_hidden_state` out."""
    job.progress.phase("tracing the model", 1)
    traced = trace_encoder(job.source, dialect.dtype)
    job.progress.step()
    data = DataFile(job.folder, DATA)
    products = replace_marks(job, traced, dialect, data)
    data.close()
    facts = _common(job, dialect, "encoder") | {
        "inputs": [str(value.name) for value in traced.model.graph.inputs],
        "hidden_size": _width(traced, STATES),
        "compressed": {FILE: products},
    }
    save(job, traced.model, FILE, facts)
    return facts


def write_seq2seq(job: Job, dialect: Dialect) -> dict[str, Any]:
    """`encoder.onnx`, `cross.onnx` and `decoder.onnx`; see `export.onnx.trace_encoders.trace_seq2seq`."""
    job.progress.phase("tracing the model", 1)
    traced = trace_seq2seq(job.source, dialect.dtype)
    job.progress.step()
    data = DataFile(job.folder, DATA)
    products = {name: replace_marks(job, part, dialect, data) for name, part in traced.items()}
    data.close()
    graph = traced["decoder"].model.graph
    values: dict[str, Any] = {str(value.name): value for value in graph.outputs}
    cross: dict[str, Any] = {str(value.name): value for value in traced["cross"].model.graph.outputs}
    facts = _common(job, dialect, "encoder-decoder") | {
        "inputs": [str(value.name) for value in graph.inputs],
        "hidden_size": _width(traced["encoder"], STATES),
        "vocab_size": number(values["logits"].shape[-1]),
        "cache": _shapes(values, "present"),
        "cross": _shapes(cross, "cross"),
        "compressed": {
            file: products[name] for name, file in (("encoder", ENCODER), ("cross", CROSS), ("decoder", DECODER))
        },
    }
    for name, file in (("encoder", ENCODER), ("cross", CROSS), ("decoder", DECODER)):
        save(job, traced[name].model, file, facts)
    return facts


def _common(job: Job, dialect: Dialect, kind: str) -> dict[str, Any]:
    from runtime.engines.torch.encoder import position_limit

    table = job.source.skeleton.get_input_embeddings()
    return {
        "kind": kind,
        "dialect": dialect.name,
        "opset": dialect.opset,
        "dtype": str(dialect.dtype).removeprefix("torch."),
        "vocab_size": int(table.num_embeddings),  # type: ignore[union-attr, arg-type]
        "context_length": position_limit(job.source.skeleton),
    }


def _width(traced: Any, name: str) -> int:
    return number(next(v for v in traced.model.graph.outputs if v.name == name).shape[-1])


def _shapes(values: dict[str, Any], prefix: str) -> list[list[int]]:
    """`[heads, size]` of every layer's keys."""
    keys = [value for name, value in values.items() if name.startswith(f"{prefix}.") and name.endswith(".key")]
    return [[number(value.shape[1]), number(value.shape[3])] for value in keys]
