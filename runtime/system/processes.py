"""CPU of this machine as Linux tells it; elsewhere little is known and the portable code runs."""

from __future__ import annotations

import ctypes
import platform
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

#: Instructions that multiply matrices of a dtype, on x86 and ARM. AVX-512 without them emulates bfloat16 by way of float32.
_PRODUCTS = {
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16"},
    torch.float16: {"avx512_fp16", "amx_fp16"},  # on ARM torch has no such product, whatever the CPU has
    torch.int8: {"avx512_vnni", "avx_vnni", "amx_int8"},  # likewise
}


@cache
def flags() -> frozenset[str]:
    """Instruction sets (`flags` on x86, `Features` on ARM); empty where nobody says."""
    line = next(iter(facts("flags", "Features")), "")
    return frozenset(line.partition(":")[2].split())


def facts(*names: str) -> list[str]:
    """The distinct lines of /proc/cpuinfo that begin so, in order."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return []
    return list(dict.fromkeys(line for line in text.splitlines() if line.startswith(names)))


@cache
def grants_tiles() -> bool:
    """Whether Linux lets this process use AMX's tiles, which it must be asked for: all its threads, and processes that are forked."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18  # on x86-64
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


@cache
def identity() -> str:
    """What tells this CPU from others that share a home directory."""
    return "\n".join(
        [platform.machine(), platform.processor(), *sorted(facts("model name", "cache size", "flags", "Features"))]
    )


def name() -> str:
    """The CPU as it calls itself, or its architecture where nobody says."""
    known = next(iter(facts("model name")), "").partition(":")[2].strip()
    if not known and sys.platform == "darwin":
        asked = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        with suppress(OSError):
            known = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return known or platform.processor() or platform.machine()


def instruction_sets() -> list[str]:
    """Those that matter to products of matrices, sorted; empty where nobody says."""
    products = set().union(*_PRODUCTS.values())
    return sorted(flags() & (products | {"avx2", "fma", "avx512f", "asimd", "asimddp", "i8mm", "sve"}))


def multiplies(dtype: torch.dtype) -> bool:
    """Whether products of matrices of `dtype` run at full speed. Without such instructions, or without oneDNN, which uses them,
    torch multiplies 16-bit matrices several times slower than float32 ones, and int8 ones tens of times.
    """
    return dtype not in _PRODUCTS or (torch.backends.mkldnn.is_available() and bool(_PRODUCTS[dtype] & flags()))


# How a process that was started here ended, in words.


def how_it_ended(code: int | None) -> str:
    """What follows "the process ...", given its return code as `subprocess` tells it (None: it is not known)."""
    if code is None:
        return "ended without a word"
    if code >= 0:
        return f"ended with exit code {code}"
    if -code == signal.SIGKILL:
        return (
            "was killed (SIGKILL), most likely by the kernel because the machine ran out of memory: close other programs, ask for "
            "less at once, or use a machine with more"
        )
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was ended by {name}"
