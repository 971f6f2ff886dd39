"""Launches of this package's kernels: compiled by Triton, or loaded as they were compiled ahead (`aot.py`).

A production machine may have no triton: then files with kernels import all the same (`tl` is None and stands in annotations only),
and what can be launched is what an export brought along. `entry` marks a kernel that Python launches, `jit` a function that
kernels call.
"""

from __future__ import annotations

import inspect
import io
import tokenize
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from textwrap import dedent
from typing import Any, ClassVar

import torch

from runtime.errors import CompressError
from runtime.kernels.triton import gpu
from runtime.system.context import assigned

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None  # type: ignore[assignment]

INSTALLED = triton is not None
#: Files whose kernels an export compiles ahead: those of weights and of the fused engine. Those of compressed caches of transformers'
#: modules (`runtime/kv_cache/kernels`) are not among them: what they are compiled for follows from how the cache fills.
MODULES = (
    "runtime.kernels.triton.block_float", "runtime.kernels.triton.codes", "runtime.kernels.triton.experts",
    "runtime.kernels.triton.float8_block", "runtime.kernels.triton.fused", "runtime.kernels.triton.matmul",
    "runtime.kernels.triton.matvec", "runtime.kernels.triton.rounded",
    "runtime.kernels.triton.routing", "runtime.kernels.triton.sparse24_w4", "runtime.kernels.triton.w8a8",
    "runtime.engines.cuda.chunk_attention", "runtime.engines.cuda.page_store", "runtime.engines.cuda.paged_attention",
    "runtime.engines.cuda.rotary_store", "runtime.engines.cuda.stored_attention",
)  # fmt: skip
#: Given to every kernel, so that results do not depend on the version's default.
OPTIONS = {"enable_fp_fusion": True}
_recorder: ContextVar[Any] = ContextVar("launches", default=None)  # a list of `Launch`


class MissingKernelError(CompressError):
    """No triton here, and no kernel compiled ahead for this launch."""


@dataclass(frozen=True)
class Launch:
    """One recorded launch: `arguments` by name, options such as `num_warps` among them."""

    kernel: Entry
    arguments: dict[str, Any]
    grid: tuple[int, ...]


class _Source:
    """A function of a kernel file where there is no triton."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__name__ = fn.__name__


class Entry:
    """A kernel that Python launches: `kernel[grid](arguments)`, on the device of its first tensor and on torch's stream there.

    Attributes:
        name: file and function, "matvec.matvec_kernel".
        jitted: triton's function; None without triton.
        parameters: {name: whether it is a constant}, in order.
        launcher: launches a kernel on a grid with arguments before triton is asked, or returns False.
    """

    launcher: ClassVar[Callable[[Entry, Sequence[int], dict[str, Any]], bool] | None] = None
    known: ClassVar[dict[str, Entry]] = {}

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__name__ = fn.__name__
        self.name = f"{fn.__module__.rpartition('.')[2]}.{fn.__name__}"
        self.jitted = triton.jit(fn) if INSTALLED else None
        signature = inspect.signature(fn).parameters.values()
        self.parameters = {p.name: "constexpr" in str(p.annotation) for p in signature}
        self._names = tuple(self.parameters)
        Entry.known[self.name] = self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        recorder = _recorder.get()
        if recorder is not None:
            recorder.append(Launch(self, self._named(args, options), grid))
            return
        tensor = next(value for value in (*args, *options.values()) if isinstance(value, torch.Tensor))
        with gpu.entered(tensor.device):
            launcher = Entry.launcher
            if launcher is not None and launcher(self, grid, self._named(args, options)):
                return
            if self.jitted is None:
                raise MissingKernelError(
                    f"kernel {self.name} was not compiled ahead for these arguments, and triton is not installed"
                )
            self.jitted[grid](*args, **(options | OPTIONS))

    def _named(self, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(self._names, args, strict=False)) | options

    @cached_property
    def source(self) -> str:
        """SHA-256 of the tokens of the kernel, the functions it calls, the constants it reads and `OPTIONS`; comments do not count.

        A kernel compiled ahead is launched only by a runtime that has the same.
        """
        parts = {"OPTIONS": str(OPTIONS)}
        collect_source(self.fn, parts)
        return sha256("\n".join(f"{name} {text}" for name, text in sorted(parts.items())).encode()).hexdigest()


def entry(fn: Callable[..., Any]) -> Entry:
    """Decorator of a kernel that Python launches."""
    return Entry(fn)


def jit(fn: Callable[..., Any]) -> Any:
    """Decorator of a function that kernels call."""
    return triton.jit(fn) if INSTALLED else _Source(fn)


def recording() -> AbstractContextManager[list[Launch]]:
    """While active, launches of this thread are written down and not run. Tensors may be on meta."""
    found: list[Launch] = []
    return assigned(_recorder, found)


def is_recording() -> bool:
    """Whether launches are written down."""
    return _recorder.get() is not None


def kernel_constant(value: Any) -> Any:
    """A constant that kernels of a file read: triton's own kind of it, where there is triton."""
    return value if tl is None else tl.constexpr(value)


def cdiv(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below `n`, for `n >= 1`."""
    return 1 << (n - 1).bit_length()


def collect_source(fn: Callable[..., Any], parts: dict[str, str]) -> None:
    """Tokens of `fn` and, by name, of everything of ours that it reads."""
    tokens = tokens_of(dedent(inspect.getsource(fn)))
    parts[f"{fn.__module__}.{fn.__name__}"] = " ".join(tokens)
    for name in sorted(set(tokens)):
        value = fn.__globals__.get(name)
        inner = getattr(value, "fn", None)
        if inner is not None and f"{inner.__module__}.{inner.__name__}" not in parts:
            collect_source(inner, parts)
        elif isinstance(value := getattr(value, "value", value), (bool, int, float, str)):  # of `kernel_constant`
            parts[f"{fn.__module__}:{name}"] = repr(value)


def tokens_of(source: str) -> list[str]:
    """Of a function: no comments, no layout beyond what Python reads."""
    marks = {tokenize.NEWLINE: ";", tokenize.INDENT: "{", tokenize.DEDENT: "}"}
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER)
    return [marks.get(token.type, token.string) for token in found if token.type not in ignored]
