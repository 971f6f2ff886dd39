"""What a kernel is compiled for: the types of its arguments, what is assumed of their values, its constants and options.

Triton specializes a kernel on each launch: pointers and integers that 16 divides, integers that are 1, and every constant make
another binary. A `Variant` is one of those; a launch may take any whose assumptions hold, so one that assumes less serves more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from runtime.errors import ArtifactError
from runtime.kernels.triton.jit import Entry, Launch

TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.int8: "i8", torch.uint8: "u8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
#: struct's format and bytes of a scalar on its way to the GPU; pointers are eight bytes.
SCALARS = {"i32": ("<i", 4), "i64": ("<q", 8), "fp32": ("<f", 4)}
_POINTERS = frozenset(f"*{name}" for name in TYPES.values())
_CONSTANTS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Argument:
    """One parameter of a variant.

    Attributes:
        type: "*bf16", ..., "i32", "i64", "fp32", or "constexpr": compiled in, and not passed at a launch.
        assumed: "16": its value (an address, for pointers) is divisible by 16; "1": it is 1, which is compiled in; "": anything.
        value: of a constexpr.
    """

    name: str
    type: str
    assumed: str = ""
    value: Any = None

    def key(self) -> tuple[Any, ...]:
        """As itself; True and 1 are told apart."""
        return (self.name, self.type, self.assumed, type(self.value).__name__, self.value)

    def serves(self, call: Argument) -> bool:
        """Whether a kernel with this argument is right for that of a call."""
        if self.type != call.type or self.type == "constexpr":
            return self.key() == call.key()
        return self.assumed in ("", call.assumed)

    @property
    def passed(self) -> bool:
        """Whether a launch passes it."""
        return self.type != "constexpr" and self.assumed != "1"

    @property
    def size(self) -> int:
        """Bytes of it among the arguments of a launch."""
        return 8 if self.type in _POINTERS else SCALARS[self.type][1]

    def as_dict(self) -> dict[str, Any]:
        """For `index.json`."""
        if self.type == "constexpr":
            return {"name": self.name, "type": self.type, "value": self.value}
        return {"name": self.name, "type": self.type, "assumed": self.assumed}

    @classmethod
    def from_dict(cls, given: Any, where: str) -> Argument:
        """Inverse of `as_dict`; ArtifactError where it is not one."""
        if isinstance(given, dict) and isinstance(given.get("name"), str):
            kind, value, assumed = given.get("type"), given.get("value"), given.get("assumed", "")
            if kind == "constexpr" and isinstance(value, _CONSTANTS):
                return cls(given["name"], kind, "", value)
            if (kind in _POINTERS and assumed in ("", "16")) or (kind in SCALARS and assumed in ("", "1", "16")):
                return cls(given["name"], kind, assumed)
        raise ArtifactError(f"{where}: argument {given!r} is none that this runtime can pass")


class Variant:
    """One kernel to compile. Equal ones compile to the same.

    Attributes:
        kernel: `Entry.name`.
        arguments: one a parameter, in order.
        options: those given at the launch, sorted: `(("num_warps", 4),)`.
    """

    def __init__(self, kernel: str, arguments: tuple[Argument, ...], options: tuple[tuple[str, int], ...]) -> None:
        self.kernel, self.arguments, self.options = kernel, arguments, options
        self._key = (kernel, tuple(a.key() for a in arguments), options)
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Variant) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return self.describe()

    def __reduce__(self) -> tuple[Any, ...]:
        return Variant, (self.kernel, self.arguments, self.options)  # a hash belongs to its process

    def describe(self) -> str:
        """`matvec.matvec_kernel(x *bf16/16, M i32/1, GROUP=128, num_warps=4)`."""
        parts = [
            f"{a.name}={a.value}" if a.type == "constexpr" else f"{a.name} {a.type}{a.assumed and '/'}{a.assumed}"
            for a in self.arguments
        ]
        return f"{self.kernel}({', '.join([*parts, *(f'{name}={value}' for name, value in self.options)])})"

    def serves(self, call: Variant) -> bool:
        """Whether a launch that triton would compile `call` for may run this."""
        return (
            self.kernel == call.kernel
            and self.options == call.options
            and len(self.arguments) == len(call.arguments)
            and all(mine.serves(theirs) for mine, theirs in zip(self.arguments, call.arguments, strict=True))
        )

    @property
    def assumptions(self) -> int:
        """How many arguments something is assumed of."""
        return sum(bool(a.assumed) for a in self.arguments)

    @property
    def passed(self) -> list[Argument]:
        """What a launch passes."""
        return [a for a in self.arguments if a.passed]


def specialize(kernel: Entry, arguments: Mapping[str, Any]) -> Variant:
    """The variant that triton would compile for a launch with these arguments (options among them).

    Raises:
        TypeError: an argument is of a kind that no kernel here takes.
    """
    made = tuple(
        _constant(name, arguments[name]) if constant else _argument(name, arguments[name])
        for name, constant in kernel.parameters.items()
    )
    options = tuple(sorted((name, value) for name, value in arguments.items() if name not in kernel.parameters))
    return Variant(kernel.name, made, options)


def of(launch: Launch) -> Variant:
    """The variant of a recorded launch."""
    return specialize(launch.kernel, launch.arguments)


def _constant(name: str, value: Any) -> Argument:
    if not isinstance(value, _CONSTANTS):
        raise TypeError(f"constant {name} is a {type(value).__name__}")
    return Argument(name, "constexpr", "", value)


def _argument(name: str, value: Any) -> Argument:
    if isinstance(value, torch.Tensor):
        return Argument(name, "*" + TYPES[value.dtype], "" if _address(value) % 16 else "16")
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63:
        kind = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
        return Argument(name, kind, "1" if value == 1 else "16" if value % 16 == 0 else "")
    if isinstance(value, float):
        return Argument(name, "fp32")
    raise TypeError(f"argument {name} is a {type(value).__name__}")


def _address(tensor: torch.Tensor) -> int:
    """Of a tensor on meta, as if its storage began at 0: allocations are aligned to more than 16 bytes."""
    return int(tensor.storage_offset()) * tensor.element_size() if tensor.is_meta else tensor.data_ptr()
