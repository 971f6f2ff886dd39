"""The C kernels of this folder as a library: which instruction set, which threads, and the types that cross the border."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from runtime.errors import RequestError
from runtime.system import instruction_sets, native

# Working memory of the C kernels: one buffer a thread, kept between calls, so that concurrent calls never share one.

_KEPT = 1 << 26  # bytes; a larger buffer is given back after use
_local = threading.local()


def tensor_of(count: int) -> torch.Tensor:
    """At least `count` bytes, uint8, of this thread; what the last call left there is overwritten."""
    buffer: torch.Tensor | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.numel() < count:
        buffer = torch.empty(max(count, 1 << 16), dtype=torch.uint8)
        _local.buffer = buffer
    elif buffer.numel() > max(_KEPT, 4 * count):
        buffer = _local.buffer = torch.empty(max(count, 1 << 16), dtype=torch.uint8)
    return buffer


def bytes_at(count: int) -> int:
    """Address of `tensor_of(count)`; valid until this thread's next call."""
    return tensor_of(count).data_ptr()


# The threads that C kernels run on: torch's own.

_log = logging.getLogger("compress.native")


@cache
def openmp() -> tuple[ctypes.c_void_p, ...] | None:
    """Addresses of GOMP_parallel, GOMP_barrier, omp_get_thread_num and omp_get_num_threads in the library torch runs on.

    They are what `set_pool` of a library with `c/pool.h` takes. The same library means the same threads: a second pool beside it
    would fight it for the cores. None: it was not found, kernels run on one thread, and the log says so once.
    """
    torch_folder = Path(torch.__file__).parent
    places = [torch_folder / "lib", torch_folder.parent / "torch.libs"]
    for place in places:
        for pattern in ("libgomp*", "libiomp5*", "libomp*"):
            for file in sorted(place.glob(pattern)):
                try:
                    library = ctypes.CDLL(str(file), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
                    names = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
                    return tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in names)
                except (OSError, AttributeError):
                    continue
    _log.warning("torch's OpenMP library was not found: CPU kernels run on one thread")
    return None


SOURCE = Path(__file__).parent / "c" / "kernels.c"
PARTS = (5, 4, 0, 2, 1, 3)  # of it (c/parts.h): seconds on a busy Zen 3, AVX-512: 16, 13, 12, 10, 9, 8
#: Of a `Linear`; integers of so many bits are that number.
KINDS = {"dense": 0, "s24": 1, "e2m1": 10} | {f"w{bits}": bits for bits in range(2, 9)}
KINDS |= {"IQ4_NL": 12, "Q2_K": 13, "Q3_K": 14, "Q4_K": 15, "Q5_K": 16, "Q6_K": 17, "IQ4_XS": 18}  # of GGUF
KINDS |= {"trellis": 19, "codebook2": 23, "codebook3": 24, "codebook4": 25}  # 20 to 22 are codes that were made bytes
# Of kinds that are not the bits of their codes: those, and bytes of levels that a row has for 32 columns.
_BYTES = {10: (4, 0), 12: (4, 0), 13: (2, 2), 14: (3, 2), 15: (4, 2), 16: (5, 2), 17: (6, 2), 18: (4, 1), 19: (2, 0)}
_BYTES |= {23: (2, 0), 24: (3, 0), 25: (4, 0)}
ROUNDINGS = {"integer": 1, "asymmetric": 2, "e4m3": 3, "e2m1": 4}  # of activations
ROUNDED_SCALES = {None: 0, "e8m0": 1, "e4m3": 2}  # of their scales
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: Of weights and of scales only. A float8 reads as one 2^8 times smaller; MX8 and BLOCK8 are float8 in blocks, each behind its scale;
#: E8M0 is a byte, the exponent of a power of two plus 127; DF11 is bfloat16 with coded exponents (c/dfloat11.h), TERNARY zero or
#: plus or minus the scale of the row (c/ternary.h).
FLOAT8, MX8, BLOCK8, E8M0, DF11, TERNARY = 3, 4, 5, 6, 7, 8
FLOAT8_UNIT = 256.0
SCALES = TYPES | {torch.float8_e4m3fn: FLOAT8, torch.uint8: E8M0}


def fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    """Fields of one type that stand one after the other in a structure."""
    return [(name, kind) for name in names]


class Rounding(ctypes.Structure):
    """`Rounding` of digits.h: how inputs are rounded; all zero: they are not."""

    _fields_ = (
        *fields(ctypes.c_int32, "kind", "bits", "scales", "span", "tail", "tail_bits"),
        *fields(ctypes.c_float, "threshold", "scale", "zero", "global_scale"),
    )


class Basis(ctypes.Structure):
    """`Basis` of linear.h: what inputs are multiplied by, or their order; all zero: they are read as they are."""

    _fields_ = (*fields(ctypes.c_int32, "left", "right"), *fields(ctypes.c_void_p, "l", "r", "order"))

    def __bool__(self) -> bool:
        return bool(self.right or self.order)


class Linear(ctypes.Structure):
    """`Linear` of linear.h."""

    _fields_ = (
        *fields(ctypes.c_int32, "kind", "weight_type", "scale_type", "group", "share", "code_bits", "digits"),
        *fields(ctypes.c_int64, "rows", "columns", "groups", "singles"),
        ("rounding", Rounding),
        ("basis", Basis),
        ("factor", ctypes.c_double),
        *fields(ctypes.c_void_p, "weight", "scale", "least", "zero", "sums", "bias", "runs", "first_run"),
        *fields(
            ctypes.c_void_p, "codes", "exponents", "escapes", "table", "single_columns", "single_values", "offsets"
        ),
        *fields(ctypes.c_void_p, "row_offsets", "row_scale"),
    )


def why_not_dtype(dtype: torch.dtype) -> str | None:
    """The reason C does not compute with activations of this dtype; None when it does."""
    if dtype in TYPES:
        return None
    return f"it computes in float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"


def group_bytes(kind: int, group: int) -> int:
    """Bytes that a group of so many columns takes a row in panels: `group_bytes` of planes.h, three words for 32 columns of 2:4."""
    if kind == KINDS["s24"]:
        return group // 32 * 12
    bits, levels = _BYTES.get(kind, (kind, 0))
    half = sum(-(-width * 16 // 32) for width in (8, 4, 2, 1) if bits & width)
    return group // 32 * (4 * bits + levels) + (4 * half if group % 32 else 0)


class Pack(ctypes.Structure):
    """`PackOrder` of pack.h."""

    _fields_ = (*fields(ctypes.c_void_p, "packed", "out"), *fields(ctypes.c_int64, "rows", "given", "panels", "words"))


def pack_stream(packed: torch.Tensor, panels: int, words: int) -> torch.Tensor | None:
    """Panels int32 `[panels, words, 32]` of 4-bit codes int32 `[rows, given words]`, zeros where there are none; None: no compiler."""
    found = load()
    if found is None:
        return None
    packed, out = packed.contiguous(), torch.empty(panels, words, 32, dtype=torch.int32)
    order = Pack(packed.data_ptr(), out.data_ptr(), *packed.shape, panels, words)
    found.panels_pack(ctypes.byref(order), torch.get_num_threads())
    return out


@cache
def load(instruction_set: str | None = None) -> ctypes.CDLL | None:
    """The library for an instruction set (None: the forced one or the best of this machine), or None without a compiler.

    Raises:
        RequestError: `COMPRESS_ISA` names what this machine cannot run.
    """
    name = instruction_set or instruction_sets.chosen()
    library = _compiled(name)
    if library is None:
        return None
    declare(library)
    if name == "amx" and library.isa_name() != b"amx":
        _log.warning("the C compiler knows no AMX (GCC does from 11 on): CPU kernels do without it")
    return library


def _compiled(name: str) -> ctypes.CDLL | None:
    tunings = instruction_sets.tunings(name)
    return native.library(SOURCE, tuple(("-ffp-contract=off", *tuning) for tuning in tunings), PARTS)


def begin() -> None:
    """Let a thread compile the library, or find it compiled, while the caller does something else; `load` waits for it."""
    with suppress(RequestError):  # `load` says that `COMPRESS_ISA` is wrong
        _begin(instruction_sets.chosen())


@cache
def _begin(name: str) -> None:
    def compile_it() -> None:
        with suppress(Exception):  # `load` meets it again
            _compiled(name)

    with suppress(RuntimeError):  # no more threads: `load` compiles it
        threading.Thread(target=compile_it, name="compiler", daemon=True).start()


def declare(library: ctypes.CDLL) -> None:
    """Gives the functions of a library of these kernels their types, and the kernels torch's threads."""
    p, i, q = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "isa_name": (ctypes.c_char_p, []),
        "linear_memory": (q, [p, q]),
        "linear_run": (None, [p, p, i, q, p, i, p, i]),
        "linear_dequantize": (None, [p, q, q, p, i, i]),
        "panels_pack": (None, [p, i]),
        "experts_memory": (q, [p, q, q]),
        "experts_run": (None, [p, p, i, q, q, p, p, p, i, p, i]),
        "router_run": (None, [p, p, q, p, p, p, i]),
        "attention": (None, [p, i]),
        "attention_memory": (q, [q]),
        "cache_record": (q, [p]),
        "cache_store": (None, [p, p, q, p, i]),
        "decoder_memory": (q, [p, q]),
        "decoder_step": (None, [p, i]),
        "decoder_copy": (None, [p, i]),
        "decoder_received": (None, [p, i]),
        "decoder_tokens": (None, [p, i]),
        "received_memory": (q, [q, i]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    functions = openmp()
    if functions is not None:
        library.set_pool(*functions)
