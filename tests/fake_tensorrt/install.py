"""Puts the stand-in in the place of TensorRT and of the GPU, for a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

import fake_tensorrt
from fake_tensorrt.running import CURRENT


class HostGpu:
    """A GPU that is the CPU."""

    device = torch.device("cpu")
    capability = (9, 0)
    handle = 17

    @contextmanager
    def work(self) -> Iterator[None]:
        CURRENT.append(self)
        try:
            yield
        finally:
            CURRENT.pop()

    def synchronize(self) -> None:
        pass


def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """From now on this machine has TensorRT and a GPU called Stand-in; returns the module."""
    import runtime.engines.tensorrt.engine as engine
    from export.tensorrt import build

    trt: Any = fake_tensorrt.module()
    gpu = {"name": "Stand-in", "compute_capability": "9.0", "memory_bytes": 80 << 30}
    monkeypatch.setattr(build, "missing", lambda: None)
    monkeypatch.setattr(build, "api", lambda: trt)
    monkeypatch.setattr(build, "gpu", lambda: gpu)
    monkeypatch.setattr(engine, "make_gpu", lambda device: HostGpu())
    monkeypatch.setattr(engine, "tensorrt_module", lambda facts: trt)
    return trt
