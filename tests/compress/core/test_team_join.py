"""Joining the processes that a launcher has started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch

from compress.core.processes import Team
from runtime.errors import CompressError


@pytest.mark.parametrize(
    ("device", "gpu", "on_cpu"), [("auto", False, True), ("cpu", True, True), ("auto", True, False)]
)
def test_processes_meet_on_cpus_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, gpu: bool, on_cpu: bool
) -> None:
    asked = {}

    def accelerator(cpu: bool, **_options: Any) -> Any:
        asked["cpu"] = cpu
        return SimpleNamespace(num_processes=2, process_index=0)

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(accelerate, "Accelerator", accelerator)
    assert Team.join(device).size == 2
    assert asked == {"cpu": on_cpu}


def test_processes_that_do_not_find_each_other_do_not_work_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr(accelerate, "Accelerator", lambda **_: SimpleNamespace(num_processes=1, process_index=0))
    with pytest.raises(CompressError, match=r"\b1 of the 2 processes .*WORLD_SIZE"):
        Team.join("auto")
