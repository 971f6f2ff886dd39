"""Linear layers and embeddings as operators and constants.

Layers that read the same input (queries, keys and values; gate and up) may become one product with a wider matrix. Columns of a
product do not know of each other, so that nothing changes but the number of calls: on a CPU each costs a round of its threads, which
at one token is as long as a small matrix takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from export.onnx_graph.builder import Builder
from export.onnx_graph.dialect import Dialect, layer_rules, multiplies_integers
from export.onnx_graph.grid import Grid, to_grid
from export.onnx_graph.matmul_nbits import matmul_nbits, widened
from export.onnx_graph.store import onnx_type
from export.source import Source
from export.target import Job
from runtime.formats.input_transform import LEFT, ORDER, RIGHT, matrices
from runtime.formats.scheme import ActivationScheme
from runtime.kernels.activations import code_limits

if TYPE_CHECKING:
    import onnx_ir


FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Quantized:
    """An input on its grid.

    Attributes:
        codes: int8 or float8_e4m3fn, shape of the input.
        scale: one a token `[..., 1]`, or one for all.
        zero_point: like `scale`, as a float (`dynamic`) or as a code (`static`); None when symmetric and dynamic.
    """

    codes: onnx_ir.Value
    scale: onnx_ir.Value
    zero_point: onnx_ir.Value | None


def _static(
    b: Builder, x: onnx_ir.Value, module: str, scheme: ActivationScheme, source: Source, dtype: torch.dtype
) -> Quantized:
    """`QuantizeLinear` with the calibrated scale: codes, one scale and one zero point for all."""
    scale = source.input_scale(module)
    assert scale is not None
    code = FLOAT8 if scheme.type == "float" else torch.int8
    zero = source.input_zero_point(module)
    zero = torch.zeros(1, dtype=code) if zero is None else zero.to(code)
    step = b.stored(f"{module}.input_scale", scale.reshape(()), dtype)
    point = b.store.add(f"{module}.input_zero_point", zero.reshape(()))
    return Quantized(b.op("QuantizeLinear", [x, step, point], "QuantizeLinear"), step, point)


def _dynamic(b: Builder, x: onnx_ir.Value, scheme: ActivationScheme, dtype: torch.dtype) -> Quantized:
    """Codes and scale made at run time, for each token or for the whole tensor."""
    smallest, largest = code_limits(scheme)
    axes = [b.constant([-1])] if scheme.strategy == "token" else []
    zero, eps = b.constant(0.0, dtype), b.constant(float(torch.finfo(dtype).eps), dtype)

    def positive(scale: onnx_ir.Value) -> onnx_ir.Value:
        empty = b.op("Equal", [scale, zero], "input/empty")
        return b.op("Where", [empty, eps, scale], "input/scale")

    point = None
    if scheme.symmetric:
        extreme = b.op("ReduceMax", [b.op("Abs", [x], "input/Abs"), *axes], "input/extreme", keepdims=1)
        scale = positive(b.op("Div", [extreme, b.constant((largest - smallest) / 2, dtype)], "input/step"))
        codes = b.op("Div", [x, scale], "input/scaled")
    else:
        low = b.op("Min", [b.op("ReduceMin", [x, *axes], "input/lowest", keepdims=1), zero], "input/low")
        high = b.op("Max", [b.op("ReduceMax", [x, *axes], "input/highest", keepdims=1), zero], "input/high")
        width = b.constant(largest - smallest, dtype)
        scale = positive(b.op("Div", [b.op("Sub", [high, low], "input/range"), width], "input/step"))
        least, most = b.constant(smallest, dtype), b.constant(largest, dtype)
        offset = b.op("Sub", [least, b.op("Div", [low, scale], "input/lowest_code")], "input/offset")
        clipped = b.op("Clip", [offset, least, most], "input/offset_clipped")
        point = b.op("Round", [clipped], "input/zero_point")
        codes = b.op("Add", [b.op("Div", [x, scale], "input/scaled"), point], "input/shifted")
    codes = b.op("Clip", [codes, b.constant(smallest, dtype), b.constant(largest, dtype)], "input/clipped")
    if scheme.type == "float":
        codes = b.cast(codes, FLOAT8, "input/codes")
    else:
        codes = b.cast(b.op("Round", [codes], "input/rounded"), torch.int8, "input/codes")
    return Quantized(codes, scale, point)


def _dequantize(b: Builder, quantized: Quantized, like: onnx_ir.Value, dtype: torch.dtype) -> onnx_ir.Value:
    """The rounded input in `dtype`."""
    values = b.cast(quantized.codes, dtype, "input/values")
    if quantized.zero_point is not None:
        values = b.op("Sub", [values, quantized.zero_point], "input/centred")
    return b.op("Mul", [values, quantized.scale], "input/rounded_input", like=like)


def write_linear(b: Builder, job: Job, module: str, x: onnx_ir.Value, dialect: Dialect) -> onnx_ir.Value:
    """`x [..., K]` times the layer's matrix, plus its bias."""
    entry = job.source.entries.get(module)
    product = _dense if entry is None or entry.scheme.grid is None else _compressed
    return add_bias(b, job, module, product(b, job, module, x, dialect), dialect)


def add_bias(b: Builder, job: Job, module: str, result: onnx_ir.Value, dialect: Dialect) -> onnx_ir.Value:
    """`result [..., N]` plus the layer's bias, if it has one."""
    bias = job.source.bias(module)
    if bias is not None:
        value = b.stored(f"{module}.bias", bias, dialect.dtype)
        result = b.op("Add", [result, value], f"{module.rpartition('.')[2]}/Add")
    return result


def write_embedding(b: Builder, job: Job, module: str, ids: onnx_ir.Value, dialect: Dialect) -> onnx_ir.Value:
    """Rows of the table; a compressed table is stored dense, in the artifact's dtype."""
    table = _table(b, job, module, dialect)
    rows = b.op("Gather", [table, ids], "Gather", axis=0)
    return b.cast(rows, dialect.dtype) if table.dtype != onnx_type(dialect.dtype) else rows


def written_grid(job: Job, module: str, dialect: Dialect) -> Grid:
    """The layer's weight as it is written; what rounding it anew costs is put down in `job.losses`."""
    rules = layer_rules(job.source.entries[module].scheme, dialect)
    grid = to_grid(job.source.weight(module), rules, job.options.requantize, module)
    if grid.loss:
        job.losses[module] = grid.loss
    return grid


def _compressed(b: Builder, job: Job, module: str, x: onnx_ir.Value, dialect: Dialect) -> onnx_ir.Value:
    scheme, grid = job.source.entries[module].scheme, written_grid(job, module, dialect)
    acts = scheme.activations
    if scheme.transform is not None:
        x = _transformed(b, job.source, module, x, dialect.dtype)
    if acts is None:
        return _product(b, module, x, grid, dialect)
    integers = multiplies_integers(scheme)
    if not acts.dynamic:
        quantized = _static(b, x, module, acts, job.source, dialect.dtype)
        if integers and dialect.own_operators:
            return _integer_product(b, module, quantized, grid, dialect)
        inputs = [quantized.codes, quantized.scale, quantized.zero_point]
        rounded = b.op("DequantizeLinear", inputs, "input/DequantizeLinear", like=x)
        return _product(b, module, rounded, grid, dialect)
    quantized = _dynamic(b, x, acts, dialect.dtype)
    if integers:
        return _integer_product(b, module, quantized, grid, dialect)
    return _product(b, module, _dequantize(b, quantized, x, dialect.dtype), grid, dialect)


def _transformed(b: Builder, source: Source, module: str, x: onnx_ir.Value, dtype: torch.dtype) -> onnx_ir.Value:
    """The input in the layer's basis, see `InputTransform` and `InputOrder`."""
    tensors = source.input_matrices(module)
    if ORDER in tensors:
        return b.op("Gather", [x, b.store.add(f"{module}.{ORDER}", tensors[ORDER])], "input/ordered", axis=-1)
    left, right = matrices(tensors)
    sizes = [-1, 1 if left is None else len(left), len(right)]
    pieces = b.op("Reshape", [x, b.constant(sizes)], "input/pieces")
    found = b.op("MatMul", [pieces, b.stored(f"{module}.{RIGHT}", right, dtype)], "input/right")
    if left is not None:
        found = b.op("MatMul", [b.stored(f"{module}.{LEFT}", left.T.contiguous(), dtype), found], "input/left")
    return b.op("Reshape", [found, b.op("Shape", [x], "input/shape")], "input/transformed", like=x)


def _integer_product(b: Builder, module: str, x: Quantized, grid: Grid, dialect: Dialect) -> onnx_ir.Value:
    """int8 codes times int8 codes, summed in int32, scaled once for the token and once for the column.

    Scaled in float32 whatever the dtype of the graph: sums pass float16's 65504 with as few as five inputs.
    """
    assert grid.block is None
    codes = b.store.add(f"{module}.weight_codes", grid.codes)
    scale = b.stored(f"{module}.weight_scale", grid.scale.reshape(-1), torch.float32)
    factors = [x.codes, codes] if x.zero_point is None else [x.codes, codes, x.zero_point]
    sums = b.cast(b.op("MatMulInteger", factors, "MatMulInteger"), torch.float32, "sums")
    wide = dialect.dtype == torch.float32
    token = x.scale if wide else b.cast(x.scale, torch.float32, "by_token/scale")
    scaled = b.op("Mul", [b.op("Mul", [sums, token], "by_token"), scale], "by_column")
    return scaled if wide else b.cast(scaled, dialect.dtype, "narrowed")


def _product(b: Builder, module: str, x: onnx_ir.Value, grid: Grid, dialect: Dialect) -> onnx_ir.Value:
    """MatMul with a weight that is dequantized inside it: fused by the runtime, never by itself."""
    if grid.codes.dtype == torch.float8_e4m3fn:
        return _float8_product(b, module, x, grid, dialect)
    if dialect.own_operators and grid.block is not None:
        return matmul_nbits(b, module, x, grid, dialect)
    codes = b.store.add(f"{module}.weight_codes", grid.codes, 4 if grid.bits == 4 else None)
    inputs = [codes, _scale(b, module, grid.scale, dialect)]
    if grid.zero_point is not None:
        inputs.append(b.store.add(f"{module}.weight_zero_point", grid.zero_point, 4 if grid.bits == 4 else None))
    attributes: dict[str, Any] = {"axis": 0, "block_size": grid.block} if grid.block is not None else {"axis": 1}
    weight = b.op("DequantizeLinear", inputs, "DequantizeLinear", **attributes)
    return b.op("MatMul", [x, weight], "MatMul")


def _float8_product(b: Builder, module: str, x: onnx_ir.Value, grid: Grid, dialect: Dialect) -> onnx_ir.Value:
    codes = b.store.add(f"{module}.weight_codes", grid.codes)
    if dialect.rules.float8_dequantize:
        weight = b.op("DequantizeLinear", [codes, _scale(b, module, grid.scale, dialect)], "DequantizeLinear", axis=1)
    else:
        # ONNX Runtime has no fp8 product on CPUs and would dequantize at every call; Cast and Mul it computes once, at load.
        scale = b.stored(f"{module}.weight_scale", grid.scale, dialect.dtype)
        # As a mark where there are fusions, which would compute it while writing and store what they join wide.
        values = (widened if dialect.own_operators else Builder.cast)(b, codes, dialect.dtype, "values")
        weight = b.op("Mul", [values, scale], "weight")
    return b.op("MatMul", [x, weight], "MatMul")


def _scale(b: Builder, module: str, scale: torch.Tensor, dialect: Dialect) -> onnx_ir.Value:
    """The scales, stored in 16 bits where that is exact; in the dtype of the graph when they are read."""
    exact = dialect.name != "tensorrt" and torch.equal(scale.to(torch.float16).float(), scale.float())
    stored = b.stored(f"{module}.weight_scale", scale, torch.float16 if exact else dialect.dtype)
    return b.cast(stored, dialect.dtype, "scale") if exact and dialect.dtype != torch.float16 else stored


def _dense(b: Builder, job: Job, module: str, x: onnx_ir.Value, dialect: Dialect) -> onnx_ir.Value:
    source = job.source
    twin = _twin(job, module)
    if twin is not None:
        # One table for embedding and head; transposed when the session starts, not in the file.
        table = _table(b, job, twin, dialect)
        weight = b.op("Transpose", [_read(b, table, dialect)], "Transpose", perm=[1, 0])
    else:
        dense = source.matrix(module)
        weight = _read(b, _stored(b, f"{module}.weight", dense.t().contiguous(), dialect), dialect)
    return b.op("MatMul", [x, weight], "MatMul")


def _twin(job: Job, module: str) -> str | None:
    """The embedding that the layer's weight is tied to and that is stored in its place."""
    name, source, checkpoint = f"{module}.weight", job.source, job.source.artifact.checkpoint
    for other in (other for pair in source.tied.items() if name in pair for other in pair if other != name):
        embedding = other.rpartition(".")[0]
        if module in source.entries or embedding not in source.embeddings:
            continue
        if not checkpoint.has(name) or (
            checkpoint.has(other) and torch.equal(checkpoint.get(name), checkpoint.get(other))
        ):
            return embedding
    return None


def _table(b: Builder, job: Job, module: str, dialect: Dialect) -> onnx_ir.Value:
    name = f"{module}.weight"
    found = b.store.graph.initializers.get(name)
    if found is not None:
        return found
    return _stored(b, name, job.source.matrix(module), dialect)


def _stored(b: Builder, name: str, dense: torch.Tensor, dialect: Dialect) -> onnx_ir.Value:
    """In the file 16-bit floats stay as they are and are widened when they are read."""
    narrow = dialect.name == "tensorrt" or dialect.dtype == torch.float16
    return b.stored(name, dense, dialect.dtype if narrow else dense.dtype)


def _read(b: Builder, stored: onnx_ir.Value, dialect: Dialect) -> onnx_ir.Value:
    if dialect.own_operators:  # the fusions join dense matrices into new ones, wide and beside the old ones in the file
        return widened(b, stored, dialect.dtype, "weight")
    return stored if stored.dtype == onnx_type(dialect.dtype) else b.cast(stored, dialect.dtype, "weight")


def groups(job: Job, marks: Iterable[onnx_ir.Node]) -> dict[onnx_ir.Node, list[onnx_ir.Node]]:
    """{first mark: its group of two or more}: linear layers of one block and one scheme on one value, whose inputs are not rounded."""
    found: dict[object, list[onnx_ir.Node]] = {}
    modules: list[str] = []
    for mark in marks:
        if mark.op_type != "Linear":
            continue
        module = mark.attributes.get_string("module", "")
        modules.append(module)
        entry = job.source.entries.get(module)
        if entry is None or entry.scheme.grid is None or entry.scheme.grid.type != "int":
            continue
        if entry.scheme.activations is None and entry.scheme.transform is None:
            found.setdefault((mark.inputs[0], module.rpartition(".")[0], entry.scheme.grid), []).append(mark)
    # A layer that is called twice keeps a matrix of its own, which both calls share.
    once = {module for module, count in Counter(modules).items() if count == 1}
    kept = [[m for m in group if m.attributes.get_string("module", "") in once] for group in found.values()]
    return {group[0]: group for group in kept if len(group) > 1}


def write_together(b: Builder, job: Job, modules: list[str], x: onnx_ir.Value, dialect: Dialect) -> list[onnx_ir.Value]:
    """`x [..., K]` times the matrices of `modules`, plus their biases: one `[..., N]` each."""
    grids = [written_grid(job, module, dialect) for module in modules]
    product = matmul_nbits(b, joined(modules), x, _beside(grids), dialect)
    sizes = b.constant([grid.codes.shape[1] for grid in grids])
    parts = b.op("Split", [product, sizes], "Split", outputs=len(modules), axis=-1)
    return [add_bias(b, job, module, part, dialect) for module, part in zip(modules, parts, strict=True)]


def _beside(grids: list[Grid]) -> Grid:
    """One matrix of all columns. One scheme makes grids of one kind."""
    first = grids[0]
    assert len({(grid.bits, grid.block, grid.zero_point is None) for grid in grids}) == 1
    zeros = [grid.zero_point for grid in grids if grid.zero_point is not None]
    codes, scale = (torch.cat(parts, 1) for parts in ([grid.codes for grid in grids], [grid.scale for grid in grids]))
    return Grid(codes, first.bits, scale, torch.cat(zeros, 1) if zeros else None, first.block)


def joined(modules: list[str]) -> str:
    """`model.layers.0.self_attn.q_proj+k_proj+v_proj`."""
    return "+".join([modules[0], *(module.rpartition(".")[2] for module in modules[1:])])
