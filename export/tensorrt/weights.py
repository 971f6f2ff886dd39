"""The initializers of an ONNX file as TensorRT weights: by name, mapped from the file, never unpacked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.errors import CompressError

#: ONNX type -> TensorRT's `DataType` member and bits an element.
TYPES = {
    "FLOAT": ("FLOAT", 32), "FLOAT16": ("HALF", 16), "BFLOAT16": ("BF16", 16), "FLOAT8E4M3FN": ("FP8", 8), "INT8": ("INT8", 8),
    "INT4": ("INT4", 4), "INT32": ("INT32", 32), "INT64": ("INT64", 64), "BOOL": ("BOOL", 8),
}  # fmt: skip
_COPIED = 1 << 20  # bytes up to which a constant is copied, so that it is aligned


@dataclass(frozen=True)
class Weight:
    """One constant.

    Attributes:
        dtype: name of TensorRT's `DataType`.
        shape: of the tensor.
        data: its bytes, flat uint8; 4-bit codes two a byte, the first in the low half.
    """

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, Any]

    @property
    def count(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


class OnnxWeights:
    """The initializers of one ONNX model.

    Args:
        path: the .onnx file; external data lies beside it.
        aliases: {name: initializer}; tracing keeps one of several equal constants.
    """

    def __init__(self, path: Path, aliases: Mapping[str, str] | None = None) -> None:
        import onnx_ir

        self.path = path
        self.model = onnx_ir.load(path)
        self._values = {name: value.const_value for name, value in self.model.graph.initializers.items()}
        for name, stored in (aliases or {}).items():
            self._values.setdefault(name, self._find(stored))

    def add_aliases(self, wanted: Mapping[str, bytes]) -> dict[str, str]:
        """Find constants by their bytes: {name: initializer} of those that are not there under their own names, and are under
        another. They can be read under both from now on."""
        missing = {name: content for name, content in wanted.items() if name not in self}
        sizes = {len(content) for content in missing.values()}
        stored = {t.tobytes(): name for name, t in self._values.items() if t is not None and t.nbytes in sizes}
        found = {name: stored[content] for name, content in missing.items() if content in stored}
        self._values |= {name: self._values[other] for name, other in found.items()}
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def names(self) -> list[str]:
        return list(self._values)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an initializer, without reading it."""
        return tuple(int(n) for n in self._find(name).shape)

    def get(self, name: str) -> Weight:
        """One initializer.

        Raises:
            CompressError: there is none of that name, or its type has no counterpart in TensorRT.
        """
        tensor = self._find(name)
        kind = tensor.dtype.name
        if kind not in TYPES:
            raise CompressError(f"{self.path.name}: {name} is of type {kind}, which TensorRT does not have")
        return Weight(TYPES[kind][0], self.shape(name), _bytes(tensor))

    def _find(self, name: str) -> Any:
        tensor = self._values.get(name)
        if tensor is None:
            raise CompressError(f"{self.path.name} has no initializer {name}")
        return tensor


def _bytes(tensor: Any) -> np.ndarray[Any, Any]:
    import onnx_ir

    if isinstance(tensor, onnx_ir.ExternalTensor) and (tensor.length or 0) > _COPIED:
        return np.memmap(tensor.path, np.uint8, "r", offset=tensor.offset or 0, shape=(int(tensor.length or 0),))
    return np.frombuffer(bytearray(tensor.tobytes()), np.uint8)
