"""Tracing of a model to ONNX graphs, with marks in the place of its weights, by transformers' own exporter.

An encoder-decoder becomes three graphs: `encoder`, run once for a source; `cross`, the keys and values that every decoder layer makes
of the encoder's states, computed once too; `decoder`, run for every token.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from export.onnx_graph.builder import fixed
from export.onnx_graph.marks import MarkError, mark_layers, marked_attention
from export.source import Source
from runtime.engines.past_present import cache_names
from runtime.errors import CompressError, RequestError, first_line
from runtime.layers.install import install_compressed
from runtime.modeling import layer_sizes, skeleton
from runtime.modeling.cache_argument import cache_argument
from runtime.modeling.skeleton import model_kind
from runtime.modeling.weights import Filling
from runtime.system.directories import cache_directory

if TYPE_CHECKING:
    import onnx_ir
    from transformers import PreTrainedModel


MOST_FILES, MOST_BYTES = 32, 1 << 30  # graphs kept; the oldest go first
# Where an artifact lies, and how its weights do, has no part in a graph that holds marks in their place.
_NO_PART = ("quantization_config", "_name_or_path")
# What builds, marks and traces a model.
_CODE = (
    *(Path(__file__).parent / name for name in ("marks.py", "trace.py")),
    *map(Path, (skeleton.__file__, layer_sizes.__file__)),
)
_TRACERS = ("torch", "transformers", "onnxscript", "onnx-ir", "onnx")


def _cache_key(model: nn.Module, config: Any, **details: Any) -> str:
    """Name of the graph that tracing this model (weights marked) would give."""
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


def _store_cached(name: str, model: onnx_ir.Model) -> None:
    """Keep a graph. A cache that cannot be written is no reason to fail."""
    import onnx_ir as ir

    folder = cache_directory("traced")
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ir.save(model, str(temporary))
        os.replace(temporary, folder / f"{name}.onnx")
        kept = sorted(folder.glob("*.onnx"), key=lambda file: file.stat().st_mtime, reverse=True)
        sizes = accumulate(file.stat().st_size for file in kept)
        for number, (file, size) in enumerate(zip(kept, sizes, strict=True)):
            if number >= MOST_FILES or size > MOST_BYTES:
                file.unlink(missing_ok=True)
    except Exception as error:  # a graph above 2 GB is one that protobuf refuses in its own way
        _log.warning("the traced graph is not kept: %s", error)
        temporary.unlink(missing_ok=True)


_log = logging.getLogger("compress.export")
OPSET = 21  # INT4 and blocked scales; what dialects with a newer one use is valid under it too
BATCH, SEQUENCE, PAST, SOURCE = 2, 3, 5, 7  # of the example; every one of them is a free dimension of the graph
STATES = "last_hidden_state"
Axes = list[str | None]  # of a value of the graph: a name for a free dimension, None for the number that was traced


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
    return _cached(source, model, shapes, dtype, "model", lambda: _decoder(source, model, dtype))


def trace_encoder(source: Source, dtype: torch.dtype) -> onnx_ir.Model:
    """`input_ids`, `attention_mask` (and `token_type_ids`) in, `last_hidden_state` `[batch, sequence, hidden]` out."""
    model, shapes = prepared(source, dtype)
    return _cached(source, model, shapes, dtype, "encoder", lambda: _encoder(model.base_model, model))


def trace_seq2seq(source: Source, dtype: torch.dtype) -> dict[str, onnx_ir.Model]:
    """The three graphs by name.

    `encoder` as for encoders. `cross`: `encoder_hidden_states` in, `cross.{i}.key/value` `[batch, heads, source, size]` out.
    `decoder`: `decoder_input_ids`, `encoder_attention_mask`, `past_key_values.{i}.key/value`, `cross.{i}.key/value` in; `logits`,
    `present.{i}.key/value` out.
    """
    model, shapes = prepared(source, dtype)
    caches = _example_caches(source, model, dtype)
    parts: dict[str, Callable[[], Any]] = {
        "encoder": lambda: _encoder(model.get_encoder(), model),
        "cross": lambda: _cross(model, len(caches[1]) // 2, dtype),
        "decoder": lambda: _seq2seq_decoder(model, caches, dtype),
    }
    return {part: _cached(source, model, shapes, dtype, part, trace) for part, trace in parts.items()}


def _cached(
    source: Source, model: PreTrainedModel, shapes: Any, dtype: torch.dtype, part: str, trace: Callable[[], Any]
) -> Any:
    """The graph of a part of a model from the cache; else `trace` makes it."""
    import onnx_ir as ir

    name = _cache_key(model, source.config, shapes=shapes, dtype=dtype, opset=OPSET, part=part)
    file = cache_directory("traced") / f"{name}.onnx"
    if file.is_file():
        try:
            graph = ir.load(str(file))
            os.utime(file)
            return graph
        except (
            Exception
        ) as error:  # a damaged file is whatever protobuf makes of it; tracing again is right in any case
            _log.warning("%s cannot be read (%s) and is made again", file, type(error).__name__)
    graph = trace()
    strip(graph)
    _store_cached(name, graph)
    return graph


def _decoder(source: Source, model: PreTrainedModel, dtype: torch.dtype) -> Any:
    layers, cache = _example_cache(source, model, dtype)
    inputs: dict[str, Any] = {
        "input_ids": torch.ones(BATCH, SEQUENCE, dtype=torch.int64),
        "attention_mask": torch.ones(BATCH, PAST + SEQUENCE, dtype=torch.int64),
    }
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = torch.arange(PAST, PAST + SEQUENCE).expand(BATCH, SEQUENCE).clone()
    lengths = {"attention_mask": "past + sequence"}
    named: dict[str, tuple[Any, dict[str, Axes]]] = {
        name: (tensor, {name: ["batch", lengths.get(name, "sequence")]}) for name, tensor in inputs.items()
    }
    named[cache_argument(model)] = (cache, _cache_axes("past_key_values", layers, "past"))
    return _traced(model, model, named, _LOGITS | _cache_axes("present", layers, "past + sequence"))


def _encoder(encoder: Any, model: PreTrainedModel) -> Any:
    inputs = {name: torch.ones(BATCH, SOURCE, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    if "token_type_ids" in inspect.signature(encoder.forward).parameters:
        inputs["token_type_ids"] = torch.zeros(BATCH, SOURCE, dtype=torch.int64)
    named: dict[str, Any] = {name: (tensor, {name: ["batch", "sequence"]}) for name, tensor in inputs.items()}
    return _traced(encoder, model, named, {STATES: ["batch", "sequence", None]}, more=True)


class _Cross(nn.Module):
    """Keys and values that the decoder's layers make of the encoder's states."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.decoder = model.get_decoder()
        self.config = model.config

    def forward(self, encoder_hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from transformers import DynamicCache, EncoderDecoderCache

        caches = EncoderDecoderCache(DynamicCache(), DynamicCache())
        batch, length = encoder_hidden_states.shape[:2]
        inputs: dict[str, Any] = {
            "input_ids": torch.zeros(batch, 1, dtype=torch.int64),
            "encoder_hidden_states": encoder_hidden_states,
        }
        mask = torch.ones(batch, length, dtype=torch.int64)
        inputs[cache_argument(self.decoder)] = caches
        self.decoder(**inputs, encoder_attention_mask=mask, use_cache=True)
        return tuple(_tensors(caches.cross_attention_cache))


def _cross(model: PreTrainedModel, layers: int, dtype: torch.dtype) -> Any:
    states = torch.randn(BATCH, SOURCE, int(model.config.get_text_config().hidden_size)).to(dtype)
    inputs = {"encoder_hidden_states": (states, _SOURCE_STATES)}
    return _traced(_Cross(model).eval(), model, inputs, _cache_axes("cross", layers, "source"), more=True)


def _seq2seq_decoder(model: PreTrainedModel, caches: tuple[list[Any], list[Any]], dtype: torch.dtype) -> Any:
    from transformers import DynamicCache, EncoderDecoderCache
    from transformers.modeling_outputs import BaseModelOutput

    own, cross = caches
    layers = len(own) // 2
    example = EncoderDecoderCache(DynamicCache(), DynamicCache())
    for i in range(layers):
        example.self_attention_cache.update(own[2 * i], own[2 * i + 1], i)
        example.cross_attention_cache.update(cross[2 * i], cross[2 * i + 1], i)
        example.is_updated[i] = True
    states: Any = torch.zeros(BATCH, SOURCE, int(model.config.get_text_config().hidden_size), dtype=dtype)
    ids, mask = torch.ones(BATCH, SEQUENCE, dtype=torch.int64), torch.ones(BATCH, SOURCE, dtype=torch.int64)
    inputs: dict[str, Any] = {
        "decoder_input_ids": (ids, {"decoder_input_ids": ["batch", "sequence"]}),
        "encoder_outputs": (BaseModelOutput(last_hidden_state=states), _SOURCE_STATES),
        "attention_mask": (mask, {"encoder_attention_mask": ["batch", "source"]}),
        cache_argument(model): (
            example,
            _cache_axes("past_key_values", layers, "past") | _cache_axes("cross", layers, "source"),
        ),
    }
    graph = _traced(model, model, inputs, _LOGITS | _cache_axes("present", layers, "past + sequence"), more=True)
    drop_unused_inputs(graph.graph)
    return graph


_LOGITS: dict[str, Axes] = {"logits": ["batch", "sequence", None]}
_SOURCE_STATES: dict[str, Axes] = {"encoder_hidden_states": ["batch", "source", None]}


def _cache_axes(prefix: str, layers: int, length: str) -> dict[str, Axes]:
    """{`prefix.0.key`: axes `[batch, heads, length, size]`} of a cache."""
    return {name: ["batch", None, length, None] for name in cache_names(prefix, layers)}


def _traced(
    module: Any,
    model: PreTrainedModel,
    inputs: Mapping[str, tuple[Any, Mapping[str, Axes]]],
    outputs: Mapping[str, Axes],
    more: bool = False,
) -> Any:
    """The onnx_ir model of `module`, a part of `model`.

    Args:
        inputs: {argument: (example, {input of the graph: its axes})}; the example is a tensor, or holds one for each input.
        outputs: {output of the graph: its axes}.
        more: the module returns more behind them, which is left out.
    """
    from onnx_ir.passes import common
    from torch.export import Dim

    dynamic: dict[str, Any] = {}
    names: dict[str, Axes] = {}
    for argument, (example, values) in inputs.items():
        free = [{i: Dim.DYNAMIC for i, axis in enumerate(axes) if axis is not None} for axes in values.values()]
        dynamic[argument] = free[0] if isinstance(example, torch.Tensor) else free
        names |= values
    graph = _export(module, {argument: example for argument, (example, _) in inputs.items()}, dynamic, model)
    _name_values(graph.graph.inputs, names)
    while more and len(graph.graph.outputs) > len(outputs):
        graph.graph.outputs.pop()
    _name_values(graph.graph.outputs, outputs)
    common.RemoveUnusedNodesPass()(graph)
    return graph


def _name_values(values: Any, names: Mapping[str, Axes]) -> None:
    """Names and shapes of graph inputs or outputs."""
    import onnx_ir as ir

    if len(values) != len(names):
        found = ", ".join(str(value.name) for value in values)
        raise CompressError(f"the traced graph has {len(values)} inputs or outputs ({found}), expected {len(names)}")
    for value, (name, axes) in zip(values, names.items(), strict=True):
        value.name = name
        value.shape = ir.Shape([fixed(value.shape[i]) if axis is None else axis for i, axis in enumerate(axes)])


def drop_unused_inputs(graph: Any) -> None:
    """Remove the graph inputs that no node reads."""
    for value in list(graph.inputs):
        if not value.uses() and not value.is_graph_output():
            graph.inputs.remove(value)


def strip(model: onnx_ir.Model) -> None:
    """The exporter's notes on every node (stack traces of this machine) are no business of a file."""
    nodes: list[Any] = list(model.graph.all_nodes())
    values = [value for node in nodes for value in node.outputs]
    for part in (model, model.graph, *model.graph.inputs, *model.graph.initializers.values(), *nodes, *values):
        part.metadata_props.clear()
    for node in nodes:
        node.doc_string = None


def _example_cache(source: Source, model: PreTrainedModel, dtype: torch.dtype) -> tuple[int, Any]:
    """A cache with a past of `PAST` tokens, of the shapes the model makes: learned by running it on meta."""
    ids = torch.ones(BATCH, PAST, dtype=torch.int64, device="meta")
    try:
        cache = _filled(source, dtype, _plain_cache(model), input_ids=ids)
        shapes = [(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in cache.layers]
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


def _filled(source: Source, dtype: torch.dtype, cache: Any, **inputs: Any) -> Any:
    """`cache` after the model has run on meta."""
    probe: Any = source.build(dtype)
    probe.to("meta")
    if model_kind(source.config) == "encoder-decoder" and probe._can_set_attn_implementation():
        probe.set_attn_implementation("eager")  # the others look into a mask's values, to do without it; meta has none
    with torch.no_grad():
        probe(**inputs, use_cache=True, **{cache_argument(probe): cache})
    return cache


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


def _example_caches(source: Source, model: PreTrainedModel, dtype: torch.dtype) -> tuple[list[Any], list[Any]]:
    """Keys and values of the decoder's own past and of the source, of the shapes that the model makes (run on meta)."""
    from transformers import DynamicCache, EncoderDecoderCache
    from transformers.modeling_outputs import BaseModelOutput

    width = int(model.config.get_text_config().hidden_size)
    ids = torch.ones(BATCH, PAST, dtype=torch.int64, device="meta")
    states: Any = torch.zeros(BATCH, SOURCE, width, dtype=dtype, device="meta")
    empty = EncoderDecoderCache(DynamicCache(), DynamicCache())
    try:
        outputs = BaseModelOutput(last_hidden_state=states)
        found = _filled(source, dtype, empty, decoder_input_ids=ids, encoder_outputs=outputs)
        own, cross = (_tensors(cache) for cache in (found.self_attention_cache, found.cross_attention_cache))
    except (AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise RequestError(
            f"{type(model).__name__} cannot be run without values, which shows what its decoder keeps: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    return [torch.zeros(t.shape, dtype=dtype) for t in own], [torch.zeros(t.shape, dtype=dtype) for t in cross]


def _tensors(cache: Any) -> list[torch.Tensor]:
    """Keys and values of each layer."""
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _export(module: Any, inputs: dict[str, Any], dynamic: dict[str, Any], model: PreTrainedModel) -> Any:
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
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
