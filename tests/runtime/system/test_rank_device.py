"""Device of each process among those of its machine."""

from __future__ import annotations

import pytest
import torch

from runtime.errors import RequestError
from runtime.system.ranks import rank_device


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Four GPUs, which nothing may be put on: they are not there. This is process 2."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "2")
    return monkeypatch


@pytest.mark.parametrize("device", ["auto", "cuda", torch.device("cuda")])
def test_the_gpu_of_the_process(device: str | torch.device, machine: pytest.MonkeyPatch) -> None:
    assert rank_device(device) == torch.device("cuda", 2)
    machine.setenv("LOCAL_RANK", "0")
    assert rank_device(device) == torch.device("cuda", 0)


def test_a_launcher_may_show_each_process_its_own(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(torch.cuda, "device_count", lambda: 1)
    assert rank_device("auto") == torch.device("cuda", 0)


def test_more_processes_than_gpus(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("LOCAL_RANK", "4")
    with pytest.raises(RequestError, match=r"process 4 .* there are 4"):
        rank_device("cuda")


def test_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rank_device("cpu") == torch.device("cpu")
    with pytest.raises(RequestError, match="not on meta"):
        rank_device("meta")
