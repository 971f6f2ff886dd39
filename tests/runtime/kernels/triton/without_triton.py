"""A machine without triton: `python without_triton.py FOLDER`. What fails here fails by an assertion."""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class _Absent:
    """Import of triton fails as where it is not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main(folder: Path) -> None:
    import runtime.kernels.triton.base as base

    base.find_spec = lambda name: None if name == "triton" else find_spec(name)  # type: ignore[assignment]
    sys.meta_path.insert(0, _Absent())  # type: ignore[arg-type]
    log = _Log()
    logging.getLogger("compress.kernels").addHandler(log)

    import struct

    import torch
    from ahead_cases import CPU, FakeDriver, w4_layer, w4_tensors, w4_variants, write_kernels

    from runtime import kernels
    from runtime.engines.cuda import ops
    from runtime.kernels.base import Layer
    from runtime.kernels.reference import Reference
    from runtime.kernels.triton import aot, jit

    assert not jit.INSTALLED
    layer = w4_layer()
    kernel, tensors = w4_tensors(layer)
    assert kernel.why_not(layer) == "triton is not installed"
    assert kernels.names()[-1] == "reference"
    x = torch.randn(2, layer.shape[1]).bfloat16()
    expected = Reference().multiply(x, kernel.restore(tensors, layer), {}, layer, None)
    assert torch.equal(kernel.run(x, tensors, layer, None), expected), "without kernels it is computed in torch"

    driver = FakeDriver()
    variants = w4_variants(layer)
    assert aot.offer(write_kernels(folder / "some", variants[:1]), CPU, driver) == 1
    reason = kernel.why_not(layer)
    assert reason is not None
    assert "no kernel compiled ahead is right for" in reason
    assert aot.offer(write_kernels(folder / "all", variants), CPU, driver) == len(variants)
    assert kernel.why_not(layer) is None, "every launch has its kernel now"
    assert w4_tensors(w4_layer(group=64))[0].why_not(w4_layer(group=64)) is not None, "another group is another kernel"

    half = Layer(layer.entry, layer.shape, torch.float16, CPU)
    assert kernel.why_not(half) is not None
    assert aot.offer(write_kernels(folder / "half", w4_variants(half, torch.bfloat16)), CPU, driver)
    assert kernel.why_not(half) is None, "scales may be stored in another dtype than is computed in"

    wide = w4_layer(group=128)
    assert kernel.why_not(wide) is not None
    assert aot.offer(write_kernels(folder / "bias", w4_variants(wide, bias=True)), CPU, driver)
    assert kernel.why_not(wide) is None, "a model whose layers all have a bias brings no other kernels"

    log.lines.clear()
    for rows in (1, 2, 5, 16, 64, 70, 300):
        driver.launches.clear()
        x = torch.randn(rows, layer.shape[1]).bfloat16()
        out = kernel.run(x, tensors, layer, None)
        assert out.shape == (rows, layer.shape[0])
        assert driver.launches, rows
        assert struct.unpack_from("<QQ", driver.launches[0]["slots"]) == (x.data_ptr(), tensors["words"].data_ptr())
        assert driver.launches[0]["stream"] == 7
    assert not log.lines, log.lines

    driver.launches.clear()
    shifted = torch.randn(layer.shape[1] + 1).bfloat16()[1:].view(1, -1)
    expected = Reference().multiply(shifted, kernel.restore(tensors, layer), {}, layer, None)
    assert torch.equal(kernel.run(shifted, tensors, layer, None), expected), "no kernel assumes so little"
    assert not driver.launches
    assert any("no kernel compiled ahead is right for matvec.matvec_kernel" in line for line in log.lines), log.lines
    assert any("triton is not installed" in line for line in log.lines), log.lines

    between = ops.with_fallback(ops.kernels())
    weight = torch.randn(layer.shape[1]).bfloat16()
    for mine, truth in zip(between.rms_norm(x, weight, 1e-5), ops.rms_norm(x, weight, 1e-5), strict=True):
        assert torch.equal(mine, truth)
    assert ops.choose(CPU) is ops.TORCH
    assert not [name for name in sys.modules if name.partition(".")[0] == "triton"]
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
