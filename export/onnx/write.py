"""Writer of ONNX graphs: traced with marks, the marks replaced by what a dialect says for them, weights written one by one.

A decoder is one graph; an encoder-decoder is three, which share one file of weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.onnx.attention import why_not_grouped, write_attention, write_grouped
from export.onnx.builder import Builder
from export.onnx.dialect import Dialect
from export.onnx.linear import groups, joined, write_embedding, write_linear, write_together
from export.onnx.marks import DOMAIN
from export.onnx.matmul_nbits import MICROSOFT, unmark
from export.onnx.store import DataFile, Store
from export.onnx.trace import strip, trace_decoder
from export.onnx.trace_encoders import STATES, trace_encoder, trace_seq2seq
from export.target import Job
from runtime.errors import CompressError

if TYPE_CHECKING:
    import onnx_ir

FILE, DATA = "model.onnx", "model.onnx.data"
ENCODER, CROSS, DECODER = "encoder.onnx", "cross.onnx", "decoder.onnx"
IR_VERSION = 10  # the first with INT4 and opset 21; newer ones are refused by older runtimes


def write_decoder(job: Job, dialect: Dialect) -> dict[str, Any]:
    """Write `model.onnx` and `model.onnx.data` into `job.folder`; returns facts about the graph for `export.json`.

    Raises:
        RequestError: a weight cannot be said in the dialect. CompressError: the model cannot be traced.
    """
    job.progress.phase("tracing the model", 1)
    traced = trace_decoder(job.source, dialect.dtype)
    job.progress.step()
    graph = traced.graph
    attention = [node for node in graph if node.domain == DOMAIN and node.op_type == "Attention"]
    reason: str | None = "attention is as transformers traced it"
    if dialect.own_operators and attention:
        reason = why_not_grouped(attention, {str(value.name): value for value in graph.inputs})
    data = DataFile(job.folder, DATA)
    products = replace_marks(job, traced, dialect, data, grouped=reason is None)
    if reason is None:
        _share_cache(graph)
    data.close()
    facts = _facts(job, traced, dialect, reason) | {"compressed": products}
    save(job, traced, FILE, facts)
    return facts


def write_encoder(job: Job, dialect: Dialect) -> dict[str, Any]:
    """`model.onnx`: `input_ids`, `attention_mask` (and `token_type_ids`) in, `last_hidden_state` out."""
    job.progress.phase("tracing the model", 1)
    traced = trace_encoder(job.source, dialect.dtype)
    job.progress.step()
    data = DataFile(job.folder, DATA)
    products = replace_marks(job, traced, dialect, data)
    data.close()
    facts = _common(job, dialect, "encoder") | {
        "inputs": [str(value.name) for value in traced.graph.inputs],
        "hidden_size": _width(traced, STATES),
        "compressed": {FILE: products},
    }
    save(job, traced, FILE, facts)
    return facts


def write_seq2seq(job: Job, dialect: Dialect) -> dict[str, Any]:
    """`encoder.onnx`, `cross.onnx` and `decoder.onnx`; see `export.onnx.trace_encoders.trace_seq2seq`."""
    job.progress.phase("tracing the model", 1)
    traced = trace_seq2seq(job.source, dialect.dtype)
    job.progress.step()
    data = DataFile(job.folder, DATA)
    products = {name: replace_marks(job, part, dialect, data) for name, part in traced.items()}
    data.close()
    graph = traced["decoder"].graph
    values: dict[str, Any] = {str(value.name): value for value in graph.outputs}
    cross: dict[str, Any] = {str(value.name): value for value in traced["cross"].graph.outputs}
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
        save(job, traced[name], file, facts)
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
    return number(next(v for v in traced.graph.outputs if v.name == name).shape[-1])


def _shapes(values: dict[str, Any], prefix: str) -> list[list[int]]:
    """`[heads, size]` of every layer's keys."""
    keys = [value for name, value in values.items() if name.startswith(f"{prefix}.") and name.endswith(".key")]
    return [[number(value.shape[1]), number(value.shape[3])] for value in keys]


def replace_marks(job: Job, traced: onnx_ir.Model, dialect: Dialect, data: DataFile, grouped: bool = False) -> int:
    """Everything that a traced graph only stands for becomes operators and constants; returns how many products read integer codes.

    Args:
        data: where large constants go.
        grouped: attention becomes ONNX Runtime's GroupQueryAttention.
    """
    graph = traced.graph
    store = Store(traced, data)
    marks = [node for node in graph if node.domain == DOMAIN]
    job.progress.phase("writing weights", len(marks))
    shared: dict[Any, Any] = {}
    products = fusible(job, marks)
    together = groups(job, marks) if dialect.own_operators else {}
    done: set[onnx_ir.Node] = set()
    for mark in marks:
        module = mark.attributes.get_string("module", "")
        if mark in done:
            continue
        builder = Builder(store, mark, module or str(mark.name))
        first = mark.inputs[0]
        assert first is not None
        if mark in together:
            group = together[mark]
            modules = [other.attributes.get_string("module", "") for other in group]
            builder = Builder(store, mark, joined(modules))
            values = write_together(builder, job, modules, first, dialect)
            for other, value in zip(group, values, strict=True):
                builder.replace(other, value)
            done.update(group)
            products -= len(group) - 1
            for name in modules:
                job.progress.step(name)
            continue
        if mark.op_type == "Linear":
            value = write_linear(builder, job, module, first, dialect)
        elif mark.op_type == "Embedding":
            value = write_embedding(builder, job, module, first, dialect)
        elif grouped:
            value = write_grouped(builder, mark, dialect, shared)
        else:
            value = write_attention(builder, mark, dialect, shared)
        builder.replace(mark, value)
        job.progress.step(module)
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
    return [name for name, entry in job.source.entries.items() if _is_2_4(entry.scheme.sparsity)]


def _is_2_4(pattern: str | None) -> bool:
    """2:4, and 1:4, which is 2:4 too."""
    found = re.fullmatch(r"(\d+):4", pattern or "")
    return found is not None and int(found[1]) <= 2


def _tidy(model: onnx_ir.Model, dialect: Dialect) -> None:
    """Drop what nothing reads any more, merge what is computed twice, and declare the operators used."""
    from onnx_ir.passes import common

    if any(node.domain == MICROSOFT for node in model.graph.all_nodes()):
        model.opset_imports[MICROSOFT] = 1
    if dialect.own_operators:
        _fuse(model)
        unmark(model)
    if dialect.name == "onnx":
        _without_relu(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    model.opset_imports.pop(DOMAIN, None)
    model.opset_imports[""] = dialect.opset
    if any(node.domain == MICROSOFT for node in model.graph.all_nodes()):
        model.opset_imports[MICROSOFT] = 1
    left = sorted(
        {f"{node.domain}::{node.op_type}" for node in model.graph.all_nodes() if node.domain not in ("", MICROSOFT)}
    )
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
        most = ir.node("Max", [value, graph.initializers[name]])
        most.name, output, old = node.name, most.outputs[0], node.outputs[0]
        output.name, output.shape, output.type = f"{old.name}.max", old.shape, old.type
        graph.insert_before(node, most)
        old.replace_all_uses_with(output, replace_graph_outputs=True)
        graph.remove(node, safe=True)


def _fuse(model: onnx_ir.Model) -> None:
    """Norms and rotary embeddings become ONNX Runtime's operators."""
    from transformers.exporters.onnxruntime_fusions import fuse_for_onnxruntime

    fuse_for_onnxruntime(model, "cpu")


def _share_cache(graph: onnx_ir.Graph) -> None:
    """Grouped-query attention may write `present` where `past` is: both have room for more tokens than they hold."""
    import onnx_ir as ir

    for value in [*graph.inputs, *graph.outputs]:
        if str(value.name).startswith(("past_key_values.", "present.")):
            shape = value.shape
            assert shape is not None
            length = "capacity" if str(value.name).startswith("past") else "present capacity"
            value.shape = ir.Shape([shape[0], shape[1], length, shape[3]])
    for value in graph.inputs:
        if value.name == "attention_mask":
            value.shape = ir.Shape(["batch", "total"])


def _facts(job: Job, traced: onnx_ir.Model, dialect: Dialect, reason: str | None) -> dict[str, Any]:
    graph = traced.graph
    past = [value for value in graph.inputs if str(value.name).startswith("past_key_values.")]
    shapes = [[number(past[i].shape[1]), number(past[i].shape[3])] for i in range(0, len(past), 2)]  # type: ignore[index]
    text = job.source.config.get_text_config()
    return {
        "kind": "decoder",
        "dialect": dialect.name,
        "opset": dialect.opset,
        "dtype": str(dialect.dtype).removeprefix("torch."),
        "layers": len(shapes),
        "cache": shapes,  # [heads, size] of each layer
        "vocab_size": number(next(v for v in graph.outputs if v.name == "logits").shape[-1]),  # type: ignore[index]
        "context_length": getattr(text, "max_position_embeddings", None),
        "inputs": [str(value.name) for value in graph.inputs],
        "shared_cache": reason is None,
        "grouped_query_attention": reason is None or reason,
        "accuracy_level": dialect.accuracy_level if dialect.own_operators else None,
    }


def fusible(job: Job, marks: Iterable[onnx_ir.Node]) -> int:
    """How many products of a graph have integer codes, which the runtime reads as they are."""
    count = 0
    for mark in marks:
        entry = job.source.entries.get(mark.attributes.get_string("module", "")) if mark.op_type == "Linear" else None
        count += entry is not None and entry.scheme.grid is not None and entry.scheme.grid.type == "int"
    return count


def number(dimension: Any) -> int:
    """A fixed dimension, which the exporter may have written as a symbol."""
    return int(dimension if isinstance(dimension, int) else dimension.value)
