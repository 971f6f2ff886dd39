"""Tracing of a model to an ONNX graph, with marks in the place of its weights, by transformers' own exporter."""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from export.onnx_graph.builder import fixed
from export.onnx_graph.marks import MarkError, mark_layers, marked_attention
from export.source import Source
from runtime.engines.onnx.session import cache_names
from runtime.errors import CompressError, RequestError, first_line
from runtime.layers.install import install_compressed
from runtime.modeling import layer_sizes, skeleton
from runtime.modeling.cache_argument import cache_argument
from runtime.modeling.weights import Filling
from runtime.system.directories import cache_directory

if TYPE_CHECKING:
    import onnx_ir
    from torch import nn
    from transformers import PreTrainedModel


MOST_FILES, MOST_BYTES = 32, 1 << 30  # graphs kept; the oldest go first
# Where an artifact lies, and how its weights do, has no part in a graph that holds marks in their place.
_NO_PART = ("quantization_config", "_name_or_path")
# What builds, marks and traces a model.
_CODE = (
    *(Path(__file__).parent / name for name in ("marks.py", "trace.py", "trace_encoders.py")),
    *map(Path, (skeleton.__file__, layer_sizes.__file__)),
)
_TRACERS = ("torch", "transformers", "onnxscript", "onnx-ir", "onnx")


def _cache_key(model: nn.Module, config: Any, **details: Any) -> str:
    """Name of the graph that tracing this model (weights marked) would give."""
    import torch

    digest = hashlib.sha256()
    described = {
        "config": {name: value for name, value in config.to_dict().items() if name not in _NO_PART},
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "details": {name: str(value) for name, value in sorted(details.items())},
        "versions": {name: version(name) for name in _TRACERS},
        "code": [hashlib.sha256(file.read_bytes()).hexdigest() for file in _CODE],
    }
    digest.update(json.dumps(described, sort_keys=True, default=str).encode())
    for name, value in sorted([*model.named_parameters(), *model.named_buffers()], key=lambda pair: pair[0]):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        if value.numel():
            digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _load_cached(name: str) -> onnx_ir.Model | None:
    """The graph kept under `name`; None when there is none or it cannot be read."""
    import onnx_ir as ir

    file = cache_directory("traced") / f"{name}.onnx"
    if not file.is_file():
        return None
    try:
        model = ir.load(str(file))
        os.utime(file)
    except Exception as error:  # a damaged file is whatever protobuf makes of it; tracing again is right in any case
        _log.warning("%s cannot be read (%s) and is made again", file, type(error).__name__)
        return None
    return model


def _store_cached(name: str, model: onnx_ir.Model) -> None:
    """Keep a graph. A cache that cannot be written is no reason to fail."""
    import onnx_ir as ir

    folder = cache_directory("traced")
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ir.save(model, str(temporary))
        os.replace(temporary, folder / f"{name}.onnx")
        kept = sorted(folder.glob("*.onnx"), key=lambda file: file.stat().st_mtime)
        sizes = list(accumulate(file.stat().st_size for file in reversed(kept)))
        for file, size in zip(reversed(kept), sizes, strict=True):
            if size > MOST_BYTES or file in kept[:-MOST_FILES]:
                file.unlink(missing_ok=True)
    except Exception as error:  # a graph above 2 GB is one that protobuf refuses in its own way
        _log.warning("the traced graph is not kept: %s", error)
        temporary.unlink(missing_ok=True)


_log = logging.getLogger("compress.export")
OPSET = 21  # INT4 and blocked scales; what dialects with a newer one use is valid under it too
BATCH, SEQUENCE, PAST = 2, 3, 5  # of the example; every one of them is a free dimension of the graph


def prepared(source: Source, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, tuple[int, int]]]:
    """The model in `dtype` with marks for all matrices; what remains (norms, biases of the rest, positions) is filled in.

    Raises:
        RequestError: the checkpoint's names are not the model's own.
    """
    model = source.build(dtype)
    compressed = install_compressed(model, source.artifact.config, source.artifact.checkpoint.names())
    filling = Filling(model, source.artifact.checkpoint, dtype, torch.device("cpu"), compressed)
    if filling.foreign:
        raise RequestError(f"{source.path} has names that only transformers converts; apply a recipe to it first")
    shapes = mark_layers(model, dtype)
    filling.place(lambda name: name.rpartition(".")[0] not in shapes)
    left = [name for name, value in model.named_parameters() if value.device.type == "meta"]
    if left:
        raise CompressError(f"tensor {left[0]} has no value: it is tied to a layer that is exported apart")
    return model, shapes


def trace_decoder(source: Source, dtype: torch.dtype) -> onnx_ir.Model:
    """Prefill and decode in one graph: `input_ids`, `attention_mask`, `position_ids`, `past_key_values.{i}.key/value` in;
    `logits`, `present.{i}.key/value` out. Batch, sequence and past are free, 0 past included. Opset `OPSET`."""
    model, shapes = prepared(source, dtype)
    return cached(source, model, shapes, dtype, "model", lambda: _decoder(source, model, dtype))


def cached(source: Source, model: PreTrainedModel, shapes: Any, dtype: torch.dtype, part: str, trace: Any) -> Any:
    """The graph of a part of a model from the cache; else `trace` makes it."""
    name = _cache_key(model, source.config, shapes=shapes, dtype=dtype, opset=OPSET, part=part)
    graph = _load_cached(name)
    if graph is None:
        graph = trace()
        strip(graph)
        _store_cached(name, graph)
    return graph


def _decoder(source: Source, model: PreTrainedModel, dtype: torch.dtype) -> Any:
    from torch.export import Dim

    accepted = inspect.signature(model.forward).parameters
    layers, cache = _example_cache(source, model, dtype)
    inputs: dict[str, Any] = {
        "input_ids": torch.ones(BATCH, SEQUENCE, dtype=torch.int64),
        "attention_mask": torch.ones(BATCH, PAST + SEQUENCE, dtype=torch.int64),
    }
    if "position_ids" in accepted:
        inputs["position_ids"] = torch.arange(PAST, PAST + SEQUENCE).expand(BATCH, SEQUENCE).clone()
    taken = cache_argument(model)
    inputs[taken] = cache
    free = Dim.DYNAMIC
    dynamic: dict[str, Any] = {name: {0: free, 1: free} for name in inputs}
    dynamic[taken] = [{0: free, 2: free}] * (2 * layers)
    graph = export_graph(model, inputs, dynamic, model)
    names = {name: ["batch", "past + sequence" if name == "attention_mask" else "sequence"] for name in inputs}
    del names[taken]
    name_values(graph.graph.inputs, names | cache_axes("past_key_values", layers, "past"))
    present = cache_axes("present", layers, "past + sequence")
    name_values(graph.graph.outputs, {"logits": ["batch", "sequence", None], **present})
    return graph


def cache_axes(prefix: str, layers: int, length: str) -> dict[str, list[Any]]:
    """{`prefix.0.key`: axes `[batch, heads, length, size]`} of a cache, for `name_values`."""
    return {name: ["batch", None, length, None] for name in cache_names(prefix, layers)}


def name_values(values: Any, names: Mapping[str, list[Any]]) -> None:
    """Names and shapes of graph inputs or outputs; None in a shape keeps the number that was traced."""
    import onnx_ir as ir

    if len(values) != len(names):
        found = ", ".join(str(value.name) for value in values)
        raise CompressError(f"the traced graph has {len(values)} inputs or outputs ({found}), expected {len(names)}")
    for value, (name, axes) in zip(values, names.items(), strict=True):
        value.name = name
        value.shape = ir.Shape([fixed(value.shape[i]) if axis is None else axis for i, axis in enumerate(axes)])


def strip(model: onnx_ir.Model) -> None:
    """The exporter's notes on every node (stack traces of this machine) are no business of a file."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in [*model.graph.inputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()


def _example_cache(source: Source, model: PreTrainedModel, dtype: torch.dtype) -> tuple[int, Any]:
    """A cache with a past of `PAST` tokens, of the shapes the model makes: learned by running it on meta."""
    probe: Any = source.build(dtype)
    probe.to("meta")
    cache = _plain_cache(probe)
    ids = torch.ones(BATCH, PAST, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            probe(input_ids=ids, use_cache=True, **{cache_argument(probe): cache})
        kept: list[Any] = list(cache.layers)
        shapes = [(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in kept]
    except (AttributeError, TypeError, NotImplementedError, RuntimeError) as error:
        raise RequestError(f"{type(model).__name__} has no cache of keys and values for each layer") from error
    example = _plain_cache(model)
    generator = torch.Generator().manual_seed(0)
    for i, (keys, values) in enumerate(shapes):
        if len(keys) != 4 or keys[0] != BATCH or keys[2] != PAST:
            raise RequestError(f"layer {i} has a cache of shape {list(keys)}, not [batch, heads, past, size]")
        parts = (torch.randn(shape, generator=generator).to(dtype) for shape in (keys, values))
        example.update(*parts, i)
    return len(shapes), example


def _plain_cache(model: PreTrainedModel) -> Any:
    """An empty cache that keeps all tokens in every layer.

    Layers with a sliding window would keep only its tokens, and numbers beside their keys and values. Whoever runs the graph
    appends to all layers alike; the window is in the mask, which transformers makes for the tokens that the cache says it has.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    cache = DynamicCache(config=model.config.get_text_config())
    # exactly this class: what is derived from it keeps more than keys and values, which the graph has no place for
    cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
    return cache


def export_graph(module: Any, inputs: dict[str, Any], dynamic: dict[str, Any], model: PreTrainedModel) -> Any:
    """The onnx_ir model of `module`, a part of `model`. Attention is marked where the mark can say it."""
    with marked_attention(model) as possible:
        if possible:
            try:
                return _run_exporter(module, inputs, dynamic)
            except MarkError as error:
                _log.info("attention is traced as transformers computes it: %s", error)
    return _run_exporter(module, inputs, dynamic)


def _run_exporter(model: Any, inputs: dict[str, Any], dynamic: dict[str, Any]) -> Any:
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    config = OnnxConfig(dynamic=True, dynamic_shapes=dynamic, opset_version=OPSET)
    with torch.no_grad(), _quiet():
        try:
            return OnnxExporter().export(model, inputs, config=config).program
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, MarkError):
                    raise cause from None
                cause = cause.__cause__ or cause.__context__
            why = f"{type(error).__name__}: {first_line(error)}"
            raise CompressError(f"{type(model).__name__} could not be traced: {why}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """torch.onnx prints its progress on stdout, and warns of packages that nobody asked for."""
    names = ("torch.onnx", "torch.onnx._internal.exporter", "transformers", "onnxscript")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
