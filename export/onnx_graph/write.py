"""Writer of ONNX graphs: traced with marks, the marks replaced by what a dialect says for them, weights written one by one.

A decoder is one graph; an encoder-decoder is three, which share one file of weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.onnx_graph.attention import why_not_grouped, write_attention, write_grouped
from export.onnx_graph.builder import Builder, fixed
from export.onnx_graph.dialect import Dialect
from export.onnx_graph.linear import groups, joined, write_embedding, write_linear, write_together
from export.onnx_graph.marks import DOMAIN
from export.onnx_graph.matmul_nbits import ACCURACY_LEVEL, MICROSOFT, unmark
from export.onnx_graph.store import DataFile, Store
from export.onnx_graph.trace import STATES, strip, trace_decoder, trace_encoder, trace_seq2seq
from export.source import dtype_name
from export.target import Job
from runtime.errors import CompressError
from runtime.modeling.skeleton import model_kind

if TYPE_CHECKING:
    import onnx_ir

DATA = "model.onnx.data"
IR_VERSION = 10  # the first with INT4 and opset 21; newer ones are refused by older runtimes


def write_graphs(job: Job, dialect: Dialect) -> dict[str, Any]:
    """Write `model.onnx`, or `encoder.onnx`, `cross.onnx` and `decoder.onnx`, and `model.onnx.data` into `job.folder`.

    Returns:
        Facts about the graphs for `export.json`.

    Raises:
        RequestError: a weight cannot be said in the dialect. CompressError: the model cannot be traced.
    """
    kind, graphs = model_kind(job.source.config), {}
    job.progress.phase("tracing the model", 1)
    if kind == "encoder-decoder":
        graphs = trace_seq2seq(job.source, dialect.dtype)
    else:
        graphs["model"] = (trace_decoder if kind == "decoder" else trace_encoder)(job.source, dialect.dtype)
    job.progress.step()
    reason: str | None = "attention is as transformers traced it"
    if kind == "decoder" and dialect.own_operators:
        traced = graphs["model"].graph
        marks = [node for node in traced if node.domain == DOMAIN and node.op_type == "Attention"]
        reason = why_not_grouped(marks, {str(value.name): value for value in traced.inputs}) if marks else reason
    data = DataFile(job.folder, DATA)
    products = {f"{name}.onnx": replace_marks(job, graphs[name], dialect, data, reason is None) for name in graphs}
    data.close()
    if reason is None:
        _share_cache(graphs["model"].graph)
    facts = {
        "kind": kind,
        "dialect": dialect.name,
        "opset": dialect.opset,
        "dtype": dtype_name(dialect.dtype),
        **(_decoder_facts(job, graphs["model"].graph, dialect, reason) if kind == "decoder" else _facts(job, graphs)),
        "compressed": products["model.onnx"] if kind == "decoder" else products,
    }
    for name, graph in graphs.items():
        save(job, graph, f"{name}.onnx", facts)
    return facts


def _decoder_facts(job: Job, graph: onnx_ir.Graph, dialect: Dialect, reason: str | None) -> dict[str, Any]:
    caches = _shapes(graph.inputs, "past_key_values")
    return {
        "layers": len(caches),
        "cache": caches,  # [heads, size] of each layer
        "vocab_size": _width(graph, "logits"),
        "context_length": getattr(job.source.config.get_text_config(), "max_position_embeddings", None),
        "inputs": [str(value.name) for value in graph.inputs],
        "shared_cache": reason is None,
        "grouped_query_attention": reason is None or reason,
        "accuracy_level": ACCURACY_LEVEL if dialect.own_operators else None,
    }


def _facts(job: Job, graphs: dict[str, onnx_ir.Model]) -> dict[str, Any]:
    """Of an encoder, or of an encoder-decoder."""
    from runtime.engines.torch.encoder import position_limit

    encoder = graphs.get("model") or graphs["encoder"]
    facts: dict[str, Any] = {
        "vocab_size": int(job.source.skeleton.get_input_embeddings().num_embeddings),  # type: ignore[union-attr, arg-type]
        "context_length": position_limit(job.source.skeleton),
        "inputs": [str(value.name) for value in (graphs.get("decoder") or encoder).graph.inputs],
        "hidden_size": _width(encoder.graph, STATES),
    }
    if "decoder" in graphs:
        outputs = graphs["decoder"].graph.outputs
        facts["vocab_size"] = _width(graphs["decoder"].graph, "logits")
        facts |= {"cache": _shapes(outputs, "present"), "cross": _shapes(graphs["cross"].graph.outputs, "cross")}
    return facts


def _width(graph: onnx_ir.Graph, name: str) -> int:
    return fixed(next(value.shape[-1] for value in graph.outputs if value.name == name and value.shape is not None))


def _shapes(values: Iterable[onnx_ir.Value], prefix: str) -> list[list[int]]:
    """`[heads, size]` of every layer's keys."""
    keys: list[Any] = [v for v in values if str(v.name).startswith(f"{prefix}.") and str(v.name).endswith(".key")]
    return [[fixed(value.shape[1]), fixed(value.shape[3])] for value in keys]


def replace_marks(job: Job, traced: onnx_ir.Model, dialect: Dialect, data: DataFile, grouped: bool = False) -> int:
    """Everything that a traced graph only stands for becomes operators and constants; returns how many products read integer codes.

    Args:
        data: where large constants go.
        grouped: attention becomes ONNX Runtime's GroupQueryAttention.
    """
    store = Store(traced, data)
    marks = [node for node in traced.graph if node.domain == DOMAIN]
    job.progress.phase("writing weights", len(marks))
    shared: dict[Any, Any] = {}
    products = fusible(job, marks)
    together = groups(job, marks) if dialect.own_operators else {}
    done: set[onnx_ir.Node] = set()
    for mark in marks:
        if mark in done:
            continue
        members = together.get(mark, [mark])
        modules = [member.attributes.get_string("module", "") for member in members]
        builder = Builder(store, mark, joined(modules) or str(mark.name))
        first = mark.inputs[0]
        assert first is not None
        if mark in together:
            values = write_together(builder, job, modules, first, dialect)
            products -= len(members) - 1
        elif mark.op_type == "Linear":
            values = [write_linear(builder, job, modules[0], first, dialect)]
        elif mark.op_type == "Embedding":
            values = [write_embedding(builder, job, modules[0], first, dialect)]
        elif grouped:
            values = [write_grouped(builder, mark, dialect, shared)]
        else:
            values = [write_attention(builder, mark, dialect, shared)]
        for member, module, value in zip(members, modules, values, strict=True):
            builder.replace(member, value)
            job.progress.step(module)
        done.update(members)
    _tidy(traced, dialect)
    store.move()
    return products


def save(job: Job, model: onnx_ir.Model, file: str, facts: dict[str, Any]) -> None:
    """The graph alone; its large constants are in their file already."""
    import onnx_ir as ir

    model.metadata_props["compress.model"] = json.dumps(facts)
    model.metadata_props["compress.sparse"] = json.dumps(sparse_modules(job))
    ir.save(model, str(job.folder / file))
    if MICROSOFT in model.opset_imports:
        _forget_shapes(job.folder / file)


def _forget_shapes(path: Path) -> None:
    """Some of the shapes that fusions leave are those of what they replaced; they are inferred anew by whoever wants them."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    del model.graph.value_info[:]
    onnx.save(model, str(path))


def sparse_modules(job: Job) -> list[str]:
    """Modules whose weights have at least two zeros in every four consecutive inputs."""
    return [name for name, entry in job.source.entries.items() if entry.scheme.sparsity in ("1:4", "2:4")]


def _tidy(model: onnx_ir.Model, dialect: Dialect) -> None:
    """Drop what nothing reads any more, merge what is computed twice, and declare the operators used."""
    from onnx_ir.passes import common

    if any(node.domain == MICROSOFT for node in model.graph.all_nodes()):
        model.opset_imports[MICROSOFT] = 1
    if dialect.own_operators:
        from transformers.exporters.onnxruntime_fusions import fuse_for_onnxruntime

        fuse_for_onnxruntime(model, "cpu")  # norms and rotary embeddings
        unmark(model)
    if dialect.name == "onnx":
        _without_relu(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    model.opset_imports.pop(DOMAIN, None)
    model.opset_imports[""] = dialect.opset
    if any(node.domain == MICROSOFT for node in model.graph.all_nodes()):
        model.opset_imports[MICROSOFT] = 1
    known = ("", MICROSOFT)
    left = sorted(f"{node.domain}::{node.op_type}" for node in model.graph.all_nodes() if node.domain not in known)
    if left:
        raise CompressError(f"the graph still holds {left[0]}, which is no ONNX operator")
    common.TopologicalSortPass()(model)
    strip(model)
    model.ir_version = IR_VERSION
    model.producer_name = "compress"


def _without_relu(model: onnx_ir.Model) -> None:
    """max(x, 0) after a product with a compressed weight: ONNX Runtime 1.31 does not fuse the weight into a product that Relu follows."""
    import numpy
    import onnx_ir as ir

    graph = model.graph
    for node in [node for node in graph if node.op_type == "Relu" and node.domain == ""]:
        value = node.inputs[0]
        producer = None if value is None else value.producer()
        if producer is None or producer.op_type not in ("MatMul", "Add") or value is None or value.dtype is None:
            continue
        name = f"zero.{value.dtype.name}"
        if name not in graph.initializers:
            zero = ir.tensor(numpy.zeros((), dtype=value.dtype.numpy()), name=name)
            graph.register_initializer(
                ir.Value(name=name, const_value=zero, shape=ir.Shape([]), type=ir.TensorType(value.dtype))
            )
        node.op_type = "Max"
        node.resize_inputs(2)
        node.replace_input_with(1, graph.initializers[name])
        node.outputs[0].name = f"{node.outputs[0].name}.max"


def _share_cache(graph: onnx_ir.Graph) -> None:
    """Grouped-query attention may write `present` where `past` is: both have room for more tokens than they hold."""
    import onnx_ir as ir

    for value in [*graph.inputs, *graph.outputs]:
        kind, shape = str(value.name).partition(".")[0], value.shape
        if kind in ("past_key_values", "present") and shape is not None:
            length = "capacity" if kind == "past_key_values" else "present capacity"
            value.shape = ir.Shape([shape[0], shape[1], length, shape[3]])
        elif kind == "attention_mask":
            value.shape = ir.Shape(["batch", "total"])


def fusible(job: Job, marks: Iterable[onnx_ir.Node]) -> int:
    """How many products of a graph have integer codes, which the runtime reads as they are."""
    count = 0
    for mark in marks:
        entry = job.source.entries.get(mark.attributes.get_string("module", "")) if mark.op_type == "Linear" else None
        count += entry is not None and entry.scheme.grid is not None and entry.scheme.grid.type == "int"
    return count
