"""The rules of TensorRT: a graph that breaks none, and for every rule one that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from export.tensorrt.rules import RULES, check  # noqa: E402

HEADS = [1, 4, 3, 16]
Breaker = Callable[[Any], None]


def good() -> Any:
    """A quantized product and an attention, as TensorRT takes them."""
    rng = np.random.default_rng(0)
    codes = helper.make_tensor("codes", TensorProto.INT4, [128, 64], rng.integers(-7, 8, 128 * 64).tolist())
    scale = numpy_helper.from_array(np.full((2, 64), 0.1, np.float32), "scale")
    small = numpy_helper.from_array(np.array(0.05, np.float32), "input_scale")
    zero = numpy_helper.from_array(np.array(0, np.int8), "input_zero_point")
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "input_scale", "input_zero_point"], ["xq"], "quantize"),
        helper.make_node("DequantizeLinear", ["xq", "input_scale", "input_zero_point"], ["xd"], "dequantize_input"),
        helper.make_node("DequantizeLinear", ["codes", "scale"], ["w"], "dequantize", axis=0, block_size=64),
        helper.make_node("MatMul", ["xd", "w"], ["y"], "product"),
        helper.make_node("Attention", ["q", "k", "v", "mask"], ["a"], "attention", scale=0.25),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 128]),
        *(helper.make_tensor_value_info(name, TensorProto.FLOAT, HEADS) for name in "qkv"),
        helper.make_tensor_value_info("mask", TensorProto.BOOL, [1, 1, 3, 3]),
    ]
    outputs = [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 64]),
        helper.make_tensor_value_info("a", TensorProto.FLOAT, HEADS),
    ]
    graph = helper.make_graph(nodes, "good", inputs, outputs, [codes, scale, small, zero])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def node(model: Any, name: str) -> Any:
    return next(n for n in model.graph.node if n.name == name)


def initializer(model: Any, name: str, values: Any) -> None:
    """Give an initializer another value."""
    old = next(i for i in model.graph.initializer if i.name == name)
    old.CopyFrom(values if isinstance(values, TensorProto) else numpy_helper.from_array(values, name))


def _int4(name: str, shape: list[int]) -> Any:
    return helper.make_tensor(name, TensorProto.INT4, shape, [1] * int(np.prod(shape)))


def _retype(model: Any, name: str, kind: int, shape: list[Any] | None = None) -> None:
    value = next(v for v in [*model.graph.input, *model.graph.output] if v.name == name)
    old = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
    value.CopyFrom(helper.make_tensor_value_info(name, kind, old if shape is None else shape))


def _into_if(model: Any) -> None:
    attention = node(model, "attention")
    body = helper.make_graph([attention], "branch", [], [helper.make_tensor_value_info("a", TensorProto.FLOAT, HEADS)])
    model.graph.node.remove(attention)
    model.graph.input.append(helper.make_tensor_value_info("which", TensorProto.BOOL, []))
    model.graph.node.append(helper.make_node("If", ["which"], ["a"], "choice", then_branch=body, else_branch=body))


def _computed_codes(model: Any) -> None:
    model.graph.node.insert(0, helper.make_node("Identity", ["codes"], ["codes_later"], "later"))
    node(model, "dequantize").input[0] = "codes_later"


def _uint8_codes(model: Any) -> None:
    initializer(model, "input_zero_point", np.array(0, np.uint8))


def _int8_matrix(model: Any) -> None:
    """Per channel codes, one scale too few."""
    initializer(model, "codes", np.ones((128, 64), np.int8))
    initializer(model, "scale", np.full(63, 0.1, np.float32))
    del node(model, "dequantize").attribute[:]
    node(model, "dequantize").attribute.append(helper.make_attribute("axis", 1))


def _channel_activation(model: Any) -> None:
    initializer(model, "input_scale", np.full(128, 0.05, np.float32))
    initializer(model, "input_zero_point", np.zeros(128, np.int8))


def _huge(model: Any) -> None:
    _retype(model, "x", TensorProto.FLOAT, [1 << 25, 128])


def _operator(model: Any) -> None:
    node(model, "product").op_type = "MatMulInteger"


def _big_heads(model: Any) -> None:
    for name in "qkva":
        _retype(model, name, TensorProto.FLOAT, [1, 4, 3, 512])


def _odd_codes(model: Any) -> None:
    initializer(model, "codes", _int4("codes", [127, 63]))
    initializer(model, "scale", np.full((1, 63), 0.1, np.float32))


BREAKERS: dict[str, Breaker] = {
    "opset": lambda m: m.opset_import[0].__setattr__("version", 26),
    "domain": lambda m: node(m, "product").__setattr__("domain", "com.microsoft"),
    "operator": _operator,
    "type": lambda m: _retype(m, "mask", TensorProto.DOUBLE),
    "same-type": lambda m: initializer(m, "scale", np.full((2, 64), 0.1, np.float16)),
    "quantized-type": _uint8_codes,
    "quantized-opset": lambda m: m.opset_import[0].__setattr__("version", 18),
    "zero-point": lambda m: initializer(m, "input_zero_point", np.array(3, np.int8)),
    "positive-scale": lambda m: initializer(m, "scale", np.full((2, 64), -0.1, np.float32)),
    "scale-type": lambda m: initializer(m, "scale", np.full((2, 64), 0.1, np.float64)),
    "scale-shape": _int8_matrix,
    "block-size": lambda m: initializer(m, "scale", np.full((4, 64), 0.1, np.float32)),
    "even-codes": _odd_codes,
    "int4-weights": _computed_codes,
    "activation-scale": _channel_activation,
    "volume": _huge,
    "attention-outputs": lambda m: node(m, "attention").output.extend(["present_key"]),
    "attention-past": lambda m: node(m, "attention").input.extend(["k", "v"]),
    "attention-in-if": _into_if,
    "attention-attributes": lambda m: node(m, "attention").attribute.append(helper.make_attribute("softcap", 30.0)),
    "attention-shape": _big_heads,
    "attention-mask": lambda m: node(m, "attention").attribute.append(helper.make_attribute("is_causal", 1)),
}  # fmt: skip


def broken(model: Any, folder: Path) -> dict[str, str]:
    onnx.save(model, folder / "model.onnx")
    return {one.rule: one.sentence() for one in check(folder / "model.onnx")}


def test_a_good_graph_breaks_none(tmp_path: Path) -> None:
    model = good()
    onnx.checker.check_model(model)
    assert broken(model, tmp_path) == {}


def test_every_rule_has_a_graph_that_breaks_it() -> None:
    assert sorted(BREAKERS) == sorted(RULES)
    assert all(wants and source for wants, source in RULES.values())


@pytest.mark.parametrize("rule", list(BREAKERS))
def test_each_rule_can_be_broken(tmp_path: Path, rule: str) -> None:
    model = good()
    BREAKERS[rule](model)
    found = broken(model, tmp_path)
    assert rule in found, found
    assert rule in found[rule]
    assert len(found[rule].split(",")) >= 2  # what was found, and what is wanted


def test_a_mask_of_another_type_than_the_queries(tmp_path: Path) -> None:
    model = good()
    _retype(model, "mask", TensorProto.FLOAT16)
    assert "attention-mask" in broken(model, tmp_path)


def test_scales_in_external_data_are_read(tmp_path: Path) -> None:
    model = good()
    initializer(model, "scale", np.full((2, 64), -0.1, np.float32))
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="model.data", size_threshold=0)
    found = check(tmp_path / "model.onnx")
    assert [one.rule for one in found] == ["positive-scale"]
