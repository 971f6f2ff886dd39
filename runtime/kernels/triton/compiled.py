"""Compile the kernels for a GPU that is not here, and read what the compiler says: registers, spills, shared memory.

The wrappers are called with meta tensors while every launch is written down instead of run, so what is compiled is what a GPU
would get: same constants, same specialization of arguments. Used by the tests and by `benchmarks/kernels_gpu.py --compile-only`.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int8: "i8", torch.uint8: "u8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One recorded launch."""

    kernel: Any
    arguments: dict[str, Any]
    grid: tuple[int, ...]


def record(call: Callable[[], Any]) -> list[Launch]:
    """The launches that `call` makes, none of which is run."""
    found: list[Launch] = []
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        names = [p.name for p in self.params]
        found.append(Launch(self, dict(zip(names, args, strict=False)) | kwargs, tuple(grid)))

    JITFunction.run = run
    try:
        call()
    finally:
        JITFunction.run = original
    return found


def build(launch: Launch, capability: int) -> Any:
    """Compile one launch for compute capability `capability` (80, 90, 100): triton's compiled kernel, `.asm` and all."""
    signature, constants, attributes, options = {}, {}, {}, {}
    names = {p.name: p for p in launch.kernel.params}
    for name, value in launch.arguments.items():
        parameter = names.get(name)
        if parameter is None:
            options[name] = value
        elif parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[(parameter.num,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            attributes[(parameter.num,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if abs(value) < 1 << 31 else "i64"
            if value % 16 == 0:
                attributes[(parameter.num,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    ordered = {p.name: signature[p.name] for p in launch.kernel.params}
    source = ASTSource(fn=launch.kernel, signature=ordered, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(kernel: Any, capability: int) -> dict[str, int]:
    """`registers` a thread, `spill_bytes` (stores and loads), `shared` bytes a program, as `ptxas -v` tells for the PTX."""
    from triton import knobs

    tools = knobs.nvidia
    ptxas = (tools.ptxas_blackwell if capability >= 100 and hasattr(tools, "ptxas_blackwell") else tools.ptxas).path
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.ptx"
        path.write_text(kernel.asm["ptx"], encoding="utf-8")
        architecture = re.search(r"\.target\s+(\w+)", kernel.asm["ptx"])
        assert architecture is not None
        command = [ptxas, "-v", f"--gpu-name={architecture[1]}", str(path), "-o", str(path.with_suffix(".cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = re.search(r"Used (\d+) registers", said), re.findall(r"(\d+) bytes spill", said)
    assert registers is not None, said
    return {"registers": int(registers[1]), "spill_bytes": sum(map(int, spills)), "shared": int(kernel.metadata.shared)}


def disassemble(kernel: Any) -> str:
    """SASS of the kernel (for reading; empty when the tool is missing)."""
    from triton import knobs

    with suppress(OSError, subprocess.CalledProcessError), tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return ""
