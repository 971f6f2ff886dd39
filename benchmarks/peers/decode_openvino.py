"""OpenVINO: a decoder in its opset with u4 weights and a stateful cache, in the patterns its CPU plugin fuses.

Weights: u4 constant -> convert -> subtract 8 -> multiply by the group's scale -> reshape -> matmul. Cache: ReadValue -> Gather by
`beam_idx` -> Concat -> Assign around ScaledDotProductAttention. Logits of the last position only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from decode_common import (
    GROUP,
    CachedEngine,
    Checkpoint,
    Engine,
    Shape,
    error_of,
    layer_matrices,
    layer_norms,
    main,
    matvec_data,
    measure,
    measure_depths,
    rtn,
    time_matvec,
)
from openvino import opset13 as op
from openvino.op.util import Variable, VariableInfo

FILE = "model.xml"


def u4(codes: np.ndarray) -> Any:
    """A u4 constant `[n, groups, group]`; the even element is in the low half."""
    rows, columns = codes.shape
    packed = np.ascontiguousarray(codes[:, ::2] | codes[:, 1::2] << 4)
    return op.constant(ov.Tensor(packed, [rows, columns // GROUP, GROUP], ov.Type.u4), shared_memory=False)


def linear(x: Any, codes: np.ndarray, scale: np.ndarray) -> Any:
    """`x W^T`, decompressed in the way that the plugin recognises (as NNCF writes it)."""
    weight = op.convert(u4(codes), "f16")
    zero = op.convert(op.constant(np.full((1, 1, 1), 8, np.uint8)), "f16")
    weight = op.multiply(op.subtract(weight, zero), op.constant(scale[..., None].astype(np.float16)))
    weight = op.reshape(weight, op.constant(np.array(codes.shape, np.int64)), False)
    return op.matmul(x, op.convert(weight, "f32"), False, True)


def norm(x: Any, weight: np.ndarray, eps: float) -> Any:
    mean = op.reduce_mean(op.power(x, np.float32(2)), np.array([-1], np.int64), True)
    unit = op.multiply(x, op.divide(np.float32(1), op.sqrt(op.add(mean, np.float32(eps)))))
    return op.multiply(unit, op.constant(weight.reshape(1, 1, -1)))


def integers(*values: int) -> Any:
    return op.constant(np.array(values, np.int64))


def parameter(name: str, shape: list[int], kind: Any) -> Any:
    node = op.parameter(shape, kind, name)
    node.output(0).get_tensor().set_names({name})
    return node


class Builder:
    """What the blocks share."""

    def __init__(self, s: Shape) -> None:
        self.s = s
        self.ids = parameter("input_ids", [1, -1], np.int64)
        self.positions = parameter("position_ids", [1, -1], np.int64)
        self.mask = parameter("mask", [1, 1, -1, -1], np.float32)
        self.beam = parameter("beam_idx", [1], np.int32)
        frequency = (1.0 / s.theta ** (np.arange(0, s.head, 2) / s.head)).astype(np.float32)
        angle = op.multiply(
            op.unsqueeze(op.convert(self.positions, "f32"), integers(2)), op.constant(frequency.reshape(1, 1, -1))
        )
        both = op.unsqueeze(op.concat([angle, angle], -1), integers(1))
        self.cos, self.sin = op.cos(both), op.sin(both)
        self.sinks: list[Any] = []

    def rotate(self, x: Any) -> Any:
        """`x` [1, heads, tokens, head]."""
        half = self.s.head // 2
        low = op.slice(x, integers(0), integers(half), integers(1), integers(3))
        high = op.slice(x, integers(half), integers(2**62), integers(1), integers(3))
        turned = op.concat([op.multiply(high, np.float32(-1)), low], -1)
        return op.add(op.multiply(x, self.cos), op.multiply(turned, self.sin))

    def remember(self, new: Any, name: str) -> Any:
        """All of the cache with `new` [1, kv heads, tokens, head] at its end, spread over the query heads."""
        s = self.s
        info = VariableInfo()
        info.data_shape, info.data_type, info.variable_id = (
            ov.PartialShape([1, s.kv_heads, -1, s.head]),
            ov.Type.f32,
            name,
        )
        variable = Variable(info)
        empty = op.constant(np.zeros((1, s.kv_heads, 0, s.head), np.float32))
        past = op.gather(op.read_value(empty, variable), self.beam, op.constant(np.int32(0)))
        every = op.concat([past, new], 2)
        self.sinks.append(op.assign(every, variable))
        if s.heads == s.kv_heads:
            return every
        # A product with ones spreads a head over its group of queries: the form that the plugin's fusion looks for.
        ones = np.ones((1, 1, s.heads // s.kv_heads, 1, 1), np.float32)
        repeat = op.multiply(op.unsqueeze(every, integers(2)), op.constant(ones))
        return op.reshape(repeat, integers(0, s.heads, -1, s.head), True)

    def heads(self, x: Any, count: int) -> Any:
        return op.transpose(op.reshape(x, integers(0, 0, count, self.s.head), True), integers(0, 2, 1, 3))

    def block(self, x: Any, i: int, source: Checkpoint) -> Any:
        s = self.s
        norms = [source.array(name) for name in layer_norms(i)]
        matrices = layer_matrices(i)
        m = {key: rtn(source.array(*names)) for key, names in matrices.items() if key != "qkv"}
        h = norm(x, norms[0], s.eps)
        q, k, v = (linear(h, *rtn(source.array(name))) for name in matrices["qkv"])
        q, k, v = self.heads(q, s.heads), self.heads(k, s.kv_heads), self.heads(v, s.kv_heads)
        keys, values = self.remember(self.rotate(k), f"k{i}"), self.remember(v, f"v{i}")
        y = op.scaled_dot_product_attention(self.rotate(q), keys, values, self.mask)
        y = op.reshape(op.transpose(y, integers(0, 2, 1, 3)), integers(0, 0, s.hidden), True)
        x = op.add(x, linear(y, *m["o"]))
        h = norm(x, norms[1], s.eps)
        return op.add(x, linear(op.multiply(op.swish(linear(h, *m["gate"])), linear(h, *m["up"])), *m["down"]))


def prepare(request: dict[str, Any]) -> dict[str, Any]:
    s, source = Shape.read(request["model"]), Checkpoint(request["model"])
    b = Builder(s)
    embed = op.convert(op.constant(source.array("model.embed_tokens.weight").astype(np.float16)), "f32")
    x = op.gather(embed, b.ids, op.constant(np.int64(0)))
    for i in range(s.layers):
        x = b.block(x, i, source)
    last = op.slice(x, integers(-1), integers(2**62), integers(1), integers(1))
    logits = linear(norm(last, source.array("model.norm.weight"), s.eps), *rtn(source.array("lm_head.weight")))
    model = ov.Model([op.result(logits, "logits")], b.sinks, [b.ids, b.positions, b.mask, b.beam], "decoder")
    path = Path(request["path"])
    path.mkdir(parents=True, exist_ok=True)
    ov.save_model(model, path / FILE, compress_to_fp16=False)
    return {"bytes": sum(file.stat().st_size for file in path.iterdir())}


def compiled(model: Any, threads: int) -> Any:
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
    return ov.Core().compile_model(model, "CPU", settings)


class Decoder(CachedEngine):
    """One inference request; its state is the cache."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = compiled(str(Path(request["path"]) / FILE), request["threads"]).create_infer_request()
        self.beam = np.zeros(1, np.int32)
        self.length = 0

    def run(self, ids: Sequence[int]) -> np.ndarray:
        past, total = self.length, self.length + len(ids)
        self.length = total
        mask = np.triu(np.full((len(ids), total), np.finfo(np.float32).min, np.float32), past + 1)
        inputs = {
            "input_ids": np.array([list(ids)], np.int64),
            "position_ids": np.arange(past, total, dtype=np.int64)[None],
            "mask": mask[None, None],
            "beam_idx": self.beam,
        }
        return self.request.infer(inputs)[0].reshape(-1)

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        self.request.reset_state()
        self.length = 0
        return self.run(ids)


def load(request: dict[str, Any]) -> Engine:
    return Decoder(request)


def matvec(request: dict[str, Any]) -> dict[str, Any]:
    x = parameter("x", [1, request["columns"]], np.float32)
    results, first = [], None
    for codes, scale in matvec_data(request):
        results.append(op.result(linear(x, codes, scale)))
        first = first or (codes, scale)
    run = compiled(ov.Model(results, [x], "products"), request["threads"]).create_infer_request()
    vector = np.random.default_rng(1).standard_normal((1, request["columns"]), dtype=np.float32)
    assert first is not None
    error = error_of(run.infer({"x": vector})[0], *first, vector)
    size = first[0].size // 2 + first[1].size * 2
    return {**time_matvec(request, run.infer, len(results), size), "relative_error": error}


if __name__ == "__main__":
    actions = {"prepare": prepare, "measure": lambda request: measure(request, load), "matvec": matvec}
    actions["depths"] = lambda request: measure_depths(request, load)
    main(actions, "openvino")
