"""A machine with several GPUs, made up: the current device is a number, and drivers write down what is launched on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch


class Machine:
    """GPUs of one thread. `launches`: (device, stream) of each launch."""

    def __init__(self) -> None:
        self.device = 0
        self.launches: list[tuple[int, int]] = []

    def exchange(self, device: int) -> int:
        before = self.device
        self.device = device if device >= 0 else before
        return before

    def stream(self, device: Any = None) -> SimpleNamespace:
        index = self.device if device is None else torch.device("cuda", device).index
        return SimpleNamespace(cuda_stream=0x500 + index)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(torch.cuda, "_exchange_device", made.exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", made.exchange)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.device)
    monkeypatch.setattr(torch.cuda, "current_stream", made.stream)
    return made
