"""Constants of a graph: large ones go into a file beside it as they come, so that one matrix is in memory at a time."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from export.source import dtype_name
from runtime.errors import RequestError

if TYPE_CHECKING:
    import onnx_ir

PAGE = 4096  # large constants begin on a page, so that runtimes can map them
LARGE = 1 << 20
ALIGNMENT = 64  # of the others
INLINE = 4096  # bytes up to which a constant stays in the graph's own file


class DataFile:
    """A file of large constants, for one graph or several; what two of them hold alike is written once."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._stream = (folder / name).open("wb")
        self._written: dict[bytes, int] = {}

    def write(self, content: Any) -> int:
        """Append bytes; returns where they begin."""
        digest = hashlib.sha256(content).digest()
        if digest not in self._written:
            size = memoryview(content).nbytes
            self._stream.write(b"\0" * (-self._stream.tell() % (PAGE if size >= LARGE else ALIGNMENT)))
            self._written[digest] = self._stream.tell()
            self._stream.write(content)
        return self._written[digest]

    def close(self) -> None:
        """Close the file; remove it if nothing was written."""
        self._stream.close()
        if not (self.folder / self.name).stat().st_size:
            (self.folder / self.name).unlink()


class Store:
    """The constants of one graph."""

    def __init__(self, model: onnx_ir.Model, data: DataFile) -> None:
        self.graph, self.data = model.graph, data
        self._taken: Counter[str] = Counter()
        self._added: dict[str, onnx_ir.Value] = {}

    def unique(self, name: str) -> str:
        """`name`, with a number where a node has it already: a layer may be called twice."""
        self._taken[name] += 1
        return name if self._taken[name] == 1 else f"{name}.{self._taken[name]}"

    def add(self, name: str, tensor: torch.Tensor, bits: int | None = None) -> onnx_ir.Value:
        """An initializer; `bits=4` packs int8 codes two a byte (INT4). Its value is written at once and not kept.

        One that is there already under the name is given back: it belongs to a layer that is called twice.
        """
        import onnx
        import onnx_ir as ir

        found = self._added.get(name)
        if found is not None:
            return found
        dtype = ir.DataType.INT4 if bits == 4 else onnx_type(tensor.dtype)
        shape = ir.Shape(tensor.shape)
        flat = tensor.detach().contiguous()
        raw = flat.reshape(-1).view(torch.uint8)
        content = (nibbles(raw & 15) if bits == 4 else raw).numpy()
        if content.nbytes <= INLINE:
            inline = onnx.TensorProto(
                name=name, data_type=int(dtype), dims=list(tensor.shape), raw_data=content.tobytes()
            )
            value: Any = ir.serde.TensorProtoTensor(inline)
        else:
            value = self._external(content.data, dtype, shape, name)
        initializer = ir.Value(name=name, const_value=value, shape=shape, type=ir.TensorType(dtype))
        self.graph.register_initializer(initializer)
        self._added[name] = initializer
        return initializer

    def move(self) -> None:
        """Large constants that tracing left in the graph go into the file too."""
        import onnx_ir as ir

        for value in list(self.graph.initializers.values()):
            constant = value.const_value
            if constant is None or isinstance(constant, ir.ExternalTensor) or constant.nbytes <= INLINE:
                continue
            shape = ir.Shape([int(size) for size in constant.numpy().shape])
            value.const_value = self._external(constant.tobytes(), constant.dtype, shape, str(value.name))

    def _external(self, content: Any, dtype: Any, shape: Any, name: str) -> Any:
        import onnx_ir as ir

        start, size, folder = self.data.write(content), memoryview(content).nbytes, str(self.data.folder)
        return ir.ExternalTensor(self.data.name, start, size, dtype, shape=shape, name=name, base_dir=folder)


def in_dtype(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """`values` in `dtype`; RequestError where one overflows, or where a scale (`*_scale`) becomes zero."""
    if values.dtype == dtype:
        return values
    result = values.to(dtype)
    if not bool(result.isfinite().all()) and bool(values.isfinite().all()):
        largest = float(values.float().abs().max())
        raise RequestError(f"{name} holds {largest:.3g}, beyond {dtype_name(dtype)}; choose another dtype")
    if values.numel() and bool(((result == 0) & (values != 0)).any()) and name.endswith("_scale"):
        raise RequestError(f"{name} holds scales too small for {dtype_name(dtype)}; choose another dtype")
    return result


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes, uint8 `[..., n]`, two a byte, the earlier one in the low half."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def onnx_type(dtype: torch.dtype) -> onnx_ir.DataType:
    """ONNX's name of a torch dtype."""
    from onnx_ir.tensor_adapters import from_torch_dtype

    return from_torch_dtype(dtype)
