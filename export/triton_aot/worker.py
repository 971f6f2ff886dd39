"""Process that compiles kernels: pickled `(variant, capability)` pairs in on stdin, a pickled answer for each out on stdout.

Processes of their own because Triton reads the environment when it is imported (`build.py` sets it), keeps the interpreter's lock
while it compiles, and prints.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from runtime.errors import first_line
from runtime.kernels.triton import jit, signature
from runtime.kernels.triton.signature import Variant

_NO_RANDOM_ADDRESSES = 0x0040000  # ADDR_NO_RANDOMIZE of <linux/personality.h>


def compile_variant(variant: Variant, capability: int) -> Any:
    """Triton's compiled kernel, `.asm` and all, for compute capability 80, 90 or 100; no GPU is needed.

    The file with the kernel must have been imported.
    """
    types, constants, attributes = {}, {}, {}
    passed = dict(variant.passed)
    for index, (name, code) in enumerate(variant.arguments):
        types[name] = passed.get(name, "constexpr")
        if name not in passed:
            constants[(index,)] = signature.constant(code)
        elif code.endswith("/16"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    kernel = jit.Entry.known[variant.kernel].jitted
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(variant.options) | jit.OPTIONS)


def architecture(kernel: Any) -> str:
    """What a compiled kernel is for: "sm_80", "sm_90a"."""
    found = re.search(r"^\.target\s+(\w+)", kernel.asm["ptx"], re.MULTILINE)
    assert found is not None
    return found[1]


def remarks(kernel: Any, capability: int) -> str:
    """What `ptxas -v` says of the kernel's PTX."""
    ptxas = get_ptxas(capability).path
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.ptx"
        path.write_text(kernel.asm["ptx"], encoding="utf-8")
        command = [ptxas, "-v", f"--gpu-name={architecture(kernel)}", str(path), "-o", str(path.with_suffix(".cubin"))]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def resources(kernel: Any, capability: int) -> dict[str, int]:
    """`registers` a thread, `spill_bytes` (stores and loads), `shared` bytes a program, as `ptxas -v` tells for the PTX."""
    said = remarks(kernel, capability)
    registers, spills = re.search(r"Used (\d+) registers", said), re.findall(r"(\d+) bytes spill", said)
    assert registers is not None, said
    return {"registers": int(registers[1]), "spill_bytes": sum(map(int, spills)), "shared": int(kernel.metadata.shared)}


def _answer(variant: Variant, capability: int) -> dict[str, Any]:
    """The fields of `build.Built`."""
    try:
        kernel = compile_variant(variant, capability)
        meta = kernel.metadata
        for name, expected in (("num_ctas", 1), ("launch_cooperative_grid", False), ("launch_pdl", False)):
            if getattr(meta, name, expected) != expected:
                raise ValueError(f"a kernel with {name}={getattr(meta, name)} cannot be launched without triton")
        if meta.global_scratch_size or getattr(meta, "profile_scratch_size", 0):
            raise ValueError("a kernel that wants scratch memory cannot be launched without triton")
        ptx = kernel.asm["ptx"]
        used = resources(kernel, capability)
        entry = {
            "ptx_sha256": hashlib.sha256(ptx.encode()).hexdigest(), "architecture": architecture(kernel), "kernel": variant.kernel,
            "source": jit.Entry.known[variant.kernel].source, "symbol": meta.name, "arguments": dict(variant.arguments),
            "options": dict(variant.options), "num_warps": meta.num_warps, "shared": used["shared"],
            "scratch_pointers": len(re.findall(r"^\s*\.param ", ptx, re.MULTILINE)) - len(variant.passed),
            "registers": used["registers"], "spill_bytes": used["spill_bytes"],
        }  # fmt: skip
        return {"cubin": kernel.asm["cubin"], "entry": entry}
    except Exception as error:  # whatever the compiler raises is said about this kernel, and the next one is compiled
        return {"error": first_line(error)}


def _fix_addresses() -> None:
    """Let the programs started from here have the same addresses each time, where that is allowed.

    NVIDIA's assembler (ptxas 12.9, sm_100a) was seen to choose registers by the order of addresses: the same PTX gave one of two
    binaries, and always the same one without address randomization.
    """
    libc = ctypes.CDLL(None)
    before = libc.personality(ctypes.c_ulong(0xFFFFFFFF))
    if before != -1:
        libc.personality(ctypes.c_ulong(before | _NO_RANDOM_ADDRESSES))


def main() -> None:
    """Answer until the input ends."""
    _fix_addresses()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what triton prints is no answer
    for module in jit.MODULES:
        import_module(module)
    for variant, capability in pickle.load(sys.stdin.buffer):
        pickle.dump(_answer(variant, capability), answers)
        answers.flush()


if __name__ == "__main__":
    main()
