"""Instruction sets that the C kernels are compiled for; `COMPRESS_ISA` forces a lesser one than the best of this machine.

Where it is set, every C library is compiled with its flags. Where it is not, the linear kernels are compiled for the best set of this
table, the other libraries for the machine as the compiler knows it. What torch, oneDNN and BLAS compute is theirs:
`ATEN_CPU_CAPABILITY` and `ONEDNN_MAX_CPU_ISA` limit those.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import NamedTuple

from runtime.errors import RequestError
from runtime.system import processes

VARIABLE = "COMPRESS_ISA"
PORTABLE = "portable"


class Level(NamedTuple):
    """What an instruction set needs of the CPU (names of /proc/cpuinfo) and of the kernel, and the flags it is compiled with."""

    needs: frozenset[str]
    flags: tuple[str, ...]
    granted: Callable[[], bool] = lambda: True


_AVX512 = Level(
    frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}),
    ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c"),
)
#: Best first.
X86 = {
    "amx": Level(
        _AVX512.needs | {"amx_tile", "amx_int8"},
        (*_AVX512.flags, "-mamx-tile", "-mamx-int8"),
        processes.grants_tiles,
    ),
    "avx512": _AVX512,
    "avx2": Level(frozenset({"avx2", "fma", "f16c"}), ("-mavx2", "-mfma", "-mf16c")),
}


def available() -> list[str]:
    """Those this machine can run, best first; "portable" is always the last."""
    flags = processes.flags()
    return [name for name, level in X86.items() if level.needs <= flags and level.granted()] + [PORTABLE]


def forced() -> str | None:
    """The one that `COMPRESS_ISA` names; None: it names none.

    Raises:
        RequestError: it is unknown, or this machine cannot run it.
    """
    name = os.environ.get(VARIABLE) or None
    usable = available()
    if name is None or name in usable:
        return name
    why = "there is no such instruction set" if name not in X86 else "this machine cannot run it"
    raise RequestError(f"{VARIABLE}={name}: {why}; use {', '.join(usable)}, or leave it unset")


def chosen() -> str:
    """The one that the C kernels use: the forced one, or the best of this machine.

    Raises:
        RequestError: as `forced`.
    """
    return forced() or available()[0]


def preferred() -> str:
    """As `chosen`; the best of this machine where `COMPRESS_ISA` is wrong, which whoever loads kernels says."""
    name, usable = os.environ.get(VARIABLE), available()
    return name if name in usable else usable[0]


def tunings(name: str) -> tuple[tuple[str, ...], ...]:
    """Flags of the compiler for an instruction set; the first that it takes are to be used."""
    if name in X86:  # compilers that know no tiles (GCC before 11) leave AMX to those that do
        return (X86[name].flags, _AVX512.flags) if name == "amx" else (X86[name].flags,)
    # What the compiler makes of plain C; on x86 that is SSE2, elsewhere all the machine has.
    return ((),) if platform.machine().lower() in ("x86_64", "amd64", "i686") else (("-mcpu=native",), ())
