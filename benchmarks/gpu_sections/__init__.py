"""Sections of `benchmarks/gpu.py`: what is checked and timed on a GPU, one module each.

A module has `check(bench)`, `timing(bench)`, or both. They record what they find on the bench, so that what was found before a crash or
a timeout is kept. `check` records cases, `timing` rows; whatever they raise is the reason why the part failed, `MissingPeerError` excepted.
"""

from __future__ import annotations

from dataclasses import dataclass

MISSING = 3  # exit code of a worker that lacks a peer


@dataclass(frozen=True)
class Section:
    """One section.

    Attributes:
        name: in the JSON, on the command line and on the screen.
        check: seconds that the check is expected to take on a GPU, compilation included; 0: there is none.
        timing: likewise of the timing. Both are shares of the time that is left, not limits.
        module: that computes it.
        for_peer: it times a peer alone: without a figure of it the timing is incomplete.
    """

    name: str
    check: float
    timing: float
    module: str = ""
    for_peer: bool = False

    def home(self) -> str:
        """Name of the module to import."""
        return self.module or f"gpu_sections.{self.name}"


#: In order: what tells most comes first, so that it is measured where time runs out.
SECTIONS = (
    Section("kernels", 180, 240),
    Section("attention", 60, 60),
    Section("llama", 60, 180),
    Section("vllm", 0, 180, for_peer=True),
    Section("gpt_fast", 0, 90, for_peer=True),
    Section("mixture", 30, 75),
    Section("kv_cache", 30, 90),
    Section("drafts", 45, 60),
    Section("compression", 60, 120),
    Section("tensorrt", 90, 90),
)
