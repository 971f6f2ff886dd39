"""Launches on a machine with several GPUs, by Triton and by the loader of compiled kernels: each enters its tensors' device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ahead_cases import FakeDriver, write_kernels

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from runtime.engines.cuda.engine import take_over
from runtime.kernels.triton import aot, fused, gpu, jit, signature, tuning
from runtime.kernels.triton.aot import CudaDriver

TARGET = 90


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    index = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.index)


def on(index: int, tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.as_subclass(OnGpu)
    made.index = index
    return made


def arguments(index: int) -> tuple[Any, ...]:
    """Of `swiglu_kernel`: x, out, stride, SIZE."""
    return on(index, torch.zeros(2, 64)), on(index, torch.zeros(2, 32)), 64, 32


class TritonDriver:
    """As much of Triton's driver as a launch asks for."""

    def __init__(self, machine: Any) -> None:
        from triton.backends.compiler import GPUTarget

        self.machine, self.target = machine, GPUTarget("cuda", TARGET, 32)
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 20, "multiprocessor_count": 132},
            load_binary=lambda name, binary, shared, device: (device, device, 16, 0, 1024),
        )

    def get_current_device(self) -> int:
        return self.machine.device

    def get_current_stream(self, device: int) -> int:
        return self.machine.stream(device).cuda_stream

    def get_current_target(self) -> Any:
        return self.target

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        assert metadata.enable_fp_fusion, "left to the default of this Triton"

        def launch(x: int, y: int, z: int, stream: int, function: int, *others: Any, **options: Any) -> None:
            assert function == self.machine.device, "loaded into one device, launched on another"
            self.machine.launches.append((self.machine.device, stream))

        return launch


@pytest.fixture
def by_triton(machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from triton.runtime.driver import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    monkeypatch.setattr(driver, "_active", TritonDriver(machine))
    monkeypatch.setattr(fused.swiglu_kernel, "jitted", type(fused.swiglu_kernel.jitted)(fused.swiglu_kernel.fn))


@pytest.fixture
def ahead(machine: Any, tmp_path: Path) -> Iterator[None]:
    class Driver(FakeDriver):
        device_type = "cuda"
        current = CudaDriver.current

        def launch(self, device: int, *others: Any) -> None:
            machine.launches.append((device, others[4]))

    call = fused.swiglu_kernel._named(arguments(0), {"BLOCK": 32, "num_warps": 4})
    directory = write_kernels(tmp_path, [signature.specialize(fused.swiglu_kernel, call)])
    assert aot.offer(directory, torch.device("cuda", 0), Driver(TARGET)) == 1
    yield
    aot.withdraw()


@pytest.mark.parametrize("way", ["by_triton", "ahead"])
def test_launches_enter_the_device_of_their_tensors(way: str, machine: Any, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(way)
    for index in (1, 0, 3, 1):
        machine.device = 2  # what the caller works on
        fused.swiglu_kernel[(2, 1)](*arguments(index), BLOCK=32, num_warps=4)
        assert machine.launches.pop() == (index, 0x500 + index)
        assert machine.device == 2
    assert not machine.launches


def test_the_device_is_left_where_a_launch_fails(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> bool:
        assert machine.device == 1
        raise RuntimeError("out of resources")

    monkeypatch.setattr(jit.Entry, "launcher", fails)
    with pytest.raises(RuntimeError, match="out of resources"):
        fused.swiglu_kernel[(2, 1)](*arguments(1), BLOCK=32)
    assert machine.device == 0


def test_candidates_are_timed_where_their_tensors_are(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are recorded, and the cache is flushed, on the current device."""
    seen: list[int] = []
    monkeypatch.setattr(tuning, "settled", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(seen.append(machine.device)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "made up")
    monkeypatch.setattr(tuning.tuning, "recall", lambda device, key, candidates, measure: measure())
    monkeypatch.setattr(tuning, "_median", lambda call: seen.append(machine.device) or float(len(seen)))
    candidates = [{"BLOCK": 1}, {"BLOCK": 2}]
    with tuning.tuning.measuring():
        assert tuning.choose("swiglu", (32,), arguments(3)[0], candidates, lambda config: None) == candidates[0]
    assert seen == [3, 3, 3]  # whether its stream is capturing is asked there too
    assert machine.device == 0


def test_other_vendors_have_no_compute_capability(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm calls its devices cuda, and numbers that look like NVIDIA's: kernels and the fused engine leave them to torch."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert gpu.capability(torch.device("cuda", 1)) == (9, 4)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert gpu.capability(torch.device("cuda", 1)) < (8, 0)
    engine = SimpleNamespace(device=torch.device("cuda", 1))
    assert take_over(engine) is None
