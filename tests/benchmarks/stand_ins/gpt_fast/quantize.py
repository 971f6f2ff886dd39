"""Stand-in for gpt-fast's `quantize.py`."""

from __future__ import annotations

from typing import Any


class WeightOnlyInt4QuantHandler:
    def __init__(self, mod: Any, groupsize: int) -> None:
        assert groupsize == 128
        self.mod = mod

    def convert_for_runtime(self) -> Any:
        return self.mod
