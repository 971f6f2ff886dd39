"""A process that compiles kernels: a variant and a GPU a line of JSON in, what became of it a line out.

Processes of their own because triton reads the environment when it is imported (`build.py` sets it), keeps the interpreter's lock
while it compiles, and prints.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import os
import sys
from importlib import import_module
from typing import Any

_NO_RANDOM_ADDRESSES = 0x0040000  # ADDR_NO_RANDOMIZE of <linux/personality.h>


def main() -> None:
    """Serve until the input ends."""
    _fix_addresses()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what triton prints is no answer
    from runtime.kernels.triton import jit

    for module in jit.MODULES:
        import_module(module)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


def _fix_addresses() -> None:
    """Let the programs started from here have the same addresses each time, where that is allowed.

    NVIDIA's assembler (ptxas 12.9, sm_100a) was seen to choose registers by the order of addresses: the same PTX gave one of two
    binaries, and always the same one without address randomization.
    """
    libc = ctypes.CDLL(None)
    before = libc.personality(ctypes.c_ulong(0xFFFFFFFF))
    if before != -1:
        libc.personality(ctypes.c_ulong(before | _NO_RANDOM_ADDRESSES))


def _answer(task: dict[str, Any]) -> dict[str, Any]:
    try:
        return _compile(task)
    except Exception as error:  # whatever the compiler raises is said about this kernel, and the next one is compiled
        return {"error": (str(error).strip().splitlines() or [type(error).__name__])[0]}


def _compile(task: dict[str, Any]) -> dict[str, Any]:
    from export.triton_aot.compiled import build_variant, resources
    from runtime.kernels.triton.signature import Argument, Variant

    arguments = tuple(Argument.from_dict(argument, "task") for argument in task["arguments"])
    variant = Variant(task["kernel"], arguments, tuple(sorted(task["options"].items())))
    kernel = build_variant(variant, task["capability"])
    data, meta = kernel.asm["cubin"], kernel.metadata
    for name, expected in (("num_ctas", 1), ("launch_cooperative_grid", False), ("launch_pdl", False)):
        if getattr(meta, name, expected) != expected:
            raise ValueError(f"a kernel with {name}={getattr(meta, name)} cannot be launched without triton")
    if meta.global_scratch_size or getattr(meta, "profile_scratch_size", 0):
        raise ValueError("a kernel that wants scratch memory cannot be launched without triton")
    return {
        "cubin": base64.b64encode(data).decode(),
        "symbol": meta.name,
        "num_warps": meta.num_warps,
        "ptx_sha256": hashlib.sha256(kernel.asm["ptx"].encode()).hexdigest(),
        **resources(kernel, task["capability"]),
    }


if __name__ == "__main__":
    main()
