"""Graphs of encoders and encoder-decoders.

An encoder-decoder becomes three graphs: `encoder`, run once for a source; `cross`, the keys and values that every decoder layer makes
of the encoder's states, computed once too; `decoder`, run for every token.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from export.onnx_graph.trace import BATCH, PAST, SEQUENCE, cache_axes, cached, export_graph, name_values, prepared
from export.source import Source
from runtime.errors import RequestError, first_line
from runtime.modeling.cache_argument import cache_argument

if TYPE_CHECKING:
    import onnx_ir
    from transformers import PreTrainedModel

STATES = "last_hidden_state"
SOURCE = 7  # tokens of the example's source


def trace_encoder(source: Source, dtype: torch.dtype) -> onnx_ir.Model:
    """`input_ids`, `attention_mask` (and `token_type_ids`) in, `last_hidden_state` `[batch, sequence, hidden]` out."""
    model, shapes = prepared(source, dtype)
    return _encoder(source, model.base_model, model, shapes, dtype)


def trace_seq2seq(source: Source, dtype: torch.dtype) -> dict[str, onnx_ir.Model]:
    """The three graphs by name.

    `encoder` as for encoders. `cross`: `encoder_hidden_states` in, `cross.{i}.key/value` `[batch, heads, source, size]` out.
    `decoder`: `decoder_input_ids`, `encoder_attention_mask`, `past_key_values.{i}.key/value`, `cross.{i}.key/value` in; `logits`,
    `present.{i}.key/value` out.
    """
    model, shapes = prepared(source, dtype)
    encoder = _encoder(source, model.get_encoder(), model, shapes, dtype)
    caches = _example_caches(source, dtype)
    cross = cached(source, model, shapes, dtype, "cross", lambda: _cross(model, len(caches[1]) // 2, dtype))
    decoder = cached(source, model, shapes, dtype, "decoder", lambda: _decoder(model, caches, dtype))
    return {"encoder": encoder, "cross": cross, "decoder": decoder}


def _encoder(source: Source, encoder: Any, model: PreTrainedModel, shapes: Any, dtype: torch.dtype) -> Any:
    accepted = inspect.signature(encoder.forward).parameters
    wanted = ["input_ids", "attention_mask", *(["token_type_ids"] if "token_type_ids" in accepted else [])]

    def trace() -> Any:
        free = torch.export.Dim.DYNAMIC
        inputs: dict[str, Any] = {name: torch.ones(BATCH, SOURCE, dtype=torch.int64) for name in wanted}
        if "token_type_ids" in inputs:
            inputs["token_type_ids"] = torch.zeros(BATCH, SOURCE, dtype=torch.int64)
        graph = export_graph(encoder, inputs, {name: {0: free, 1: free} for name in inputs}, model)
        name_values(graph.graph.inputs, {name: ["batch", "sequence"] for name in wanted})
        _keep_outputs(graph, {STATES: ["batch", "sequence", None]})
        return graph

    return cached(source, model, shapes, dtype, "encoder", trace)


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
        inputs = {"input_ids": torch.zeros(batch, 1, dtype=torch.int64), "encoder_hidden_states": encoder_hidden_states}
        mask = torch.ones(batch, length, dtype=torch.int64)
        inputs[cache_argument(self.decoder)] = caches
        self.decoder(**inputs, encoder_attention_mask=mask, use_cache=True)
        return tuple(_tensors(caches.cross_attention_cache))


def _cross(model: PreTrainedModel, layers: int, dtype: torch.dtype) -> Any:
    free = torch.export.Dim.DYNAMIC
    width = int(model.config.get_text_config().hidden_size)
    inputs = {"encoder_hidden_states": torch.randn(BATCH, SOURCE, width).to(dtype)}
    graph = export_graph(_Cross(model).eval(), inputs, {"encoder_hidden_states": {0: free, 1: free}}, model)
    name_values(graph.graph.inputs, {"encoder_hidden_states": ["batch", "source", width]})
    _keep_outputs(graph, cache_axes("cross", layers, "source"))
    return graph


def _example_caches(source: Source, dtype: torch.dtype) -> tuple[list[Any], list[Any]]:
    """Keys and values of the decoder's own past and of the source, of the shapes that the model makes (run on meta)."""
    from transformers import DynamicCache, EncoderDecoderCache
    from transformers.modeling_outputs import BaseModelOutput

    probe: Any = source.build(dtype)
    probe.to("meta")
    if probe._can_set_attn_implementation():
        probe.set_attn_implementation("eager")  # the others look into a mask's values, to do without it; meta has none
    caches = EncoderDecoderCache(DynamicCache(), DynamicCache())
    width = int(probe.config.get_text_config().hidden_size)
    states = torch.zeros(BATCH, SOURCE, width, dtype=dtype, device="meta")
    try:
        with torch.no_grad():
            probe(
                decoder_input_ids=torch.ones(BATCH, PAST, dtype=torch.int64, device="meta"),
                encoder_outputs=BaseModelOutput(last_hidden_state=states),  # type: ignore[arg-type]
                use_cache=True,
                **{cache_argument(probe): caches},
            )
        own, cross = (_tensors(cache) for cache in (caches.self_attention_cache, caches.cross_attention_cache))
    except (AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise RequestError(
            f"{type(probe).__name__} cannot be run without values, which shows what its decoder keeps: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    return [torch.zeros(tensor.shape, dtype=dtype) for tensor in own], [
        torch.zeros(t.shape, dtype=dtype) for t in cross
    ]


def _tensors(cache: Any) -> list[torch.Tensor]:
    """Keys and values of each layer."""
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _decoder(model: PreTrainedModel, caches: tuple[list[Any], list[Any]], dtype: torch.dtype) -> Any:
    from transformers import DynamicCache, EncoderDecoderCache
    from transformers.modeling_outputs import BaseModelOutput

    free = torch.export.Dim.DYNAMIC
    own, cross = caches
    example = EncoderDecoderCache(DynamicCache(), DynamicCache())
    for i in range(len(own) // 2):
        example.self_attention_cache.update(own[2 * i], own[2 * i + 1], i)
        example.cross_attention_cache.update(cross[2 * i], cross[2 * i + 1], i)
        example.is_updated[i] = True
    width = int(model.config.get_text_config().hidden_size)
    inputs = {
        "decoder_input_ids": torch.ones(BATCH, SEQUENCE, dtype=torch.int64),
        "encoder_outputs": BaseModelOutput(last_hidden_state=torch.zeros(BATCH, SOURCE, width, dtype=dtype)),  # type: ignore[arg-type]
        "attention_mask": torch.ones(BATCH, SOURCE, dtype=torch.int64),
        cache_argument(model): example,
    }
    count = len(own) + len(cross)
    dynamic = {
        "decoder_input_ids": {0: free, 1: free},
        "encoder_outputs": [{0: free, 1: free}],
        "attention_mask": {0: free, 1: free},
        cache_argument(model): [{0: free, 2: free}] * count,
    }
    graph = export_graph(model, inputs, dynamic, model)
    layers = len(own) // 2
    shaped: dict[str, list[Any]] = {
        "decoder_input_ids": ["batch", "sequence"],
        "encoder_hidden_states": ["batch", "source", width],
        "encoder_attention_mask": ["batch", "source"],
        **cache_axes("past_key_values", layers, "past"),
        **cache_axes("cross", layers, "source"),
    }
    name_values(graph.graph.inputs, shaped)
    present = cache_axes("present", layers, "past + sequence")
    _keep_outputs(graph, {"logits": ["batch", "sequence", None], **present})
    _drop_unused_inputs(graph)
    return graph


def _keep_outputs(graph: Any, names: dict[str, list[Any]]) -> None:
    """The first outputs stay, under these names."""
    from onnx_ir.passes import common

    while len(graph.graph.outputs) > len(names):
        graph.graph.outputs.pop()
    name_values(graph.graph.outputs, names)
    common.RemoveUnusedNodesPass()(graph)


def _drop_unused_inputs(graph: Any) -> None:
    for value in list(graph.graph.inputs):
        if not value.uses() and not value.is_graph_output():
            graph.graph.inputs.remove(value)
