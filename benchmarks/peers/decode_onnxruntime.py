"""ONNX Runtime: a decoder of its own fused operators, MatMulNBits (int4, accuracy level 4) and GroupQueryAttention.

The graph is what onnxruntime-genai's model builder makes for a Llama on CPU, written down here: float32 activations, float16
embedding, logits of the last position only, and a cache that the attention updates in place through IO binding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
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
    rotary,
    rtn,
    time_matvec,
)
from onnx import TensorProto, helper, numpy_helper

FILE, DATA = "model.onnx", "model.onnx.data"
MS = "com.microsoft"
LEVEL = 4  # activations as int8 per block


def nibbles(codes: np.ndarray, group: int = GROUP) -> np.ndarray:
    """MatMulNBits' layout: `[n, blocks, group / 2]`, the even column in the low half."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).reshape(codes.shape[0], -1, group // 2)


class Graph:
    """Nodes and initializers; large ones go into a file beside the model as they come."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.data = directory, (directory / DATA).open("wb")
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []

    def constant(self, name: str, value: np.ndarray) -> str:
        if value.nbytes < 1024:
            self.initializers.append(numpy_helper.from_array(value, name))
            return name
        tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(value.dtype), dims=value.shape)
        tensor.data_location = TensorProto.EXTERNAL
        self.data.write(b"\0" * (-self.data.tell() % 4096))
        where = {"location": DATA, "offset": str(self.data.tell()), "length": str(value.nbytes)}
        for key, text in where.items():
            tensor.external_data.add(key=key, value=text)
        self.data.write(np.ascontiguousarray(value).tobytes())
        self.initializers.append(tensor)
        return name

    def node(
        self, kind: str, inputs: Sequence[str], output: str | Sequence[str], domain: str = "", **fields: Any
    ) -> str:
        outputs = [output] if isinstance(output, str) else list(output)
        self.nodes.append(helper.make_node(kind, list(inputs), outputs, name=outputs[0], domain=domain, **fields))
        return outputs[0]

    def linear(self, x: str, name: str, codes: np.ndarray, scale: np.ndarray, output: str = "") -> str:
        group = codes.shape[1] // scale.shape[1]
        weight = self.constant(f"{name}.codes", nibbles(codes, group))
        scales = self.constant(f"{name}.scale", scale.astype(np.float32).reshape(-1))
        rows, columns = codes.shape
        return self.node(
            "MatMulNBits", [x, weight, scales], output or f"{name}.out", MS, K=columns, N=rows, bits=4,
            block_size=group, accuracy_level=LEVEL,
        )  # fmt: skip

    def save(self, inputs: list[Any], outputs: list[Any]) -> str:
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, self.initializers)
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid(MS, 1)]
        self.data.close()
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), self.directory / FILE)
        return str(self.directory / FILE)


def prepare(request: dict[str, Any]) -> dict[str, Any]:
    s, source = Shape.read(request["model"]), Checkpoint(request["model"])
    g = Graph(Path(request["path"]))
    value = helper.make_tensor_value_info
    inputs = [
        value("ids", TensorProto.INT64, [1, "tokens"]),
        value("last", TensorProto.INT32, [1]),
        value("total", TensorProto.INT32, []),
    ]
    outputs = [value("logits", TensorProto.FLOAT, [1, 1, s.vocabulary])]
    cos, sin = rotary(s, source.positions)
    g.constant("cos", cos), g.constant("sin", sin)
    g.constant("minus_one", np.array([-1], np.int64))
    g.constant("embed", source.array("model.embed_tokens.weight").astype(np.float16))
    x = g.node("Cast", [g.node("Gather", ["embed", "ids"], "embedded16")], "embedded", to=TensorProto.FLOAT)
    eps = {"epsilon": s.eps}
    branch = ""
    for i in range(s.layers):
        norms = [g.constant(f"{i}.norm{k}", source.array(n)) for k, n in enumerate(layer_norms(i), 1)]
        m = {key: rtn(source.array(*names)) for key, names in layer_matrices(i).items()}
        if branch:
            h = g.node(
                "SkipSimplifiedLayerNormalization", [x, branch, norms[0]], [f"{i}.h1", "", "", f"{i}.x1"], MS, **eps
            )
            x = f"{i}.x1"
        else:
            h = g.node("SimplifiedLayerNormalization", [x, norms[0]], f"{i}.h1", axis=-1, **eps)
        qkv = g.linear(h, f"{i}.qkv", *m["qkv"])
        cache = [f"past.{i}.key", f"past.{i}.value"], [f"present.{i}.key", f"present.{i}.value"]
        for kind, names in zip((inputs, outputs), cache, strict=True):
            kind += [value(name, TensorProto.FLOAT, [1, s.kv_heads, "context", s.head]) for name in names]
        attended = g.node(
            "GroupQueryAttention", [qkv, "", "", *cache[0], "last", "total", "cos", "sin"], [f"{i}.att", *cache[1]],
            MS, num_heads=s.heads, kv_num_heads=s.kv_heads, do_rotary=1, rotary_interleaved=0,
        )  # fmt: skip
        out = g.linear(attended, f"{i}.o", *m["o"])
        names = [f"{i}.h2", "", "", f"{i}.x2"]
        h, x = g.node("SkipSimplifiedLayerNormalization", [x, out, norms[1]], names, MS, **eps), f"{i}.x2"
        gate, up = g.linear(h, f"{i}.gate", *m["gate"]), g.linear(h, f"{i}.up", *m["up"])
        silu = g.node("Mul", [gate, g.node("Sigmoid", [gate], f"{i}.sigmoid")], f"{i}.silu")
        branch = g.linear(g.node("Mul", [silu, up], f"{i}.product"), f"{i}.down", *m["down"])
    norm = g.constant("norm", source.array("model.norm.weight"))
    g.node("SkipSimplifiedLayerNormalization", [x, branch, norm], "final", MS, **eps)
    g.node("Gather", ["final", "minus_one"], "final_last", axis=1)
    g.linear("final_last", "head", *rtn(source.array("lm_head.weight")), output="logits")
    g.save(inputs, outputs)
    return {"bytes": sum(file.stat().st_size for file in Path(request["path"]).iterdir())}


def session(model: str, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class Decoder(CachedEngine):
    """One session, its cache in ORT's memory, past and present the same buffers."""

    def __init__(self, request: dict[str, Any]) -> None:
        s = Shape.read(request["model"])
        self.session = session(str(Path(request["path"]) / FILE), request["threads"])
        size = [1, s.kv_heads, request["context"], s.head]
        make = ort.OrtValue.ortvalue_from_shape_and_type
        self.cache = [make(size, np.float32, "cpu") for _ in range(2 * s.layers)]
        self.names = [f"{i}.{kind}" for i in range(s.layers) for kind in ("key", "value")]
        self.length = 0

    def run(self, ids: Sequence[int]) -> np.ndarray:
        self.length += len(ids)
        binding = self.session.io_binding()
        # The binding keeps no reference to the arrays: they must live until it has run.
        inputs = {
            "ids": np.array([list(ids)], np.int64),
            "last": np.array([self.length - 1], np.int32),
            "total": np.array(self.length, np.int32),
        }
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output("logits")
        for name, tensor in zip(self.names, self.cache, strict=True):
            binding.bind_ortvalue_input(f"past.{name}", tensor)
            binding.bind_ortvalue_output(f"present.{name}", tensor)
        self.session.run_with_iobinding(binding)
        return binding.get_outputs()[0].numpy()

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        self.length = 0
        return self.run(ids)

    def repeat(self, length: int) -> None:
        """The first positions of the cache once more behind it, until it is `length` long (keys keep the turn of their first place)."""
        for tensor in self.cache:
            array = tensor.numpy().copy()
            for start in range(self.length, length, self.length):
                end = min(length, start + self.length)
                array[:, :, start:end] = array[:, :, : end - start]
            tensor.update_inplace(array)
        self.length = length


def load(request: dict[str, Any]) -> Engine:
    return Decoder(request)


def matvec(request: dict[str, Any]) -> dict[str, Any]:
    g = Graph(Path(request["path"]))
    outputs, first = [], None
    for copy, (codes, scale) in enumerate(matvec_data(request)):
        g.linear("x", str(copy), codes, scale)
        outputs.append(helper.make_tensor_value_info(f"{copy}.out", TensorProto.FLOAT, [1, request["rows"]]))
        first = first or (codes, scale)
    model = g.save([helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, request["columns"]])], outputs)
    run = session(model, request["threads"])
    x = np.random.default_rng(1).standard_normal((1, request["columns"]), dtype=np.float32)
    binding = run.io_binding()
    binding.bind_cpu_input("x", x)
    for output in outputs:
        binding.bind_output(output.name)
    run.run_with_iobinding(binding)
    assert first is not None
    error = error_of(binding.get_outputs()[0].numpy(), *first, x)
    size = first[0].size // 2 + first[1].size * 4
    times = time_matvec(request, lambda: run.run_with_iobinding(binding), len(outputs), size)
    return {**times, "relative_error": error}


if __name__ == "__main__":
    actions = {"prepare": prepare, "measure": lambda request: measure(request, load), "matvec": matvec}
    actions["depths"] = lambda request: measure_depths(request, load)
    main(actions, "onnxruntime")
