"""The ONNX parser: inputs and outputs of the file; what it computes, ONNX Runtime computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fake_tensorrt.listing import Listed
from fake_tensorrt.network import TYPE, ITensor

KINDS = {"FLOAT": "FLOAT", "FLOAT16": "HALF", "BFLOAT16": "BF16", "INT64": "INT64", "INT32": "INT32", "BOOL": "BOOL"}


class ParserError(Listed):
    _name = "ParserError"

    def do_desc(self) -> str:
        return self._state["_desc"]

    def do_node_operator(self) -> str:
        return self._state["_operator"]

    def do_node_name(self) -> str:
        return self._state["_node"]

    def do_node(self) -> int:
        return 0


class OnnxParser(Listed):
    """It refuses what it has no importer for, like the real one."""

    _name = "OnnxParser"

    def _start(self, network: Any, logger: Any) -> None:
        self._network, self._errors = network, []

    def __getattr__(self, name: str) -> Any:
        return len(self._errors) if name == "num_errors" else super().__getattr__(name)

    def do_parse_from_file(self, model: str) -> bool:
        import onnx

        proto = onnx.load(model, load_external_data=False)
        for node in proto.graph.node:
            if node.domain not in ("", "ai.onnx") or node.op_type == "MatMulInteger":
                text = f"No importer registered for op: {node.op_type}.\n"
                self._errors.append(ParserError._make(_desc=text, _operator=node.op_type, _node=node.name))
        for value in proto.graph.input:
            self._network._inputs.append(_tensor(value))
        for value in proto.graph.output:
            self._network._outputs.append(_tensor(value))
        if not self._errors:  # the real parser copies the weights, too; the file may go
            self._network._onnx = open_session(Path(model))
        return not self._errors

    def do_get_error(self, index: int) -> Any:
        return self._errors[index]


class OnnxParserRefitter(Listed):
    _name = "OnnxParserRefitter"

    def _start(self, refitter: Any, logger: Any) -> None:
        self._refitter = refitter

    def __getattr__(self, name: str) -> Any:
        return 0 if name == "num_errors" else super().__getattr__(name)

    def do_refit_from_file(self, model: str) -> bool:
        self._refitter._engine._session = open_session(Path(model))
        return True


def open_session(path: Path) -> Any:
    """ONNX Runtime on a file, with quantized products as the graph says them."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _tensor(value: Any) -> Any:
    import onnx

    proto = value.type.tensor_type
    shape = tuple(int(d.dim_value) if d.HasField("dim_value") else -1 for d in proto.shape.dim)
    kind = KINDS[onnx.TensorProto.DataType.Name(proto.elem_type)]
    return ITensor._make(name=value.name, dtype=TYPE[kind], shape=shape)
