"""Specialization of a Triton kernel: the types of its arguments, what is assumed of their values, its constants and options.

Triton compiles a binary for each: pointers and integers that 16 divides, integers that are 1, and every constant make another one.
A `Variant` is one of them; a launch may take any whose assumptions hold, so one that assumes less serves more.
"""

from __future__ import annotations

import ast
import re
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
#: struct's format of a scalar on its way to the GPU; everything else that is passed is an address.
SCALARS = {"i32": "<i", "i64": "<q", "fp32": "<f"}
_PASSED = re.compile(rf"\*({'|'.join(TYPES.values())})(/16)?|({'|'.join(SCALARS)})(/1|/16)?")
_CONSTANTS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Variant:
    """One kernel to compile. Equal ones compile to the same.

    Attributes:
        kernel: `Entry.name`.
        arguments: (name, code) of each parameter, in order. A code is the type that Triton gives it, "*bf16", "i32", with "/16" where
            its value (an address, for pointers) is assumed to be divisible by 16 and "/1" where it is 1, which is compiled in;
            or "=" and a Python literal: a constant.
        options: those given at the launch, sorted: `(("num_warps", 4),)`.
    """

    kernel: str
    arguments: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, int], ...]

    def describe(self) -> str:
        """`matvec.matvec_kernel(x *bf16/16, M i32/1, GROUP=128, num_warps=4)`."""
        parts = [name + code if code.startswith("=") else f"{name} {code}" for name, code in self.arguments]
        return f"{self.kernel}({', '.join([*parts, *(f'{name}={value}' for name, value in self.options)])})"

    def serves(self, call: Variant) -> bool:
        """Whether a launch that Triton would compile `call` for may run this."""
        return (
            (self.kernel, self.options, len(self.arguments)) == (call.kernel, call.options, len(call.arguments))
            and all(
                name == other and code in (wanted, _type(wanted))
                for (name, code), (other, wanted) in zip(self.arguments, call.arguments, strict=True)
            )
        )  # fmt: skip

    @property
    def assumptions(self) -> int:
        """How many arguments something is assumed of."""
        return sum(code != _type(code) for _, code in self.arguments)

    @property
    def passed(self) -> list[tuple[str, str]]:
        """(name, type) of what a launch passes; the rest is compiled in."""
        return [(name, _type(code)) for name, code in self.arguments if code[0] != "=" and not code.endswith("/1")]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each of `passed` among the arguments of a launch."""
        return [4 if kind in ("i32", "fp32") else 8 for _, kind in self.passed]

    @classmethod
    def read(cls, kernel: str, arguments: Mapping[str, Any], options: Mapping[str, Any], where: str) -> Variant:
        """A variant out of `index.json`; ArtifactError, naming `where`, for an argument that cannot be passed."""
        for name, code in arguments.items():
            if not isinstance(code, str) or not (_PASSED.fullmatch(code) or _is_constant(code)):
                raise ArtifactError(f"{where}: argument {name} is {code!r}, which this runtime cannot pass")
        return cls(kernel, tuple(arguments.items()), tuple(sorted(options.items())))


def specialize(kernel: Entry, arguments: Mapping[str, Any]) -> Variant:
    """The variant that Triton would compile for a launch with these arguments (options among them).

    Raises:
        TypeError: an argument is of a kind that no kernel here takes.
    """
    codes = tuple(
        (name, _constant(name, arguments[name]) if constant else _code(name, arguments[name]))
        for name, constant in kernel.parameters.items()
    )
    options: tuple[tuple[str, int], ...] = ()
    if len(arguments) > len(codes):
        options = tuple(sorted((name, value) for name, value in arguments.items() if name not in kernel.parameters))
    return Variant(kernel.name, codes, options)


def of(launch: Launch) -> Variant:
    """The variant of a recorded launch."""
    return specialize(launch.kernel, launch.arguments)


def constant(code: str) -> Any:
    """The value that is compiled in: of "=128", or the 1 of "i32/1"."""
    return ast.literal_eval(code[1:]) if code.startswith("=") else 1


def _type(code: str) -> str:
    return code if code.startswith("=") else code.partition("/")[0]


def _is_constant(code: str) -> bool:
    try:
        return code.startswith("=") and isinstance(ast.literal_eval(code[1:]), _CONSTANTS)
    except (ValueError, SyntaxError):
        return False


def _constant(name: str, value: Any) -> str:
    if not isinstance(value, _CONSTANTS):
        raise TypeError(f"constant {name} is a {type(value).__name__}")
    return f"={value!r}"


def _code(name: str, value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}{'' if _address(value) % 16 else '/16'}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63:
        kind = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
        return kind + ("/1" if value == 1 else "" if value % 16 else "/16")
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"argument {name} is a {type(value).__name__}")


def _address(tensor: torch.Tensor) -> int:
    """Of a tensor on meta, as if its storage began at 0: allocations are aligned to more than 16 bytes."""
    return int(tensor.storage_offset()) * tensor.element_size() if tensor.is_meta else tensor.data_ptr()
